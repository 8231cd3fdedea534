"""Seconds of one step of a uniform run: closed form, itemised.

Stages take c_i seconds a micro-batch (blocks, embedding on the first, head on the last). With m micro-batches, p stages
and v model chunks a stage (arXiv 2104.04473, section 2.2):

    pipeline   m max c + (sum c - max c) / v, and for each border 2 v m sends that hide little plus 2 (p-1) that fill
    step       pipeline + what data parallelism adds at the end + optimizer, stretched by stragglers

Data parallelism beside computing costs `exposed_share` of what fits and all of what does not (`_beside_s`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from meshwright.cost.run_layers import (
    LayerSeconds,
    Rates,
    block_seconds,
    embedding_seconds,
    head_seconds,
    rates_of,
)
from meshwright.cost.run_links import Links
from meshwright.cost.run_stages import Stage, stages_of
from meshwright.spec.constants import Constants, shipped_constants
from meshwright.spec.flops import step_flops
from meshwright.spec.frameworks import held_of
from meshwright.spec.model import LayerSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.run import HeldBytes, RunSpec

_FP8_GATHER_SHARE = 0.55  # weights of blocks in 8 bit, the rest in 16
_BUCKET_BYTES = 256 * 2**20
EXP: dict = {}
_REDUCE_SHARE = 0.9  # of a backward pass during which gradients are ready to reduce
_COPY_BYTES = 16  # FSDP: per parameter, gathers copied out and gradients copied in


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one micro-batch on one stage, by what takes them. `gemm_s` ... `ep_s` are forward and backward."""

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
        return (
            self.gemm_s + self.attention_s + self.memory_s + self.launch_s + self.tp_s + self.cp_s + self.ep_s
            + self.recompute_s + self.embedding_s + self.head_s + self.copies_s + self.shards_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Seconds of one step: what the slowest stage computes, what the pipeline adds, and what comes once a step."""

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
    peak_model_s: float

    @property
    def step_s(self) -> float:
        return (
            self.micro_batches_s + self.bubble_s + self.p2p_s + self.engine_s + self.gradients_s + self.parameters_s
            + self.optimizer_s + self.straggler_s
        )

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: model FLOPs over what all devices could at their 16-bit peak."""
        return self.peak_model_s / self.step_s


@dataclass(frozen=True, slots=True)
class _Pricer:
    """One run with everything that its terms share."""

    run: RunSpec
    constants: Constants
    rates: Rates
    links: Links
    held: HeldBytes


def run_time(run: RunSpec, constants: Constants | None = None) -> RunSeconds:
    """Return the seconds of one step of `run`, with the shipped constants unless others are given."""
    constants = constants or shipped_constants()
    links = Links.of(run.cluster, constants)
    p = _Pricer(run, constants, rates_of(run, constants), links, held_of(run))
    stages = stages_of(run.model, run.pp)
    cache: dict[LayerSpec, LayerSeconds] = {}
    for stage in stages:
        for layer, _ in stage.blocks:
            if layer not in cache:
                cache[layer] = block_seconds(run, layer, p.rates, links, constants)
    done: dict[Stage, StageSeconds] = {}
    seconds = tuple(done[s] if s in done else done.setdefault(s, _stage_s(p, s, cache)) for s in stages)
    micro_batches_s, bubble_s, p2p_s = _pipeline_s(p, [s.total_s for s in seconds])
    engine_s = _engine_s(p, stages)
    distinct = list(done)
    gradients_s, parameters_s = _end_of_step_s(p, distinct, cache)
    optimizer_s = max(_optimizer_s(p, s) for s in distinct)
    total_s = micro_batches_s + bubble_s + p2p_s + engine_s + gradients_s + parameters_s + optimizer_s
    nodes = run.cluster.num_nodes
    flops = step_flops(run.model, run.seq_len, run.global_batch_size)
    return RunSeconds(
        stages=seconds,
        micro_batches_s=micro_batches_s,
        bubble_s=bubble_s,
        p2p_s=p2p_s,
        engine_s=engine_s,
        gradients_s=gradients_s,
        parameters_s=parameters_s,
        optimizer_s=optimizer_s,
        straggler_s=total_s * constants.straggler_share * log2(nodes),
        num_tokens=run.global_batch_size * run.seq_len,
        peak_model_s=flops / (run.cluster.num_devices * run.cluster.device.bf16_flops_per_s),
    )


def _stage_s(p: _Pricer, stage: Stage, cache: dict[LayerSpec, LayerSeconds]) -> StageSeconds:
    gemm_s = attention_s = memory_s = launch_s = tp_s = cp_s = ep_s = recompute_s = copies_s = shards_s = 0.0
    for layer, count in stage.blocks:
        seconds = cache[layer]
        forward, backward = seconds.forward, seconds.backward
        gemm_s += count * (forward.gemm_s + backward.gemm_s)
        attention_s += count * (forward.attention_s + backward.attention_s)
        memory_s += count * (forward.memory_s + backward.memory_s)
        launch_s += count * (forward.launch_s + backward.launch_s)
        tp_s += count * (forward.tp_s + backward.tp_s)
        cp_s += count * (forward.cp_s + backward.cp_s)
        ep_s += count * (forward.ep_s + backward.ep_s)
        recompute_s += count * seconds.recompute_s
        copies_s += count * _copies_s(p, sum(_local_parameters(layer, p.run.tp, p.run.ep)))
        shards_s += count * _shards_s(p, layer, seconds)
    embedding_s = head_s = 0.0
    for layer, is_here in ((p.run.model.embedding, stage.is_first), (p.run.model.head, stage.is_last)):
        if is_here:
            copies_s += _copies_s(p, sum(_local_parameters(layer, p.run.tp, 1)))
            shards_s += _ends_shards_s(p, layer)
    if stage.is_first:
        embedding_s = embedding_seconds(p.run, p.rates, p.links).total_s
    if stage.is_last:
        head_s = head_seconds(p.run, p.rates, p.links).total_s
    return StageSeconds(
        gemm_s=gemm_s, attention_s=attention_s, memory_s=memory_s, launch_s=launch_s, tp_s=tp_s, cp_s=cp_s, ep_s=ep_s,
        recompute_s=recompute_s, embedding_s=embedding_s, head_s=head_s, copies_s=copies_s, shards_s=shards_s,
    )


def _is_fsdp(p: _Pricer) -> bool:
    return p.run.zero_stage >= 2 and p.run.num_shards > 1


@lru_cache(maxsize=4096)
def _local_parameters(layer: LayerSpec, tp: int, ep: int) -> tuple[float, float]:
    """Return the parameters that one rank of a stage holds or gathers: shared by all ranks, and of its experts."""
    shared = routed = 0.0
    for parameter in layer_parameters(layer):
        local = parameter.num_elements / (1 if parameter.tp_dim is None else tp)
        if parameter.is_of_experts:
            routed += local / ep
        else:
            shared += local
    return shared, routed


def _stage_parameters(p: _Pricer, stage: Stage) -> tuple[float, float]:
    tp, ep, model = p.run.tp, p.run.ep, p.run.model
    shared = routed = 0.0
    for layer, count in stage.blocks:
        of_layer = _local_parameters(layer, tp, ep)
        shared, routed = shared + count * of_layer[0], routed + count * of_layer[1]
    if stage.is_first:
        shared += _local_parameters(model.embedding, tp, 1)[0]
    if stage.is_last and not (model.tied_embedding and stage.is_first):
        shared += _local_parameters(model.head, tp, 1)[0]
    return shared, routed


def _copies_s(p: _Pricer, parameters: float) -> float:
    """Return the seconds of adding gradients to those of earlier micro-batches, or of FSDP's copies."""
    if _is_fsdp(p):
        moved = _COPY_BYTES
    elif p.run.framework == "megatron" and p.held.gradient_bytes > 2:
        moved = 0  # fp32 main gradients are summed inside the weight gradients' products
    else:
        moved = 2 * p.held.gradient_bytes
    return parameters * moved / p.rates.memory_bytes_per_s


def _beside_s(communication_s: float, window_s: float, share: float) -> float:
    """Return what communication adds to computing of `window_s` that it runs beside."""
    return max(0.0, communication_s - window_s) + share * min(communication_s, window_s)


def _shards_s(p: _Pricer, layer: LayerSpec, seconds: LayerSeconds) -> float:
    """Return what gathering and scattering one layer's shards adds to a micro-batch (FSDP)."""
    if not _is_fsdp(p):
        return 0.0
    gather_s, scatter_s = _gather_and_scatter_s(p, layer)
    share = p.constants.exposed_share
    backward_s = scatter_s + (gather_s if p.run.zero_stage == 3 else 0.0)
    return _beside_s(gather_s, seconds.forward.total_s, share) + _beside_s(
        backward_s, seconds.backward.total_s + seconds.recompute_s, share
    )


def _gather_and_scatter_s(p: _Pricer, layer: LayerSpec) -> tuple[float, float]:
    run, links = p.run, p.links
    ranks, shards = run.dp * run.cp, run.num_shards
    gather_s = scatter_s = 0.0
    shared, routed = _local_parameters(layer, run.tp, run.ep)
    gather_bytes = p.held.gather_bytes * (_FP8_GATHER_SHARE if run.software.fp8_gather else 1)
    for elements, ep in ((shared, 1), (routed, run.ep)):
        if elements and shards > ep:
            gather_s += links.gather_s(gather_bytes * elements, shards // ep, run.tp * ep)
            scatter_s += links.gather_s(p.held.reduce_bytes * elements, shards // ep, run.tp * ep)
            if ranks > shards:
                own = p.held.reduce_bytes * elements / (shards // ep)
                scatter_s += links.all_reduce_s(own, ranks // shards, run.tp * shards)
    return gather_s, scatter_s


def _ends_shards_s(p: _Pricer, layer: LayerSpec) -> float:
    """Return the same for embedding or head: half of it hides."""
    if not _is_fsdp(p):
        return 0.0
    gather_s, scatter_s = _gather_and_scatter_s(p, layer)
    return (2 * gather_s + scatter_s) / 2


def _pipeline_s(p: _Pricer, stages: list[float]) -> tuple[float, float, float]:
    run = p.run
    slowest = max(stages)
    micro_batches_s = run.num_micro_batches * slowest
    if run.pp == 1:
        return micro_batches_s, 0.0, 0.0
    bubble_s = (sum(stages) - slowest) / run.virtual_stages
    hidden = run.model.embedding.hidden_size
    message = 2 * run.micro_batch_size * run.seq_len / run.cp * hidden
    # Tensor-parallel ranks send a part each and gather it in their node, or keep it split.
    send_s = p.links.send_s(message / run.tp, run.tp * run.dp * run.cp)
    if not run.sequence_parallel:
        send_s += p.links.gather_s(message, run.tp, 1)
    sends = 2 * p.constants.p2p_factor * run.virtual_stages * run.num_micro_batches + 2 * (run.pp - 1)
    return micro_batches_s, bubble_s, sends * send_s


def _engine_s(p: _Pricer, stages: tuple[Stage, ...]) -> float:
    """Return what tensor-parallel ranks wait for each other under DeepSpeed's pipeline engine."""
    run = p.run
    if run.pp == 1 or run.framework not in ("megatron-deepspeed", "deepspeed"):
        return 0.0
    blocks = max(sum(count for _, count in stage.blocks) for stage in stages)
    slots = run.num_micro_batches + run.pp - 1
    return slots * blocks * p.constants.engine_skew_s * log2(run.tp)


def _end_of_step_s(
    p: _Pricer, stages: list[Stage], cache: dict[LayerSpec, LayerSeconds]
) -> tuple[float, float]:
    """Return what reducing gradients and gathering updated parameters adds, of the slowest stage."""
    if _is_fsdp(p) or p.run.dp * p.run.cp == 1:
        return 0.0, 0.0
    return max((_replicas_s(p, stage, cache) for stage in stages), key=sum)


def _replicas_s(p: _Pricer, stage: Stage, cache: dict[LayerSpec, LayerSeconds]) -> tuple[float, float]:
    run, links, held = p.run, p.links, p.held
    ranks, shards = run.dp * run.cp, run.num_shards
    reduces_s = gathers_s = 0.0
    scatters = shards == ranks > 1 and run.framework in ("megatron", "meshwright")
    for elements, ep in zip(_stage_parameters(p, stage), (1, run.ep), strict=True):
        if not elements or ranks == ep:
            continue
        size, stride = ranks // ep, run.tp * ep
        buckets = ceil(held.gather_bytes * elements / _BUCKET_BYTES)
        if scatters:
            reduces_s += links.gather_s(held.reduce_bytes * elements, size, stride, buckets)
        else:
            reduces_s += links.all_reduce_s(held.reduce_bytes * elements, size, stride)
        if shards > ep:
            owners = shards // ep
            if run.framework == "internevo":  # each owner broadcasts its parameters in turn
                buckets = owners
            gathers_s += links.gather_s(held.gather_bytes * elements, owners, stride, buckets)
    window_s = _REDUCE_SHARE * sum(n * (cache[b].backward.total_s + cache[b].recompute_s) for b, n in stage.blocks)
    share = p.constants.exposed_share
    if run.software.overlaps_gradients:
        reduces_s = _beside_s(reduces_s, window_s, share)
    if run.software.overlaps_parameters:
        gathers_s = _beside_s(gathers_s, sum(n * cache[b].forward.total_s for b, n in stage.blocks), share)
    return reduces_s, gathers_s


def _optimizer_s(p: _Pricer, stage: Stage) -> float:
    """Return the seconds of norm, clipping and update: states and parameters rewritten, gradients read three times."""
    held, run = p.held, p.run
    shared, routed = _stage_parameters(p, stage)
    own = shared / run.num_shards + routed / max(1, run.num_shards // run.ep)
    moved = own * (2 * held.optimizer_bytes + 2 * held.parameter_bytes + 3 * held.gradient_bytes)
    if not _is_fsdp(p):
        moved += 2 * held.gradient_bytes * (shared + routed)
    return moved / p.rates.memory_bytes_per_s + p.constants.step_s
