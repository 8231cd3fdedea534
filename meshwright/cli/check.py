"""meshwright check: is a plan legal, and does it fit? Exit code 0: fits, 1: does not, 2: not legal."""

from __future__ import annotations

import typer

from meshwright.cli.common import JsonFlag, show_json, show_line
from meshwright.cli.described import (
    BatchOption,
    ClusterOption,
    DtypeOption,
    MemoryOption,
    MicroBatchesOption,
    ModelOption,
    PlanArgument,
    PpOption,
    RecomputeOption,
    ScheduleOption,
    SeqLenOption,
    ShardOption,
    TpOption,
    ZeroOption,
    described,
)
from meshwright.cli.options import CalibrationOption, ConfidenceOption
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
    SequenceParallelOption,
    VirtualStagesOption,
    verdict,
)
from meshwright.report.run import run_line
from meshwright.report.text import fit_lines, summary_line


def check(
    plan: PlanArgument = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    global_batch: BatchOption = None,
    seq_len: SeqLenOption = None,
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
    """Say in one screen whether a plan is legal and fits. Exit code 0: it fits, 1: it does not, 2: it is not legal."""
    found = described("check", locals())
    if found.run is not None:
        fits = found.run.fits
        lines = [run_line(found.run.run), "legal: yes", verdict(found.run)]
    else:
        assert found.plan is not None  # noqa: S101 one of the two is there
        assert found.plan.predicted is not None  # noqa: S101 described prices
        fits = found.plan.predicted.peak_bytes <= found.plan.budget.usable_bytes
        lines = [summary_line(found.plan), "legal: yes", *fit_lines(found.plan)]
    if json:
        show_json({"legal": True, "fits": fits, "reasons": lines[2:]})
    else:
        for line in lines:
            show_line(line)
    if not fits:
        raise typer.Exit(1)
