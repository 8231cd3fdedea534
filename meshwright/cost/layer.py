"""The price of one layer under one strategy: the unit that predictions and searches add up.

This is the cost contract. Its four sorts stay apart: per micro-batch, once a step, transient, and
across layers (re-layout and borders, in `cost.reshard`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.cost.collectives import (
    Collective,
    data_parallel_collectives,
    padded_elements,
    tensor_parallel_collectives,
)
from meshwright.cost.comm import UNIT_COLLECTIVES, collective_s, exposed_s, unit_s
from meshwright.cost.compute import ComputeSeconds, accumulate_s, layer_compute, measured_saved_bytes, optimizer_s
from meshwright.cost.memory import activation_bytes, state_bytes, transient_bytes
from meshwright.cost.movement import worst_group
from meshwright.spec.base import Dtype, divide, dtype_bytes
from meshwright.spec.cluster import ClusterSpec, DeviceSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.mesh import MeshShape
from meshwright.spec.model import EmbeddingLayer, HeadLayer, LayerSpec, ModelSpec
from meshwright.spec.parameters import ParameterSpec, layer_parameters
from meshwright.spec.plan import needs_copy
from meshwright.spec.profile import CollectiveOp, UnitOp
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import MicroBatchSeconds, PhaseSeconds, StateBytes, StepSeconds, TransientBytes

TIED_WEIGHT = "output.weight"
_UNIT_OPS: dict[CollectiveOp, UnitOp] = {collective: unit for unit, collective in UNIT_COLLECTIVES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One rank's cost of one layer; activations are of one micro-batch."""

    micro_batch: MicroBatchSeconds
    step: StepSeconds
    states: StateBytes
    activation_bytes: int
    transient: TransientBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundBytes:
    """A layer's share of a stage's peak, by which the search adds it up (search/peaks.py).

    Sums of states and of activations (a micro-batch in flight), what is there for a moment, and what the layer's own
    backward pass frees for earlier ones: less than nothing where it leaves more than it frees.
    """

    states: int
    activations: int
    transient: int
    freed: int


Passes = Literal["one", "steady", "growing"]


def backward_passes(schedule: ScheduleName, num_micro_batches: int) -> Passes:
    """Return how the peak of a stage comes about.

    "one": the only backward pass of a step makes the gradients. "steady": the gradients are there in the pass that
    holds most (1F1B). "growing": the first pass makes them while activations of all micro-batches are held (GPipe).
    """
    if num_micro_batches == 1:
        return "one"
    return "steady" if schedule == "1f1b" else "growing"


def bound_bytes(cost: LayerCost, passes: Passes, made_bytes: int) -> BoundBytes:
    """Return a layer's share of its stage's peak; `made_bytes` of gradients come with its first backward pass.

    With one pass a layer trades its activations A for the gradients it makes; its peak, like that of steady passes, is
    exact. Where a stage grows, a layer holds its last activations or its gradients G, and both only while it runs
    backward itself: max(A, G) counts instead of A + G, and min(A, G) joins what is alive for a moment.
    """
    states, saved, transient = cost.states.total_bytes, cost.activation_bytes, cost.transient.total_bytes
    first, own = cost.transient.first_pass_bytes, cost.states.gradient_bytes
    if passes == "steady":
        return BoundBytes(states=states, activations=saved, transient=transient, freed=saved)
    if passes == "one":
        return BoundBytes(
            states=states - own, activations=saved, transient=first + made_bytes, freed=saved - made_bytes
        )
    both = min(saved, own, made_bytes)
    return BoundBytes(states=states - both, activations=saved, transient=max(transient, first + both), freed=0)


def made_gradient_bytes(
    model: ModelSpec, layer: LayerSpec, cost: LayerCost, strategy: Strategy, job: JobSpec, num_stages: int
) -> int:
    """Return the bytes of gradients that come with the first backward pass of `layer`, which costs `cost`.

    Those of a weight tied on one stage come with the head's, beside the embedding's activations.
    """
    own = cost.states.gradient_bytes
    if not model.tied_embedding or num_stages > 1 or not isinstance(layer, EmbeddingLayer | HeadLayer):
        return own
    if isinstance(layer, EmbeddingLayer):
        return 0
    return own + state_bytes(held_parameters(model, model.layers[0], num_stages), strategy, job).gradient_bytes


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
    activations = activation_bytes(layer, strategy, samples, job, kernels)
    transient = transient_bytes(layer, parameters, strategy, samples, job, kernels)
    # What other kernels than the assumed ones keep (a device that has no flash attention) shows in a profile.
    measured = measured_saved_bytes(layer, strategy.tp, samples, job, cluster.device)
    if measured is not None and strategy.recompute == "full":
        transient = transient.model_copy(update={"recompute_bytes": measured})
    elif measured is not None:
        activations = measured
    compute = layer_compute(layer, strategy.tp, samples, job, cluster.device)
    sharing = _sharing(parameters, strategy, job, cluster)
    return LayerCost(
        micro_batch=_micro_batch_seconds(layer, strategy, samples, compute, sharing, job, cluster),
        step=_step_seconds(compute, sharing, cluster.device),
        states=sharing.states,
        activation_bytes=activations,
        transient=transient,
    )


def _tied_weight(model: ModelSpec) -> ParameterSpec:
    return next(p for p in layer_parameters(model.head) if p.name == TIED_WEIGHT)


def tied_weight_bytes(model: ModelSpec, strategy: Strategy, job: JobSpec) -> int:
    """Return the bytes of a rank's gradient of the weight that embedding and head share on one stage, in backward.

    The head's share of it waits for the embedding's backward pass, where the embedding's own share and
    their sum are alive beside it.
    """
    return padded_elements((_tied_weight(model),), strategy.tp, 1) * dtype_bytes(job.param_dtype)


def tied_transient_bytes(model: ModelSpec, layer: LayerSpec, strategy: Strategy, num_stages: int, job: JobSpec) -> int:
    """Return what a weight tied on one stage adds while the embedding runs backward; 0 elsewhere."""
    is_tied_here = model.tied_embedding and num_stages == 1
    is_embedding = isinstance(layer, EmbeddingLayer)
    return 2 * tied_weight_bytes(model, strategy, job) if is_tied_here and is_embedding else 0


def tied_extra_bytes(model: ModelSpec, strategy: Strategy, num_stages: int, passes: Passes, job: JobSpec) -> int:
    """Return what a weight tied on one stage adds while any layer runs backward; the only pass counts it as made."""
    is_waiting = model.tied_embedding and num_stages == 1 and passes != "one"
    return tied_weight_bytes(model, strategy, job) if is_waiting else 0


def tied_sync_s(model: ModelSpec, strategy: Strategy, num_stages: int, job: JobSpec, cluster: ClusterSpec) -> float:
    """Return the seconds a step to sum the two gradients of a weight tied across stages."""
    if not model.tied_embedding or num_stages == 1:
        return 0.0
    own = padded_elements((_tied_weight(model),), strategy.tp, strategy.dp_shard)
    pair = (0, (num_stages - 1) * strategy.num_devices)
    return collective_s("all_reduce", own * dtype_bytes(job.master_dtype), pair, cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """What it takes one rank to share a layer's parameters with others, whatever the samples.

    Collectives by the phase in which they run; `copy_s` around them; and what a rank does with its own shard.
    """

    is_shared: bool
    forward_s: float
    backward_s: float
    step_gather_s: float
    step_reduce_s: float
    forward_copy_s: float
    backward_copy_s: float
    step_copy_s: float
    accumulate_s: float
    split_norm_s: float
    optimizer_s: float
    states: StateBytes


@lru_cache(maxsize=65536)
def _sharing(parameters: tuple[ParameterSpec, ...], strategy: Strategy, job: JobSpec, cluster: ClusterSpec) -> _Sharing:
    found = data_parallel_collectives(parameters, strategy, job)
    gathers, reductions = ([c for c in found if c.purpose == purpose] for purpose in ("gather", "reduce"))
    return _Sharing(
        is_shared=bool(found),
        forward_s=_total_s(gathers, "forward", strategy, job, cluster),
        backward_s=_total_s(found, "backward", strategy, job, cluster),
        step_gather_s=_total_s(gathers, "step", strategy, job, cluster),
        step_reduce_s=_total_s(reductions, "step", strategy, job, cluster),
        forward_copy_s=_copy_s(found, "forward", strategy, job, cluster),
        backward_copy_s=_copy_s(found, "backward", strategy, job, cluster),
        step_copy_s=_copy_s(found, "step", strategy, job, cluster),
        accumulate_s=_accumulate_s(parameters, strategy, job, cluster),
        split_norm_s=_split_norm_sync_s(parameters, strategy, job, cluster),
        optimizer_s=optimizer_s(padded_elements(parameters, strategy.tp, strategy.dp_shard), cluster.device),
        states=state_bytes(parameters, strategy, job),
    )


def _micro_batch_seconds(
    layer: LayerSpec,
    strategy: Strategy,
    samples: int,
    compute: ComputeSeconds,
    sharing: _Sharing,
    job: JobSpec,
    cluster: ClusterSpec,
) -> MicroBatchSeconds:
    found = tensor_parallel_collectives(layer, strategy, samples, job)
    forward_tp_s, backward_tp_s, recompute_tp_s = (
        _total_s(found, phase, strategy, job, cluster) for phase in ("forward", "backward", "recompute")
    )
    recompute_s = compute.forward_s if strategy.recompute == "full" else 0.0
    backward_s = compute.backward_s + sharing.accumulate_s
    # Between two collectives ranks drift apart, whichever pass the collectives are in.
    waits = sharing.is_shared or bool(found)
    forward_wait_s, backward_wait_s = (compute.forward_wait_s, compute.backward_wait_s) if waits else (0.0, 0.0)
    if strategy.recompute == "full":
        backward_wait_s += forward_wait_s
    forward_zero_s = exposed_s(sharing.forward_s, compute.forward_s, cluster.device)
    backward_zero_s = exposed_s(sharing.backward_s, backward_s + recompute_s, cluster.device)
    return MicroBatchSeconds(
        forward=PhaseSeconds(
            compute_s=compute.forward_s,
            tp_s=forward_tp_s,
            zero_s=forward_zero_s,
            copy_s=sharing.forward_copy_s,
            wait_s=forward_wait_s,
            hidden_s=max(0.0, sharing.forward_s - forward_zero_s),
        ),
        backward=PhaseSeconds(
            compute_s=backward_s,
            recompute_s=recompute_s,
            tp_s=backward_tp_s + recompute_tp_s,
            zero_s=backward_zero_s,
            copy_s=sharing.backward_copy_s,
            wait_s=backward_wait_s,
            hidden_s=max(0.0, sharing.backward_s - backward_zero_s),
        ),
    )


def _step_seconds(compute: ComputeSeconds, sharing: _Sharing, device: DeviceSpec) -> StepSeconds:
    gather_s = exposed_s(sharing.step_gather_s, compute.forward_s, device)
    reduce_s = exposed_s(sharing.step_reduce_s, compute.backward_s, device)
    return StepSeconds(
        gradient_sync_s=reduce_s + sharing.split_norm_s,
        copy_s=sharing.step_copy_s,
        parameter_gather_s=gather_s,
        optimizer_s=sharing.optimizer_s,
        hidden_s=max(0.0, sharing.step_gather_s - gather_s) + max(0.0, sharing.step_reduce_s - reduce_s),
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


def _accumulate_s(
    parameters: tuple[ParameterSpec, ...], strategy: Strategy, job: JobSpec, cluster: ClusterSpec
) -> float:
    """Seconds to add one micro-batch's gradients to those before: of the rank's shard, or of all it computes."""
    own = padded_elements(parameters, strategy.tp, strategy.dp_shard)
    if strategy.zero_stage > 1:
        return accumulate_s(own, job, cluster.device)
    local = own * strategy.dp_shard
    if needs_copy(strategy, job):
        ranks = worst_group(MeshShape.of(strategy), "dp", cluster.devices_per_node)
        measured_s = unit_s("accumulate", local * dtype_bytes(job.reduce_dtype), ranks, cluster, job.param_dtype)
        if measured_s is not None:
            return measured_s
    return accumulate_s(local, job, cluster.device)


def _total_s(found: Iterable[Collective], phase: str, strategy: Strategy, job: JobSpec, cluster: ClusterSpec) -> float:
    total_s = 0.0
    for c in found:
        if c.phase == phase:
            ranks = worst_group(MeshShape.of(strategy), c.axis, cluster.devices_per_node)
            total_s += c.count * collective_s(c.op, c.message_bytes, ranks, cluster, _dtype(c, job))
    return total_s


def _copy_s(found: Iterable[Collective], phase: str, strategy: Strategy, job: JobSpec, cluster: ClusterSpec) -> float:
    """Seconds around gathers and reductions: copies out of and into flat buffers, and the runtime's own.

    Where a profile has measured the whole of it, that is what remains of it beside the collective.
    """
    return sum(c.count * _around_s(c, strategy, job, cluster) for c in found if c.phase == phase)


def _around_s(c: Collective, strategy: Strategy, job: JobSpec, cluster: ClusterSpec) -> float:
    if c.op == "all_reduce" and strategy.dp_shard > 1:
        return 0.0  # over the replicas of a shard: in place, after the reduce-scatter
    ranks = worst_group(MeshShape.of(strategy), c.axis, cluster.devices_per_node)
    whole_s = unit_s(_UNIT_OPS[c.op], c.message_bytes, ranks, cluster, job.param_dtype)
    if whole_s is not None:
        if c.op == "all_reduce":  # it takes the place of accumulating the last micro-batch's gradients
            whole_s -= unit_s("accumulate", c.message_bytes, ranks, cluster, job.param_dtype) or 0.0
        return max(0.0, whole_s - collective_s(c.op, c.message_bytes, ranks, cluster, _dtype(c, job)))
    return 2 * c.message_bytes / (cluster.device.memory_bytes_per_s * cluster.device.memory_efficiency)


def _dtype(c: Collective, job: JobSpec) -> Dtype:
    return job.reduce_dtype if c.purpose == "reduce" else job.param_dtype
