"""Seconds of what data parallelism adds to a uniform run: gathers, reductions, copies, and the optimizer.

With n local parameters of a layer or stage, g bytes reduced and w bytes gathered a parameter, D ranks, B bytes/s of
memory:

    FSDP (ZeRO-2 and 3)  every layer and micro-batch: a gather of w n beside the forward pass, another (ZeRO-3) and a
                         reduce-scatter of g n beside the backward pass; half of them for embedding and head
    otherwise            once a step: an all-reduce of g n (Megatron with ZeRO-1: a reduce-scatter), beside the last
                         backward pass where a framework overlaps it, and (ZeRO-1) a gather of w n
    copies               FSDP: 16 n / B to copy gathers out and gradients in; else gradients are added to earlier ones
    optimizer            its states and the parameters are rewritten, gradients read three times (norm, clip, update)

Communication beside computing is free but for the share of the multiprocessors and of the memory bandwidth that it
takes from it, and for what does not fit (`_beside_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from meshwright.cost.run_layers import LayerSeconds, Setting
from meshwright.cost.run_memory_states import LocalParameters, local_parameters, own_parameters, stage_parameters
from meshwright.cost.run_stages import Stage
from meshwright.spec.model import BlockLayer, LayerSpec

_SHARDS_GRADIENTS, _SHARDS_PARAMETERS = 2, 3  # ZeRO stages
_BUCKET_BYTES = 256 * 2**20  # of a gather that is not made layer by layer
_REDUCE_SHARE = 0.9  # of a backward pass during which gradients are ready to reduce
_COPY_BYTES = 16
_FP8_GATHER_SHARE = 0.55  # of the 16-bit bytes: weights of products in 8 bit, the rest in 16
_HALF_PRECISION_BYTES = 2
_STEP_S = 0.01  # data, logging and host work that a step waits for
# Frameworks whose ZeRO-1 gives each rank its part of the summed gradients; others sum all on every rank.
_SCATTERS = frozenset({"megatron", "meshwright"})
# Frameworks whose ZeRO-1 gives whole parameters to owners, which broadcast them in turn (InternEvo, hybrid_zero_optim).
_BROADCASTS = frozenset({"internevo"})


def is_fsdp(setting: Setting) -> bool:
    """Return whether parameters or gradients are sharded, so that every micro-batch communicates."""
    return setting.run.zero_stage >= _SHARDS_GRADIENTS and setting.run.num_shards > 1


def copies_s(setting: Setting, parameters: float) -> float:
    """Return the seconds of FSDP's copies, or of adding gradients to those of earlier micro-batches."""
    if is_fsdp(setting):
        moved = float(_COPY_BYTES)
    elif setting.run.framework == "megatron" and setting.held.gradient_bytes > _HALF_PRECISION_BYTES:
        moved = 0.0  # products of weight gradients add to fp32 sums themselves
    else:
        moved = 2 * setting.held.gradient_bytes
    return parameters * moved / setting.memory_bytes_per_s


def block_shards_s(setting: Setting, layer: LayerSpec, seconds: LayerSeconds) -> float:
    """Return what gathering and scattering the shards of one block adds to a micro-batch."""
    if not is_fsdp(setting):
        return 0.0
    gather_s, scatter_s = _gather_and_scatter_s(setting, layer)
    share = _share(setting)
    again_s = gather_s if setting.run.zero_stage == _SHARDS_PARAMETERS else 0.0
    return _beside_s(gather_s, seconds.forward.total_s, share) + _beside_s(
        again_s + scatter_s, seconds.backward_s, share
    )


def end_shards_s(setting: Setting, layer: LayerSpec) -> float:
    """Return the same for embedding or head."""
    if not is_fsdp(setting):
        return 0.0
    gather_s, scatter_s = _gather_and_scatter_s(setting, layer)
    return (2 * gather_s + scatter_s) / 2


def end_of_step_s(setting: Setting, stage: Stage, blocks: Mapping[BlockLayer, LayerSeconds]) -> tuple[float, float]:
    """Return what reducing gradients, and gathering the parameters that others updated, adds after the pipeline."""
    if is_fsdp(setting):
        return 0.0, 0.0
    run = setting.run
    reduce_s = gather_s = 0.0
    for elements, ep in _by_group(setting, stage_parameters(setting.model, stage, run.tp, run.ep)):
        reduce_s += _reduced_s(setting, elements, ep)
        gather_s += _gathered_s(setting, elements, ep)
    share = _share(setting)
    if run.software.overlaps_gradients:
        backward_s = sum(count * blocks[block].backward_s for block, count in stage.blocks)
        reduce_s = _beside_s(reduce_s, _REDUCE_SHARE * backward_s, share)
    if run.software.overlaps_parameters:
        forward_s = sum(count * blocks[block].forward.total_s for block, count in stage.blocks)
        gather_s = _beside_s(gather_s, forward_s, share)
    return reduce_s, gather_s


def optimizer_s(setting: Setting, stage: Stage) -> float:
    """Return the seconds of norm, clipping and update of what a rank of `stage` owns."""
    run, held = setting.run, setting.held
    local = stage_parameters(setting.model, stage, run.tp, run.ep)
    each = 2 * held.optimizer_bytes + 2 * held.parameter_bytes + 3 * held.gradient_bytes
    moved = own_parameters(run, local) * each
    if not is_fsdp(setting):
        moved += local.total * 2 * held.gradient_bytes  # cleared, and scaled by the number of tokens
    return moved / setting.memory_bytes_per_s + _STEP_S


def _gather_and_scatter_s(setting: Setting, layer: LayerSpec) -> tuple[float, float]:
    """Return the seconds of one gather and one reduce-scatter of a layer, then summed over replicas of the shards."""
    run, links, held = setting.run, setting.links, setting.held
    gather_bytes = held.gather_bytes * (_FP8_GATHER_SHARE if run.software.fp8_gather else 1)
    ranks, shards = run.dp * run.cp, run.num_shards
    gather_s = scatter_s = 0.0
    for elements, ep in _by_group(setting, local_parameters(layer, run.tp, run.ep)):
        owners = max(1, shards // ep)
        gather_s += links.gather_s(gather_bytes * elements, owners, run.tp * ep)
        scatter_s += links.gather_s(held.reduce_bytes * elements, owners, run.tp * ep)
        own_bytes = held.reduce_bytes * elements / owners
        scatter_s += links.all_reduce_s(own_bytes, ranks // max(shards, ep), run.tp * max(shards, ep))
    return gather_s, scatter_s


def _reduced_s(setting: Setting, elements: float, ep: int) -> float:
    run, links = setting.run, setting.links
    ranks, reduced_bytes = run.dp * run.cp, setting.held.reduce_bytes * elements
    if run.num_shards == ranks > 1 and run.framework in _SCATTERS:
        buckets = ceil(reduced_bytes / _BUCKET_BYTES)
        return links.gather_s(reduced_bytes, ranks // ep, run.tp * ep, buckets)
    return links.all_reduce_s(reduced_bytes, ranks // ep, run.tp * ep)


def _gathered_s(setting: Setting, elements: float, ep: int) -> float:
    run, gathered_bytes = setting.run, setting.held.gather_bytes * elements
    owners = max(1, run.num_shards // ep)
    buckets = owners if run.framework in _BROADCASTS else ceil(gathered_bytes / _BUCKET_BYTES)
    return setting.links.gather_s(gathered_bytes, owners, run.tp * ep, buckets)


def _by_group(setting: Setting, local: LocalParameters) -> tuple[tuple[float, int], ...]:
    """Return parameters with the ranks that hold different ones of the kind: those of experts differ over ep ranks."""
    shared = (local.shared, 1)
    return (shared, (local.routed, setting.run.ep)) if local.routed else (shared,)


def _share(setting: Setting) -> float:
    """Return what a second of data-parallel communication costs the computing beside it.

    Half is for the multiprocessors that it occupies, half for the memory bandwidth, in proportion to the bytes a second
    beside NVLink's.
    """
    run = setting.run
    return setting.constants.exposed_share * (1 + setting.links.busy_share(run.dp * run.cp, run.tp)) / 2


def _beside_s(communication_s: float, window_s: float, share: float) -> float:
    """Return what communication adds to computing of `window_s` that it runs beside."""
    return max(0.0, communication_s - window_s) + share * min(communication_s, window_s)
