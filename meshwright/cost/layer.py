"""The price of one layer under one strategy: the unit that predictions and searches add up.

This is the cost contract. Its four sorts stay apart: per micro-batch, once a step, transient, and
across layers (re-layout and borders, in `cost.reshard`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.cost.collectives import Collective, layer_collectives, padded_elements
from meshwright.cost.comm import collective_s, exposed_s
from meshwright.cost.compute import accumulate_s, layer_compute, optimizer_s
from meshwright.cost.memory import activation_bytes, state_bytes, transient_bytes
from meshwright.spec.base import divide, dtype_bytes
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.mesh import Axis, MeshShape
from meshwright.spec.model import HeadLayer, LayerSpec, ModelSpec
from meshwright.spec.parameters import ParameterSpec, layer_parameters
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import MicroBatchSeconds, PhaseSeconds, StateBytes, StepSeconds, TransientBytes

TIED_WEIGHT = "output.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One rank's cost of one layer; activations are of one micro-batch."""

    micro_batch: MicroBatchSeconds
    step: StepSeconds
    states: StateBytes
    activation_bytes: int
    transient: TransientBytes


def held_parameters(model: ModelSpec, layer: LayerSpec, num_stages: int) -> tuple[ParameterSpec, ...]:
    """Return the parameters that `layer` holds itself: on one stage a tied head uses the embedding's weight."""
    parameters = layer_parameters(layer)
    if model.tied_embedding and num_stages == 1 and isinstance(layer, HeadLayer):
        return tuple(p for p in parameters if p.name != TIED_WEIGHT)
    return parameters


@lru_cache(maxsize=262144)
def layer_cost(
    layer: LayerSpec,
    parameters: tuple[ParameterSpec, ...],
    strategy: Strategy,
    micro_batch_samples: int,
    job: JobSpec,
    cluster: ClusterSpec,
) -> LayerCost:
    """Return the cost of `layer`, holding `parameters`, under a legal `strategy`.

    `micro_batch_samples` is the micro-batch over all ranks of the stage.
    """
    samples = divide(micro_batch_samples, strategy.dp, "micro-batch over dp")
    kernels = cluster.device.kernels
    return LayerCost(
        micro_batch=_micro_batch_seconds(layer, parameters, strategy, samples, job, cluster),
        step=_step_seconds(layer, parameters, strategy, samples, job, cluster),
        states=state_bytes(parameters, strategy, job),
        activation_bytes=activation_bytes(layer, strategy, samples, job, kernels),
        transient=transient_bytes(layer, parameters, strategy, samples, job, kernels),
    )


def tied_sync_s(model: ModelSpec, strategy: Strategy, num_stages: int, job: JobSpec, cluster: ClusterSpec) -> float:
    """Return the seconds a step to sum the two gradients of a weight tied across stages."""
    if not model.tied_embedding or num_stages == 1:
        return 0.0
    weight = next(p for p in layer_parameters(model.head) if p.name == TIED_WEIGHT)
    own = padded_elements((weight,), strategy.tp, strategy.dp_shard)
    pair = (0, (num_stages - 1) * strategy.num_devices)
    return collective_s("all_reduce", own * dtype_bytes(job.master_dtype), pair, cluster)


def _micro_batch_seconds(
    layer: LayerSpec,
    parameters: tuple[ParameterSpec, ...],
    strategy: Strategy,
    samples: int,
    job: JobSpec,
    cluster: ClusterSpec,
) -> MicroBatchSeconds:
    compute = layer_compute(layer, strategy.tp, samples, job, cluster.device)
    found = layer_collectives(layer, parameters, strategy, samples, job)
    forward_tp_s = _total_s(found, "forward", "tp", strategy, cluster)
    backward_tp_s = _total_s(found, "backward", "tp", strategy, cluster)
    recompute_tp_s = _total_s(found, "recompute", "tp", strategy, cluster)
    gather_s = _total_s(found, "forward", "gather", strategy, cluster)
    reduce_s = _total_s(found, "backward", "gather", strategy, cluster) + _total_s(
        found, "backward", "reduce", strategy, cluster
    )
    local = padded_elements(parameters, strategy.tp, strategy.dp_shard) * strategy.dp_shard
    recompute_s = compute.forward_s if strategy.recompute == "full" else 0.0
    backward_s = compute.backward_s + accumulate_s(local, job, cluster.device)
    slowdown = cluster.device.overlap_slowdown
    forward_zero_s = exposed_s(gather_s, compute.forward_s, slowdown)
    backward_zero_s = exposed_s(reduce_s, backward_s + recompute_s, slowdown)
    return MicroBatchSeconds(
        forward=PhaseSeconds(
            compute_s=compute.forward_s,
            tp_s=forward_tp_s,
            zero_s=forward_zero_s,
            copy_s=_copy_s(found, "forward", cluster),
            hidden_s=max(0.0, gather_s - forward_zero_s),
        ),
        backward=PhaseSeconds(
            compute_s=backward_s,
            recompute_s=recompute_s,
            tp_s=backward_tp_s + recompute_tp_s,
            zero_s=backward_zero_s,
            copy_s=_copy_s(found, "backward", cluster),
            hidden_s=max(0.0, reduce_s - backward_zero_s),
        ),
    )


def _step_seconds(
    layer: LayerSpec,
    parameters: tuple[ParameterSpec, ...],
    strategy: Strategy,
    samples: int,
    job: JobSpec,
    cluster: ClusterSpec,
) -> StepSeconds:
    compute = layer_compute(layer, strategy.tp, samples, job, cluster.device)
    found = layer_collectives(layer, parameters, strategy, samples, job)
    gather_s = _total_s(found, "step", "gather", strategy, cluster)
    reduce_s = _total_s(found, "step", "reduce", strategy, cluster)
    slowdown = cluster.device.overlap_slowdown
    gather_exposed_s = exposed_s(gather_s, compute.forward_s, slowdown)
    reduce_exposed_s = exposed_s(reduce_s, compute.backward_s, slowdown)
    own = padded_elements(parameters, strategy.tp, strategy.dp_shard)
    return StepSeconds(
        gradient_sync_s=reduce_exposed_s + _split_norm_sync_s(parameters, strategy, job, cluster),
        copy_s=_copy_s(found, "step", cluster),
        parameter_gather_s=gather_exposed_s,
        optimizer_s=optimizer_s(own, cluster.device),
        hidden_s=max(0.0, gather_s - gather_exposed_s) + max(0.0, reduce_s - reduce_exposed_s),
    )


def _split_norm_sync_s(
    parameters: tuple[ParameterSpec, ...], strategy: Strategy, job: JobSpec, cluster: ClusterSpec
) -> float:
    """Seconds to sum the gradients of norms over split heads, one all-reduce each."""
    if strategy.tp == 1:
        return 0.0
    ranks = worst_group(MeshShape.of(strategy), "tp", cluster.devices_per_node)
    return sum(
        collective_s(
            "all_reduce",
            padded_elements((p,), strategy.tp, strategy.dp_shard) * dtype_bytes(job.master_dtype),
            ranks,
            cluster,
        )
        for p in parameters
        if p.acts_on_split
    )


def _total_s(
    found: tuple[Collective, ...], phase: str, purpose: str, strategy: Strategy, cluster: ClusterSpec
) -> float:
    total_s = 0.0
    for c in found:
        if c.phase == phase and c.purpose == purpose:
            ranks = worst_group(MeshShape.of(strategy), c.axis, cluster.devices_per_node)
            total_s += c.count * collective_s(c.op, c.message_bytes, ranks, cluster)
    return total_s


def _copy_s(found: tuple[Collective, ...], phase: str, cluster: ClusterSpec) -> float:
    """Seconds to copy parameters out of, and gradients into, the flat buffers that are gathered and reduced."""
    moved_bytes = sum(2 * c.count * c.message_bytes for c in found if c.phase == phase and c.purpose != "tp")
    return moved_bytes / (cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency)


@lru_cache(maxsize=65536)
def worst_group(mesh: MeshShape, axis: Axis, devices_per_node: int) -> tuple[int, ...]:
    """Return a group of `axis` that touches the most nodes: the one that everybody waits for."""
    return max(mesh.groups(axis), key=lambda ranks: len({rank // devices_per_node for rank in ranks}))
