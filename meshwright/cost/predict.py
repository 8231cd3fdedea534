"""The price of a whole plan, hand-written or searched: itemised seconds and bytes per stage.

Step time is the event simulation of the plan's schedule. A stage's peak memory is positional:
when layer l runs backward, the activations of later layers of that micro-batch are gone, so with k
micro-batches in flight and layers l = 1..n of activations A_l

    peak = states + (k - 1) * sum A + max over l of (A_1 + ... + A_l + transient_l).

A step begins without gradients, and the first backward pass makes them layer by layer. So where all m
micro-batches are in flight before it (k = m), it has only those of the layers behind l, and the
second one, with all gradients, has k - 1 micro-batches. Where embedding and head share a weight on one
stage, the head's gradient of it waits for the embedding's: W bytes in every pass but the first, which
counts it as made, and twice as many again at the embedding.

`bound_bytes`, to which the search keeps, is the same peak of each layer's share in cost/layer.py, and never below the
exact one. Both are equal where k < m or m = 1, but for the encoder's states that decoder blocks of a stage share: the
bound counts them in each. Where a GPipe stage grows, only a sum holds,

    bound = states + k * sum A + max over l of transient_l.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.cost.activations import shared_bytes
from meshwright.cost.collectives import REPORT_BYTES
from meshwright.cost.comm import collective_s
from meshwright.cost.evidence import not_measured
from meshwright.cost.layer import (
    LayerCost,
    backward_passes,
    bound_bytes,
    held_parameters,
    layer_cost,
    made_gradient_bytes,
    tied_extra_bytes,
    tied_sync_s,
    tied_transient_bytes,
    tied_weight_bytes,
)
from meshwright.cost.reshard import border_s, relayout_s
from meshwright.cost.simulate import simulate
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.flops import step_flops
from meshwright.spec.mesh import Layout
from meshwright.spec.model import LayerSpec, hands_on
from meshwright.spec.plan import Plan, Prediction, StagePrediction
from meshwright.spec.schedule import in_flight
from meshwright.spec.terms import MicroBatchSeconds, PhaseSeconds, StateBytes, StepSeconds

_ROUNDING = 1e-9  # sums of the same seconds in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One rank's cost of a stage: sums over its layers, and its two memory peaks."""

    micro_batch: MicroBatchSeconds
    step: StepSeconds
    states: StateBytes
    activation_bytes: int
    peak_bytes: int
    bound_bytes: int
    widest: LayerCost


def predict(plan: Plan) -> Prediction:
    """Return the predicted step time and peak memory of `plan`, term by term."""
    stages = [_stage_cost(plan, index) for index in range(plan.num_stages)]
    step_s = simulate(
        plan.schedule,
        [stage.micro_batch.forward.total_s for stage in stages],
        [stage.micro_batch.backward.total_s for stage in stages],
        [stage.step.total_s for stage in stages],
        plan.num_micro_batches,
    )
    samples_per_s = plan.global_batch_size / step_s
    flops = step_flops(plan.model, plan.job.lengths, plan.global_batch_size)
    peak_flops_per_s = plan.cluster.device.peak_flops_per_s(plan.job.param_dtype) * plan.num_devices
    return Prediction(
        step_s=step_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * plan.job.tokens_per_sample,
        mfu=flops / step_s / peak_flops_per_s,
        stages=tuple(_stage_prediction(plan, index, stage, step_s) for index, stage in enumerate(stages)),
        not_measured=not_measured(plan),
    )


def stage_layer_costs(plan: Plan, index: int) -> tuple[LayerCost, ...]:
    """Return the cost of each layer of stage `index`, re-layouts and borders not included."""
    layers = _stage_layers(plan, index)
    return tuple(
        layer_cost(
            layer,
            held_parameters(plan.model, layer, plan.num_stages),
            strategy,
            plan.micro_batch_samples,
            plan.job,
            plan.cluster,
        )
        for layer, strategy in zip(layers, plan.stages[index].strategies, strict=True)
    )


def stage_activation_bytes(plan: Plan, index: int) -> list[int]:
    """Return, by layer of stage `index`, what autograd keeps of a micro-batch; what layers share counts once."""
    costs, kept_by_others = stage_layer_costs(plan, index), _kept_by_others(plan, index)
    return [cost.activation_bytes - less for cost, less in zip(costs, kept_by_others, strict=True)]


def positional_peak_bytes(
    states_bytes: int,
    num_in_flight: int,
    num_micro_batches: int,
    activations: list[int],
    transients: list[int],
    first_transients: list[int],
    gradients: list[int],
) -> int:
    """Return the peak of a stage by the formulas at the top; lists are by layer, `gradients` part of the states.

    `first_transients` are those of a step's first backward pass.
    """
    with_gradients = states_bytes + _highest(activations, transients)
    if num_in_flight < num_micro_batches:
        return with_gradients + (num_in_flight - 1) * sum(activations)
    behind = list(accumulate(reversed(gradients)))[::-1]
    growing = [transient + made for transient, made in zip(first_transients, behind, strict=True)]
    first = states_bytes - sum(gradients) + (num_in_flight - 1) * sum(activations) + _highest(activations, growing)
    second = with_gradients + (num_in_flight - 2) * sum(activations) if num_in_flight > 1 else 0
    return max(states_bytes, first, second)


def _highest(activations: list[int], transients: list[int]) -> int:
    """Return the most that one micro-batch's backward pass holds."""
    pairs = zip(accumulate(activations), transients, strict=True)
    return max(held + transient for held, transient in pairs)


def report_sync_s(num_devices: int, cluster: ClusterSpec) -> float:
    """Return the seconds of the small sum over all ranks that ends every step: norm, loss and token count."""
    return collective_s("all_reduce", REPORT_BYTES, tuple(range(num_devices)), cluster)


def _stage_layers(plan: Plan, index: int) -> tuple[LayerSpec, ...]:
    return plan.model.layers[plan.boundaries[index] : plan.boundaries[index + 1]]


def _stage_cost(plan: Plan, index: int) -> StageCost:
    costs = stage_layer_costs(plan, index)
    micro_batch, step, states = _relayouts_and_borders(plan, index), StepSeconds(), StateBytes()
    for cost in costs:
        micro_batch += cost.micro_batch
        step += cost.step
        states += cost.states
    if index in (0, plan.num_stages - 1):
        strategy = plan.stages[0].strategies[0]
        step += StepSeconds(tied_sync_s=tied_sync_s(plan.model, strategy, plan.num_stages, plan.job, plan.cluster))
    step += StepSeconds(other_s=report_sync_s(plan.num_devices, plan.cluster))
    activations = stage_activation_bytes(plan, index)
    transients, first_transients = _transients(plan, costs)
    count = in_flight(plan.schedule, plan.num_stages, plan.num_micro_batches, index)
    made = _made_gradients(plan, index, costs)
    return StageCost(
        micro_batch=micro_batch,
        step=step,
        states=states,
        activation_bytes=sum(activations),
        peak_bytes=positional_peak_bytes(
            states.total_bytes,
            count,
            plan.num_micro_batches,
            activations,
            transients,
            first_transients,
            made,
        ),
        bound_bytes=_bound_bytes(plan, index, costs, count, made),
        widest=max(costs, key=lambda cost: cost.transient.total_bytes),
    )


def _kept_by_others(plan: Plan, index: int) -> list[int]:
    """Return, by layer, the bytes of its activations that the layer before keeps already: the same encoder's states.

    They are the same tensor where decoder blocks follow each other on one stage in one layout.
    """
    layers, strategies = _stage_layers(plan, index), plan.stages[index].strategies
    found = [0]
    for (before, layer), (given, strategy) in zip(pairwise(layers), pairwise(strategies), strict=True):
        is_same = shared_bytes(before, plan.job) > 0 and Layout.of(given) == Layout.of(strategy)
        found.append(plan.micro_batch_samples // strategy.dp * shared_bytes(layer, plan.job) if is_same else 0)
    return found


def _transients(plan: Plan, costs: tuple[LayerCost, ...]) -> tuple[list[int], list[int]]:
    """Return what is alive while each layer runs backward: in general, and in the first pass of a step."""
    transients = [cost.transient.total_bytes for cost in costs]
    first = [cost.transient.first_pass_bytes for cost in costs]
    if plan.model.tied_embedding and plan.num_stages == 1:
        waiting = tied_weight_bytes(plan.model, plan.strategies[0], plan.job)
        transients = [transient + waiting for transient in transients]
        for one in (transients, first):
            one[0] += 2 * waiting
    return transients, first


def _bound_bytes(plan: Plan, index: int, costs: tuple[LayerCost, ...], num_in_flight: int, made: list[int]) -> int:
    """Return the upper bound of the stage's peak to which the search keeps."""
    held, highest, passes = 0, 0, backward_passes(plan.schedule, plan.num_micro_batches)
    layers, strategies = _stage_layers(plan, index), plan.stages[index].strategies
    for layer, strategy, cost, made_bytes in zip(layers, strategies, costs, made, strict=True):
        used = bound_bytes(cost, passes, made_bytes)
        held += used.states + num_in_flight * used.activations
        waiting = tied_transient_bytes(plan.model, layer, strategy, plan.num_stages, plan.job)
        highest = max(highest - used.freed, used.transient + waiting)
    return held + highest + tied_extra_bytes(plan.model, plan.strategies[0], plan.num_stages, passes, plan.job)


def _made_gradients(plan: Plan, index: int, costs: tuple[LayerCost, ...]) -> list[int]:
    """Return by layer the bytes of gradients that come with its first backward pass."""
    layers, strategies = _stage_layers(plan, index), plan.stages[index].strategies
    return [
        made_gradient_bytes(plan.model, layer, cost, strategy, plan.job, plan.num_stages)
        for layer, cost, strategy in zip(layers, costs, strategies, strict=True)
    ]


def _relayouts_and_borders(plan: Plan, index: int) -> MicroBatchSeconds:
    """Return the stage's re-layouts (also on arrival from the stage before) and its sends and receives."""
    first, last = plan.boundaries[index], plan.boundaries[index + 1]
    layouts = [Layout.of(strategy) for strategy in plan.strategies]
    samples, job, cluster = plan.micro_batch_samples, plan.job, plan.cluster
    forward_s = backward_s = sends_s = 0.0
    for position in range(max(1, first), last):
        tensors = hands_on(plan.model.layers[position - 1])
        before, after = layouts[position - 1], layouts[position]
        forward_s += relayout_s(tensors, before, after, samples, job, cluster)
        backward_s += relayout_s(tensors, after, before, samples, job, cluster)
    for sender in (first - 1, last - 1):
        if 0 <= sender < len(layouts) - 1:
            tensors = hands_on(plan.model.layers[sender])
            sends_s += border_s(tensors, layouts[sender], samples, plan.num_stages, job, cluster)
    return MicroBatchSeconds(
        forward=PhaseSeconds(relayout_s=forward_s, border_s=sends_s),
        backward=PhaseSeconds(relayout_s=backward_s, border_s=sends_s),
    )


def _stage_prediction(plan: Plan, index: int, stage: StageCost, step_s: float) -> StagePrediction:
    busy_s = plan.num_micro_batches * stage.micro_batch.total_s + stage.step.total_s
    return StagePrediction(
        micro_batch=stage.micro_batch,
        step=stage.step,
        states=stage.states,
        activation_bytes=stage.activation_bytes,
        in_flight=in_flight(plan.schedule, plan.num_stages, plan.num_micro_batches, index),
        transient=stage.widest.transient,
        peak_bytes=stage.peak_bytes,
        bound_bytes=stage.bound_bytes,
        busy_s=busy_s,
        bubble_s=step_s - busy_s if step_s - busy_s > _ROUNDING * step_s else 0.0,
    )
