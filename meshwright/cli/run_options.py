"""A uniform run from the command line, in Megatron's terms, for any framework."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import RenderableType

from meshwright.cost.run_memory import MomentBytes, RunBytes, run_memory
from meshwright.cost.run_time import RunSeconds, run_time
from meshwright.errors import UserError
from meshwright.files import make_spec
from meshwright.report.run import moments_table, run_line, software_line, stage_seconds_table, step_seconds_table
from meshwright.spec import library
from meshwright.spec.accuracy import known_errors
from meshwright.spec.frameworks import default_software
from meshwright.spec.memory import USUAL_CONFIDENCE, margin_bytes
from meshwright.spec.run import FrameworkName, RunSpec
from meshwright.spec.sample import sample_lengths
from meshwright.units import show_bytes, show_percent, show_seconds

FrameworkOption = Annotated[
    FrameworkName, typer.Option(help="Whose run is priced: it decides what is held, gathered and overlapped.")
]
MicroBatchSizeOption = Annotated[
    int | None, typer.Option(min=1, help="Samples of a micro-batch on one replica (Megatron's meaning).")
]
CpOption = Annotated[int, typer.Option(min=1, help="Context-parallel degree (priced only).")]
EpOption = Annotated[int, typer.Option(min=1, help="Expert-parallel degree (priced only).")]
VirtualStagesOption = Annotated[int, typer.Option(min=1, help="Model chunks a device, interleaved (priced only).")]
SequenceParallelOption = Annotated[bool, typer.Option(help="Megatron's sequence parallelism (priced only).")]
GranularityOption = Annotated[
    Literal["full", "selective", "operators"] | None,
    typer.Option(help="Recompute full layers (as --recompute does), attention cores (selective), or by operator."),
]
AttentionOption = Annotated[
    Literal["flash2", "flash1", "unfused"] | None, typer.Option(help="Attention kernel (default: the framework's).")
]
LossOption = Annotated[
    Literal["eager", "compiled", "vocab_parallel", "fused"] | None,
    typer.Option(help="Cross-entropy (default: the framework's)."),
]
OperatorsOption = Annotated[
    Literal["fused", "eager"] | None, typer.Option(help="Norms and activations (default: the framework's).")
]
Fp8Option = Annotated[Literal["none", "tensorwise", "rowwise"], typer.Option(help="fp8 matrix products of blocks.")]
DropoutOption = Annotated[bool, typer.Option(help="The model trains with dropout.")]

_RECOMPUTE: dict[str, Literal["full", "attention", "operators"]] = {
    "full": "full", "selective": "attention", "operators": "operators",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a uniform run as they were given."""

    framework: FrameworkName
    model: str
    cluster: str
    global_batch: int
    seq_len: int | None
    micro_batch_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    shard_ranks: int | None = None
    recompute: str | None = None
    dropout: bool = False
    attention: str | None = None
    loss: str | None = None
    operators: str | None = None
    fp8: str = "none"


def make_run(given: RunOptions) -> RunSpec:
    """Return the run that the options describe. Raises UserError for one that cannot be."""
    software = default_software(given.framework).model_dump()
    chosen = {"attention": given.attention, "loss": given.loss, "operators": given.operators}
    software |= {name: value for name, value in chosen.items() if value is not None} | {"fp8": given.fp8}
    model = library.model(given.model)
    return make_spec(
        RunSpec,
        model=model,
        cluster=library.cluster(given.cluster),
        framework=given.framework,
        software=software,
        seq_len=sample_lengths(model, given.seq_len, None).seq,
        global_batch_size=given.global_batch,
        micro_batch_size=given.micro_batch_size,
        tp=given.tp,
        cp=given.cp,
        pp=given.pp,
        ep=given.ep,
        virtual_stages=given.virtual_stages,
        sequence_parallel=given.sequence_parallel,
        zero_stage=given.zero_stage,
        shard_ranks=given.shard_ranks,
        recompute="none" if given.recompute is None else _RECOMPUTE[given.recompute],
        dropout=given.dropout,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRun:
    """A run, its price, and whether it fits a device with the margin of a confidence."""

    run: RunSpec
    seconds: RunSeconds
    memory: RunBytes
    memory_bytes: int
    margin_bytes: float

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes + self.margin_bytes <= self.memory_bytes

    def as_data(self) -> dict[str, object]:
        """Return the price as plain data."""
        errors = known_errors(self.run)
        return {
            "step_s": self.seconds.step_s,
            "tokens_per_s": self.seconds.tokens_per_s,
            "mfu": self.seconds.mfu,
            "terms_s": self.seconds.terms_s,
            "stages_s": [asdict(stage) for stage in self.seconds.stages],
            "peak_bytes": self.memory.peak_bytes,
            "margin_bytes": self.margin_bytes,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "stages_bytes": [
                [{"phase": m.phase, "moment": m.moment, **moment_terms(m)} for m in stage.phases]
                for stage in self.memory.stages
            ],
            "expected_error": None if errors is None else errors.model_dump(mode="json"),
        }


def price_run(run: RunSpec, memory_bytes: int | None, confidence: float | None) -> PricedRun:
    """Return the price of `run`; raise UserError when the budget is more than a device has."""
    available = run.cluster.device.memory_bytes
    if memory_bytes is not None and memory_bytes > available:
        raise UserError(
            f"memory: {show_bytes(memory_bytes)} is more than a {run.cluster.device.name} has ({show_bytes(available)})"
        )
    memory = run_memory(run, "device")
    return PricedRun(
        run=run,
        seconds=run_time(run),
        memory=memory,
        memory_bytes=available if memory_bytes is None else memory_bytes,
        margin_bytes=margin_bytes(memory.peak_bytes, "device", run.framework, confidence or USUAL_CONFIDENCE),
    )


def run_views(priced: PricedRun) -> list[RenderableType]:
    """Return what there is to see of a priced run: lines and tables."""
    run, seconds = priced.run, priced.seconds
    price = (
        f"predicted: {show_seconds(seconds.step_s)} a step, {seconds.tokens_per_s:,.0f} tokens/s, mfu "
        f"{100 * seconds.mfu:.1f} % (model FLOPs, attention in full, no recomputation)"
    )
    memory = priced.memory
    moments = [
        (index, moment.phase, moment.moment, moment_terms(moment))
        for index, stage in enumerate(memory.stages)
        for moment in (stage.phases if index == memory.peak_stage else (stage.peak,))
    ]
    return [
        run_line(run),
        software_line(run),
        price,
        _error_line(run),
        step_seconds_table(seconds.terms_s),
        stage_seconds_table([asdict(stage) for stage in seconds.stages]),
        moments_table(moments),
        verdict(priced),
    ]


def verdict(priced: PricedRun) -> str:
    """Return whether the run fits, and by how much."""
    need = priced.memory.peak_bytes + priced.margin_bytes
    left = priced.memory_bytes - need
    return (
        f"peak {show_bytes(priced.memory.peak_bytes)} on each device of stage {priced.memory.peak_stage} "
        f"({priced.memory.peak.phase}: {priced.memory.peak.moment}), {show_bytes(priced.margin_bytes)} of margin, "
        f"{show_bytes(priced.memory_bytes)} there: "
        + (f"fits, {show_bytes(left)} left" if priced.fits else f"DOES NOT FIT, {show_bytes(-left)} short")
    )


def moment_terms(moment: MomentBytes) -> dict[str, float]:
    """Return the byte terms of a moment."""
    return {name: value for name, value in moment._asdict().items() if name.endswith("_bytes")}


def _error_line(run: RunSpec) -> str:
    errors = known_errors(run)
    if errors is None:
        return "expected error: not known for this framework and device; no published run of the kind was priced"
    return (
        f"expected error of the step: median {show_percent(errors.median).lstrip('+')}, 9 of 10 within "
        f"{show_percent(errors.p90).lstrip('+')} ({errors.num_runs} published runs {errors.of})"
    )
