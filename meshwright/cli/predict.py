"""meshwright predict: the price of a plan file, or of one strategy for all layers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.common import JsonFlag, show_json, show_view
from meshwright.cost.predict import predict as price
from meshwright.errors import UserError
from meshwright.report.text import plan_view
from meshwright.search.planner import load_plan, make_budget
from meshwright.search.space import even_boundaries
from meshwright.spec import library
from meshwright.spec.base import divide
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy


def predict(
    plan: Annotated[Path | None, typer.Argument(help="A plan file; or describe a uniform plan with options.")] = None,
    model: Annotated[str | None, typer.Option(help="Library name, config.json, its folder, or a model file.")] = None,
    cluster: Annotated[str | None, typer.Option(help="[nodes x] devices x kind, or a YAML file.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Samples a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens a sample.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Number of pipeline stages, as even as the blocks allow.")] = 1,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="0 replicates, 2 and 3 shard.")] = 0,
    dp_shard: Annotated[int | None, typer.Option(min=1, help="Ranks to shard over (default: all of dp).")] = None,
    recompute: Annotated[bool, typer.Option(help="Recompute the activations of all blocks.")] = False,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches a step.")] = 1,
    schedule: Annotated[ScheduleName, typer.Option(help="Pipeline schedule.")] = "1f1b",
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Dtype that layers compute in.")] = "bf16",
    memory: Annotated[str | None, typer.Option(help="Memory a device may use (default: all).")] = None,
    json: JsonFlag = False,
) -> None:
    """Predict step time and memory, term by term, of a plan file or of one strategy for all layers."""
    if plan is not None:
        given = {"model": model, "cluster": cluster, "global-batch": global_batch, "seq-len": seq_len, "memory": memory,
                 "dp-shard": dp_shard}  # fmt: skip
        changed = {"tp": tp > 1, "pp": pp > 1, "zero-stage": zero_stage > 0, "recompute": recompute,
                   "micro-batches": micro_batches > 1}  # fmt: skip
        is_given = {name: value is not None for name, value in given.items()} | changed
        if extra := [f"--{name}" for name, yes in is_given.items() if yes]:
            raise UserError(f"predict: a plan file says it all; leave out {', '.join(extra)}")
        wanted = load_plan(plan)
    else:
        needed = {"model": model, "cluster": cluster, "global-batch": global_batch, "seq-len": seq_len}
        missing = [f"--{name}" for name, value in needed.items() if value is None]
        if missing or model is None or cluster is None or global_batch is None or seq_len is None:
            raise UserError(f"predict: give a plan file, or also {', '.join(missing)}")
        wanted = _uniform_plan(
            model,
            cluster,
            JobSpec(global_batch_size=global_batch, seq_len=seq_len, param_dtype=dtype),
            degrees=(tp, pp, zero_stage, dp_shard),
            recompute=recompute,
            micro_batches=micro_batches,
            schedule=schedule,
            memory=memory,
        )
    priced = wanted.model_copy(update={"predicted": price(wanted)})
    if json:
        assert priced.predicted is not None  # noqa: S101 set just now
        show_json(priced.predicted.model_dump(mode="json"))
    else:
        show_view(plan_view(priced))


def _uniform_plan(
    model_name: str,
    cluster_name: str,
    job: JobSpec,
    *,
    degrees: tuple[int, int, int, int | None],
    recompute: bool,
    micro_batches: int,
    schedule: ScheduleName,
    memory: str | None,
) -> Plan:
    model, cluster = library.model(model_name), library.cluster(cluster_name)
    tp, pp, zero_stage, dp_shard = degrees
    dp = divide(divide(cluster.num_devices, pp, "devices over pp"), tp, "devices of a stage over tp")
    strategy = _strategy(tp, dp, zero_stage, dp_shard)
    bounds = even_boundaries(len(model.layers), pp)
    if bounds is None:
        raise UserError(f"pp: {pp} stages need at least {pp} blocks, but {model.name} has {model.num_blocks}")
    block = strategy.model_copy(update={"recompute": "full"}) if recompute else strategy
    chosen = [strategy, *[block] * model.num_blocks, strategy]
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        budget=make_budget(cluster, memory),
        num_devices=cluster.num_devices,
        global_batch_size=job.batch_size,
        num_micro_batches=micro_batches,
        schedule=schedule,
        stages=tuple(StagePlan.of(chosen[low:high]) for low, high in pairwise(bounds)),
    )


def _strategy(tp: int, dp: int, zero_stage: int, dp_shard: int | None) -> Strategy:
    if dp == 1 and zero_stage:
        raise UserError(
            f"zero-stage: {zero_stage} shards over data-parallel ranks, but tp and pp leave a dp of 1; use 0"
        )
    if zero_stage == 0:
        if dp_shard not in (None, 1):
            raise UserError(f"dp-shard: {dp_shard} needs zero-stage 2 or 3 and a dp of at least 2 (dp is {dp})")
        return Strategy(tp=tp, dp_replicate=dp)
    shards = dp if dp_shard is None else dp_shard
    replicas = divide(dp, shards, "dp over dp-shard")
    return Strategy(tp=tp, dp_replicate=replicas, dp_shard=shards, zero_stage=zero_stage)  # type: ignore[arg-type]
