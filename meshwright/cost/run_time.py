"""Seconds of one step of a uniform run: closed form, itemised.

Stages take c_i seconds a micro-batch (blocks; embedding on the first, head on the last). With m micro-batches, p stages
and v model chunks a stage (arXiv 2104.04473, section 2.2), x seconds a send,

    pipeline   m max c + (sum c - max c) / v + 2 (v m + p - 1) x
    step       (pipeline + what data parallelism adds at its end + optimizer) (1 + straggler share x log2 nodes)

Under DeepSpeed's pipeline engine tensor-parallel ranks are not in step: each block of each micro-batch takes
`engine_skew_s` more for every doubling of tp (two sources of published runs show the same seconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import log2

from meshwright.cost.run_layers import (
    LayerSeconds,
    Pass,
    Setting,
    block_seconds,
    embedding_seconds,
    head_seconds,
)
from meshwright.cost.run_memory_states import local_parameters
from meshwright.cost.run_sharding import block_shards_s, copies_s, end_of_step_s, end_shards_s, optimizer_s
from meshwright.cost.run_stages import Stage, stages_of
from meshwright.spec.constants import Constants, shipped_constants
from meshwright.spec.flops import step_flops
from meshwright.spec.model import BlockLayer
from meshwright.spec.run import RunSpec
from meshwright.spec.tensors import Lengths

_ACTIVATION_BYTES = 2
_OUT_OF_STEP = frozenset({"megatron-deepspeed", "deepspeed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one micro-batch on one stage, by what takes them.

    `gemm_s` to `ep_s` are of blocks, forward and backward; `recompute_s` is all that is done again; `copies_s` gradient
    accumulation or FSDP's copies; `shards_s` gathers and scatters that do not hide.
    """

    gemm_s: float
    attention_s: float
    memory_s: float
    launch_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    recompute_s: float
    embedding_s: float
    head_s: float
    copies_s: float
    shards_s: float

    @property
    def total_s(self) -> float:
        return sum(getattr(self, name) for name in _STAGE_TERMS)


_STAGE_TERMS = tuple(field.name for field in fields(StageSeconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Seconds of one step: what the slowest stage computes, what the pipeline adds, and what comes once a step.

    `num_tokens` and `ideal_s` are of the whole step: its tokens, and its model FLOPs at the devices' 16-bit peak.
    """

    stages: tuple[StageSeconds, ...]
    micro_batches_s: float
    bubble_s: float
    p2p_s: float
    engine_s: float
    gradients_s: float
    parameters_s: float
    optimizer_s: float
    straggler_s: float
    num_tokens: int
    ideal_s: float

    @property
    def terms_s(self) -> dict[str, float]:
        """The terms that add up to a step."""
        return {name: getattr(self, name) for name in STEP_TERMS}

    @property
    def step_s(self) -> float:
        return sum(getattr(self, name) for name in STEP_TERMS)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: attention in full, no recomputation."""
        return self.ideal_s / self.step_s


STEP_TERMS = tuple(
    name for name in (field.name for field in fields(RunSeconds)) if name not in ("stages", "num_tokens", "ideal_s")
)


def run_time(run: RunSpec, constants: Constants | None = None) -> RunSeconds:
    """Return the seconds of one step of `run`, with the shipped constants unless others are given."""
    setting = Setting.of(run, constants or shipped_constants())
    stages = stages_of(setting.model, run.pp)
    distinct = dict.fromkeys(stages)
    blocks = {block: block_seconds(setting, block) for block in {b: None for s in distinct for b, _ in s.blocks}}
    found = {stage: _stage_seconds(setting, stage, blocks) for stage in distinct}
    totals = [found[stage].total_s for stage in stages]
    slowest_s = max(totals)
    gradients_s, parameters_s = max((end_of_step_s(setting, stage, blocks) for stage in distinct), key=sum)
    once = {
        "micro_batches_s": run.num_micro_batches * slowest_s,
        "bubble_s": (sum(totals) - slowest_s) / run.virtual_stages,
        "p2p_s": _sends_s(setting),
        "engine_s": _engine_s(setting, stages),
        "gradients_s": gradients_s,
        "parameters_s": parameters_s,
        "optimizer_s": max(optimizer_s(setting, stage) for stage in distinct),
    }
    cluster = run.cluster
    flops = step_flops(setting.model, Lengths(run.seq_len), run.global_batch_size)
    return RunSeconds(
        stages=tuple(found[stage] for stage in stages),
        **once,
        straggler_s=sum(once.values()) * setting.constants.straggler_share * log2(cluster.num_nodes),
        num_tokens=run.global_batch_size * run.seq_len,
        ideal_s=flops / (cluster.num_devices * cluster.device.bf16_flops_per_s),
    )


def _stage_seconds(setting: Setting, stage: Stage, blocks: Mapping[BlockLayer, LayerSeconds]) -> StageSeconds:
    run = setting.run
    both = [0.0] * len(Pass._fields)
    recompute_s = moved = shards_s = 0.0
    for block, count in stage.blocks:
        seconds = blocks[block]
        both = [t + count * (f + b) for t, f, b in zip(both, seconds.forward, seconds.backward, strict=True)]
        recompute_s += count * seconds.recompute_s
        moved += count * local_parameters(block, run.tp, run.ep).total
        shards_s += count * block_shards_s(setting, block, seconds)
    embedding_s = embedding_seconds(setting).total_s if stage.is_first else 0.0
    head_s = head_seconds(setting).total_s if stage.is_last else 0.0
    for end, is_here in ((setting.model.token_embedding, stage.is_first), (setting.model.language_head, stage.is_last)):
        if is_here:
            moved += local_parameters(end, run.tp, 1).total
            shards_s += end_shards_s(setting, end)
    return StageSeconds(
        **dict(zip(Pass._fields, both, strict=True)),
        recompute_s=recompute_s,
        embedding_s=embedding_s,
        head_s=head_s,
        copies_s=copies_s(setting, moved),
        shards_s=shards_s,
    )


def _sends_s(setting: Setting) -> float:
    """Return the seconds of handing hidden states and their gradients from stage to stage; little of them hides."""
    run, links = setting.run, setting.links
    if run.pp == 1:
        return 0.0
    message_bytes = _ACTIVATION_BYTES * setting.tokens * setting.model.token_embedding.hidden_size
    # Tensor-parallel ranks send a part each and gather the parts on the other side, or keep them split.
    send_s = links.send_s(message_bytes / run.tp, run.tp * run.dp * run.cp)
    if not run.sequence_parallel:
        send_s += links.gather_s(message_bytes, run.tp, 1)
    return 2 * (run.virtual_stages * run.num_micro_batches + run.pp - 1) * send_s


def _engine_s(setting: Setting, stages: tuple[Stage, ...]) -> float:
    """Return what tensor-parallel ranks wait for each other under DeepSpeed's pipeline engine."""
    run = setting.run
    if run.pp == 1 or run.framework not in _OUT_OF_STEP:
        return 0.0
    blocks = max(sum(count for _, count in stage.blocks) for stage in stages)
    return (run.num_micro_batches + run.pp - 1) * blocks * setting.constants.engine_skew_s * log2(run.tp)
