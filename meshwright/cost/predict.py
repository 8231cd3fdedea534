"""The price of a whole plan, hand-written or searched: itemised seconds and bytes per stage.

Step time is the event simulation of the plan's schedule. A stage's peak memory is positional:
when layer l runs backward, the activations of later layers of that micro-batch are gone, so with k
micro-batches in flight and layers l = 1..n of activations A_l

    peak = states + (k - 1) * sum A + max over l of (A_1 + ... + A_l + transient_l).

`bound_bytes` = states + k * sum A + max transient_l is never below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.comm import collective_s
from meshwright.cost.layer import LayerCost, held_parameters, layer_cost, tied_sync_s
from meshwright.cost.reshard import border_s, relayout_s
from meshwright.cost.simulate import timeline
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.flops import step_flops
from meshwright.spec.mesh import Layout
from meshwright.spec.model import LayerSpec, hands_on
from meshwright.spec.plan import Plan, Prediction, StagePrediction
from meshwright.spec.schedule import in_flight
from meshwright.spec.terms import MicroBatchSeconds, PhaseSeconds, StateBytes, StepSeconds

_ROUNDING = 1e-9  # sums of the same seconds in another order
REPORT_BYTES = 32  # squared gradient norm, loss, tokens, stop requests, as fp64, summed over all ranks once a step


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
    simulated = timeline(
        plan.schedule,
        [stage.micro_batch.forward.total_s for stage in stages],
        [stage.micro_batch.backward.total_s for stage in stages],
        [stage.step.total_s for stage in stages],
        plan.num_micro_batches,
    )
    samples_per_s = plan.global_batch_size / simulated.step_s
    flops = step_flops(plan.model, plan.job.seq_len, plan.global_batch_size)
    peak_flops_per_s = plan.cluster.device.peak_flops_per_s(plan.job.param_dtype) * plan.num_devices
    return Prediction(
        step_s=simulated.step_s,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * plan.job.seq_len,
        mfu=flops / simulated.step_s / peak_flops_per_s,
        stages=tuple(_stage_prediction(plan, index, stage, simulated.step_s) for index, stage in enumerate(stages)),
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


def positional_peak_bytes(states_bytes: int, micro_batches: int, activations: list[int], transients: list[int]) -> int:
    """Return the peak of a stage with `micro_batches` in flight (the formula at the top)."""
    before = highest = 0
    for activation, transient in zip(activations, transients, strict=True):
        before += activation
        highest = max(highest, before + transient)
    return states_bytes + (micro_batches - 1) * before + highest


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
    activations = [cost.activation_bytes for cost in costs]
    transients = [cost.transient.total_bytes for cost in costs]
    count = in_flight(plan.schedule, plan.num_stages, plan.num_micro_batches, index)
    return StageCost(
        micro_batch=micro_batch,
        step=step,
        states=states,
        activation_bytes=sum(activations),
        peak_bytes=positional_peak_bytes(states.total_bytes, count, activations, transients),
        bound_bytes=states.total_bytes + count * sum(activations) + max(transients),
        widest=max(costs, key=lambda cost: cost.transient.total_bytes),
    )


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
