"""What `predict` and `check` are asked about: a plan file, or one strategy for all layers, of any framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from meshwright.cli.common import JsonFlag
from meshwright.cli.options import CalibrationOption, ConfidenceOption, SeqLenOption, TargetSeqLenOption
from meshwright.cli.run_options import (
    AttentionOption,
    CpOption,
    DropoutOption,
    EpOption,
    Fp8Option,
    FrameworkOption,
    GranularityOption,
    LossOption,
    MicroBatchSizeOption,
    OperatorsOption,
    PricedRun,
    RunOptions,
    SequenceParallelOption,
    VirtualStagesOption,
    make_run,
    price_run,
)
from meshwright.cost.predict import predict as price
from meshwright.errors import UserError
from meshwright.search.planner import calibrated, load_plan, make_budget
from meshwright.search.space import even_boundaries
from meshwright.search.tree import divisors
from meshwright.spec import library
from meshwright.spec.job import JobSpec
from meshwright.spec.legality import why_illegal
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.sample import sample_lengths
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy
from meshwright.units import parse_bytes

PlanArgument = Annotated[Path | None, typer.Argument(help="A plan file; or describe a uniform plan with options.")]
ModelOption = Annotated[str | None, typer.Option(help="Library name, config.json, its folder, or a model file.")]
ClusterOption = Annotated[str | None, typer.Option(help="[nodes x] devices x kind, or a YAML file.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Samples a step.")]
TpOption = Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")]
PpOption = Annotated[int, typer.Option(min=1, help="Number of pipeline stages, as even as the blocks allow.")]
ZeroOption = Annotated[int, typer.Option(min=0, max=3, help="0 replicates, 1 to 3 shard.")]
ShardOption = Annotated[int | None, typer.Option(min=1, help="Ranks to shard over (default: all of dp).")]
RecomputeOption = Annotated[bool, typer.Option(help="Recompute the activations of all blocks.")]
MicroBatchesOption = Annotated[int | None, typer.Option(min=1, help="Micro-batches a step (default: 1).")]
ScheduleOption = Annotated[ScheduleName, typer.Option(help="Pipeline schedule.")]
DtypeOption = Annotated[Literal["bf16", "fp32"], typer.Option(help="Dtype that layers compute in.")]
MemoryOption = Annotated[str | None, typer.Option(help="Memory a device may use (default: all).")]

_SAME = 1e-9  # of seconds that were added up once more
# What only runs of other frameworks may say, with what it is when it is not given.
_PRICED_ONLY: dict[str, Any] = {
    "cp": 1, "ep": 1, "virtual_stages": 1, "sequence_parallel": False, "recompute_granularity": None,
    "attention": None, "loss": None, "operators": None, "fp8": "none", "dropout": False,
}  # fmt: skip
_GIVEN_BY_A_PLAN: dict[str, Any] = {
    "model": None, "cluster": None, "global_batch": None, "seq_len": None, "target_seq_len": None, "memory": None,
    "dp_shard": None, "tp": 1,
    "pp": 1, "zero_stage": 0, "recompute": False, "micro_batches": None, "micro_batch_size": None,
    "framework": "meshwright", "schedule": "1f1b", "dtype": "bf16", "memory_confidence": None, "calibration": None,
    **_PRICED_ONLY,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A priced plan of our own, or a priced run of another framework."""

    plan: Plan | None = None
    run: PricedRun | None = None


def about_a_run(answer: Callable[[Described, bool], None]) -> Callable[..., None]:
    """Return `answer`, which is told what was described and whether JSON is wanted, as a command with its options."""

    def command(**given: Any) -> None:
        answer(described(answer.__name__, given), given["json"])

    command.__name__, command.__doc__ = answer.__name__, answer.__doc__
    signature = inspect.signature(_options, eval_str=True)
    command.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess] what typer looks at
    command.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return command


def _options(
    plan: PlanArgument = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    global_batch: BatchOption = None,
    seq_len: SeqLenOption = None,
    target_seq_len: TargetSeqLenOption = None,
    tp: TpOption = 1,
    pp: PpOption = 1,
    zero_stage: ZeroOption = 0,
    dp_shard: ShardOption = None,
    recompute: RecomputeOption = False,
    micro_batches: MicroBatchesOption = None,
    micro_batch_size: MicroBatchSizeOption = None,
    schedule: ScheduleOption = "1f1b",
    dtype: DtypeOption = "bf16",
    memory: MemoryOption = None,
    memory_confidence: ConfidenceOption = None,
    calibration: CalibrationOption = None,
    framework: FrameworkOption = "meshwright",
    cp: CpOption = 1,
    ep: EpOption = 1,
    virtual_stages: VirtualStagesOption = 1,
    sequence_parallel: SequenceParallelOption = False,
    recompute_granularity: GranularityOption = None,
    dropout: DropoutOption = False,
    attention: AttentionOption = None,
    loss: LossOption = None,
    operators: OperatorsOption = None,
    fp8: Fp8Option = "none",
    json: JsonFlag = False,
) -> None:
    """Take the options of every command about one run."""


def described(command: str, given: dict[str, Any]) -> Described:
    """Return what the options of `command` describe, priced. Raises UserError when they do not make one."""
    if given["plan"] is not None:
        changed = [name for name, usual in _GIVEN_BY_A_PLAN.items() if given[name] != usual]
        if changed:
            raise UserError(f"{command}: a plan file says it all; leave out {', '.join(map(_flag, changed))}")
        return Described(plan=_priced_again(load_plan(given["plan"])))
    missing = [_flag(name) for name in ("model", "cluster", "global_batch") if given[name] is None]
    if missing:
        raise UserError(f"{command}: give a plan file, or also {', '.join(missing)}")
    if given["framework"] == "meshwright":
        wanted = _uniform_plan(given)
        return Described(plan=wanted.model_copy(update={"predicted": price(wanted)}))
    if given["calibration"] is not None:
        raise UserError("calibration: is of our own runs; it says nothing about another framework")
    memory_bytes = None if given["memory"] is None else parse_bytes(given["memory"])
    run = make_run(_run_options(given))
    return Described(run=price_run(run, memory_bytes, given["memory_confidence"]))


def _priced_again(plan: Plan) -> Plan:
    """Return `plan` with its price, and without a proof of another one: it was edited, or the price has changed."""
    predicted = price(plan)
    is_same = plan.predicted is not None and abs(plan.predicted.step_s / predicted.step_s - 1) < _SAME
    return plan.model_copy(update={"predicted": predicted} | ({} if is_same else {"proof": None}))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run_options(given: dict[str, Any]) -> RunOptions:
    granularity = given["recompute_granularity"] or ("full" if given["recompute"] else None)
    same = ("framework", "model", "cluster", "global_batch", "seq_len", "tp", "cp", "pp", "ep", "virtual_stages",
            "sequence_parallel", "zero_stage", "dropout", "attention", "loss", "operators", "fp8")  # fmt: skip
    return RunOptions(
        **{name: given[name] for name in same},
        micro_batch_size=_micro_batch_size(given),
        shard_ranks=given["dp_shard"],
        recompute=granularity,
    )


def _replicas(given: dict[str, Any]) -> int:
    devices = library.cluster(given["cluster"]).num_devices
    of_stage = _divided(given, "pp", devices, f"{devices} devices")
    replicas = _divided(given, "tp", of_stage, f"{of_stage} devices of a stage")
    return _divided(given, "cp", replicas, f"{replicas} groups of tp in a stage")


def _divided(given: dict[str, Any], name: str, total: int, whole: str) -> int:
    """Return `total` over the option `name`, or raise UserError that says which values divide it."""
    parts: int = given[name]
    if total % parts:
        allowed = ", ".join(map(str, divisors(total)))
        raise UserError(f"{name.replace('_', '-')}: {parts} does not divide {whole}; use one of {allowed}")
    return total // parts


def _micro_batch_size(given: dict[str, Any]) -> int:
    if given["micro_batch_size"] is None:
        batch, replicas = given["global_batch"], _replicas(given)
        samples = batch // _micro_batches(given)
        if samples % replicas:
            raise UserError(f"global-batch: a micro-batch of {samples} samples does not split over {replicas} replicas")
        return samples // replicas
    if given["micro_batches"] is not None:
        raise UserError("micro-batch-size: says how many micro-batches there are, and so does micro-batches; drop one")
    return given["micro_batch_size"]


def _micro_batches(given: dict[str, Any]) -> int:
    """Return the micro-batches of a step: given, or from the samples of one replica (Megatron's meaning)."""
    if given["micro_batch_size"] is None:
        if given["micro_batches"] is not None:
            _divided(given, "micro_batches", given["global_batch"], f"{given['global_batch']} samples a step")
        return given["micro_batches"] or 1
    size, replicas = _micro_batch_size(given), _replicas(given)
    if given["global_batch"] % (size * replicas):
        raise UserError(
            f"micro-batch-size: {given['global_batch']} samples a step are not divisible by {size * replicas} "
            f"({size} on each of {replicas} replicas)"
        )
    return given["global_batch"] // (size * replicas)


def _uniform_plan(given: dict[str, Any]) -> Plan:
    only = [_flag(name) for name, usual in _PRICED_ONLY.items() if given[name] != usual]
    if only:
        raise UserError(
            f"{only[0].removeprefix('--')}: our own runtime has no such choice; price another one's with --framework"
        )
    model, cluster = library.model(given["model"]), library.cluster(given["cluster"])
    budget = make_budget(cluster, given["memory"], None, given["memory_confidence"])
    if given["calibration"] is not None:
        cluster, budget = calibrated(cluster, budget, given["calibration"])
    lengths = sample_lengths(model, given["seq_len"], given["target_seq_len"])
    job = JobSpec(
        global_batch_size=given["global_batch"],
        seq_len=lengths.seq,
        target_seq_len=lengths.target_seq or None,
        param_dtype=given["dtype"],
    )
    bounds = even_boundaries(len(model.layers), given["pp"], model.merges)
    strategy = _strategy(given, _replicas(given))
    if bounds is None:
        raise UserError(
            f"pp: {given['pp']} stages need at least {given['pp']} blocks, but {model.name} has {model.num_blocks}"
        )
    num_micro_batches = _micro_batches(given)
    for layer in dict.fromkeys(model.layers):
        reason = why_illegal(layer, strategy, job.batch_size // num_micro_batches)
        if reason is not None:
            raise UserError(f"{layer.kind.replace('_', ' ')}: {reason}")
    block = strategy.model_copy(update={"recompute": "full"}) if given["recompute"] else strategy
    chosen = [strategy, *[block] * (len(model.layers) - 2), strategy]
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        budget=budget,
        num_devices=cluster.num_devices,
        global_batch_size=job.batch_size,
        num_micro_batches=num_micro_batches,
        schedule=given["schedule"],
        stages=tuple(StagePlan.of(chosen[low:high]) for low, high in pairwise(bounds)),
    )


def _strategy(given: dict[str, Any], dp: int) -> Strategy:
    tp, zero_stage, dp_shard = given["tp"], given["zero_stage"], given["dp_shard"]
    if dp == 1 and zero_stage:
        raise UserError(
            f"zero-stage: {zero_stage} shards over data-parallel ranks, but tp and pp leave a dp of 1; use 0"
        )
    if zero_stage == 0:
        if dp_shard not in (None, 1):
            raise UserError(f"dp-shard: {dp_shard} needs zero-stage 2 or 3 and a dp of at least 2 (dp is {dp})")
        return Strategy(tp=tp, dp_replicate=dp)
    replicas = 1 if dp_shard is None else _divided(given, "dp_shard", dp, f"a dp of {dp}")
    return Strategy(tp=tp, dp_replicate=replicas, dp_shard=dp // replicas, zero_stage=zero_stage)
