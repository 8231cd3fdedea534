"""meshwright predict: the price of a plan file, or of one strategy for all layers under any framework."""

from __future__ import annotations

from meshwright.cli.common import JsonFlag, show_json, show_view
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
    run_views,
)
from meshwright.report.text import plan_view


def predict(
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
    """Predict step time and memory, term by term, of a plan file or of one strategy for all layers.

    With --framework the run is another framework's, in Megatron's terms.
    """
    found = described("predict", locals())
    if found.run is not None:
        if json:
            show_json(found.run.as_data())
            return
        for view in run_views(found.run):
            show_view(view)
    elif found.plan is not None and found.plan.predicted is not None:
        if json:
            show_json(found.plan.predicted.model_dump(mode="json"))
        else:
            show_view(plan_view(found.plan))
