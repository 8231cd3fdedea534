"""Options of commands that search for plans."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.errors import UserError
from meshwright.files import check_writable
from meshwright.search.space import SPACES, Partition
from meshwright.spec.schedule import ScheduleName

ModelOption = Annotated[str, typer.Option(help="A library name, a config.json, its folder, or a model file.")]
ClusterOption = Annotated[str, typer.Option(help="[nodes x] devices x kind, such as 2x8xa100-sxm-40g, or a YAML file.")]
BatchOption = Annotated[str, typer.Option(help="Samples a step: 64, 8..512 or auto.")]
SeqLenOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens a sample (default: what is usual for the model, if anything is).")
]
TargetSeqLenOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sample's targets, where a decoder follows an encoder.")
]
MemoryOption = Annotated[str | None, typer.Option(help="Memory a device may use, such as 40GB (default: all).")]
ReserveOption = Annotated[str | None, typer.Option(help="Part of it to hold back, such as 2GiB.")]
ConfidenceOption = Annotated[
    float | None,
    typer.Option(
        "--memory-confidence",
        min=0.5,
        max=0.99,
        help="Hold back what published runs say is needed to fit so surely (0.95 on GPUs, unless memory, "
        "reserve or a profile is given).",
    ),
]
CalibrationOption = Annotated[Path | None, typer.Option(help="Factors from own runs, written by calibrate.")]
DtypeOption = Annotated[Literal["bf16", "fp32"], typer.Option(help="Dtype that layers compute in.")]
DropoutOption = Annotated[float, typer.Option(help="Share of hidden states that training drops, such as 0.1.")]
ProfileOption = Annotated[Path | None, typer.Option(help="A measured profile.")]
SpaceOption = Annotated[str, typer.Option(help=f"Which plans to consider: {', '.join(SPACES)}.")]
PartitionOption = Annotated[
    Partition | None, typer.Option(help="How layers are cut into stages (default: as the space says, mostly exact).")
]
WithRuleOption = Annotated[list[str] | None, typer.Option("--with", help="Switch a rule of the trees on: T3.")]
WithoutRuleOption = Annotated[list[str] | None, typer.Option("--without", help="Switch a rule of the trees off: T3.")]
AlgorithmOption = Annotated[
    Literal["exact", "bmw"],
    typer.Option(help="bmw: cut stages by the paper's bi-objective loop, and show the exact answer beside it."),
]
ScheduleOption = Annotated[ScheduleName, typer.Option(help="Pipeline schedule.")]
StagesOption = Annotated[int | None, typer.Option(min=1, help="Fix the number of stages.")]
MicroBatchesOption = Annotated[int | None, typer.Option(min=1, help="Fix the number of micro-batches.")]
TimeLimitOption = Annotated[float, typer.Option(min=0.1, help="Seconds to search at most.")]
PlanOutputOption = Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan to this file.")]


def check_search(time_limit_s: float, output: Path | None) -> None:
    """Raise UserError for what is wrong before a search is worth its time."""
    if not math.isfinite(time_limit_s):
        raise UserError(f"time-limit: {time_limit_s} is not a number of seconds; write one such as 20 or 600")
    if output is not None:
        check_writable(output)
