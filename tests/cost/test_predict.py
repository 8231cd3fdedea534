"""The price of whole plans: sums, peaks and times against plain loops, and against published runs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from meshwright.cost.layer import TIED_WEIGHT, tied_sync_s, tied_weight_bytes
from meshwright.cost.predict import positional_peak_bytes, predict, report_sync_s, stage_layer_costs
from meshwright.cost.reshard import border_s, relayout_s
from meshwright.spec.mesh import Layout
from meshwright.spec.model import BlockLayer, hands_on
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import make_schedule
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import PhaseSeconds
from tests.cost.test_simulate import event_loop
from tests.plans import by_hand, uniform

TP4, TP2_DP2, ZERO3 = Strategy(tp=4), Strategy(tp=2, dp_replicate=2), Strategy(dp_shard=4, zero_stage=3)
CHECKPOINTED = Strategy(dp_shard=4, zero_stage=2, recompute="full")
PLANS = {
    "tied-one-stage": uniform("gpt2", "4xa100-sxm-40g", TP4, batch=16, seq_len=1024, micro_batches=4),
    "tied-mixed-stages": by_hand(
        "gpt2",
        "8xa100-sxm-40g",
        [TP2_DP2, ZERO3, ZERO3, CHECKPOINTED, TP4, TP4, *[TP2_DP2] * 8],
        sizes=[5, 9],
        batch=32,
        seq_len=512,
        micro_batches=8,
    ),
    "uneven-4-stages": by_hand(
        "tiny-llama",
        "16xcpu",
        [ZERO3, TP2_DP2, CHECKPOINTED, ZERO3, TP2_DP2, TP2_DP2],
        sizes=[1, 2, 2, 1],
        batch=64,
        seq_len=128,
        micro_batches=8,
    ),
    "gpipe-few": uniform(
        "llama-2-7b", "2x8xa100-sxm-40g", ZERO3, batch=24, seq_len=2048, stages=4, micro_batches=3, schedule="gpipe"
    ),
    "two-nodes": uniform(
        "llama-3-8b",
        "2x8xh100-sxm",
        Strategy(tp=8, dp_replicate=2, recompute="full"),
        batch=8,
        seq_len=4096,
        micro_batches=4,
    ),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS.keys())
def plan(request: pytest.FixtureRequest) -> Plan:
    return request.param


def test_terms_add_up_to_the_stage(plan: Plan):
    """Every total is the sum over layers, borders and neighbours, added here in plain loops."""
    predicted, layouts = predict(plan), [Layout.of(strategy) for strategy in plan.strategies]
    inputs = (plan.micro_batch_samples, plan.job, plan.cluster)
    for index, (first, last) in enumerate(pairwise(plan.boundaries)):
        costs, stage = stage_layer_costs(plan, index), predicted.stages[index]
        forward = sum(cost.micro_batch.forward.total_s for cost in costs)
        backward = sum(cost.micro_batch.backward.total_s for cost in costs)
        step = sum(cost.step.total_s for cost in costs) + report_sync_s(plan.num_devices, plan.cluster)
        for layer in range(first, last):
            if layer > 0:
                tensors = hands_on(plan.model.layers[layer - 1])
                forward += relayout_s(tensors, layouts[layer - 1], layouts[layer], *inputs)
                backward += relayout_s(tensors, layouts[layer], layouts[layer - 1], *inputs)
        for sender in [layer for layer in (first - 1, last - 1) if 0 <= layer < len(layouts) - 1]:
            sent = border_s(
                hands_on(plan.model.layers[sender]), layouts[sender], inputs[0], plan.num_stages, *inputs[1:]
            )
            forward, backward = forward + sent, backward + sent
        if index in (0, plan.num_stages - 1):
            step += tied_sync_s(plan.model, plan.strategies[0], plan.num_stages, plan.job, plan.cluster)
        assert stage.micro_batch.forward.total_s == pytest.approx(forward, rel=1e-12)
        assert stage.micro_batch.backward.total_s == pytest.approx(backward, rel=1e-12)
        assert stage.step.total_s == pytest.approx(step, rel=1e-12)
        assert stage.states.total_bytes == sum(cost.states.total_bytes for cost in costs)
        assert stage.activation_bytes == sum(cost.activation_bytes for cost in costs)
        for phase in (stage.micro_batch.forward, stage.micro_batch.backward):
            shown = sum(getattr(phase, name) for name in PhaseSeconds.model_fields if name != "hidden_s")
            assert phase.total_s == pytest.approx(shown, rel=1e-12)


def test_the_peak_is_that_of_a_plain_loop_over_the_schedule(plan: Plan):
    schedule = make_schedule(plan.schedule, plan.num_stages, plan.num_micro_batches)
    for index, stage in enumerate(predict(plan).stages):
        costs = stage_layer_costs(plan, index)
        gradients = [cost.states.gradient_bytes for cost in costs]
        if plan.model.tied_embedding and plan.num_stages == 1:  # the weight's gradient begins in the head
            gradients = [0, *gradients[1:-1], gradients[0] + gradients[-1]]
        others = stage.states.total_bytes - sum(gradients)
        peak, in_flight, made = stage.states.total_bytes, 0, 0
        live: dict[tuple[int, int], int] = {}
        for action in schedule[index]:
            layers = range(len(costs))
            if action.phase == "forward":
                live |= {(action.micro_batch, layer): costs[layer].activation_bytes for layer in layers}
                in_flight = max(in_flight, len({micro_batch for micro_batch, _ in live}))
                continue
            for layer in reversed(layers):
                made += gradients[layer] if action.micro_batch == 0 else 0
                alive = costs[layer].transient
                working = alive.total_bytes if action.micro_batch else alive.first_pass_bytes
                if plan.model.tied_embedding and plan.num_stages == 1:
                    waiting = tied_weight_bytes(plan.model, plan.strategies[0], plan.job)
                    working += (waiting if action.micro_batch else 0) + (2 * waiting if layer == 0 else 0)
                peak = max(peak, others + made + sum(live.values()) + working)
                del live[action.micro_batch, layer]
        assert stage.peak_bytes == peak
        assert stage.in_flight == in_flight
        assert stage.peak_bytes <= stage.bound_bytes
        tied_here = plan.model.tied_embedding and plan.num_stages == 1
        assert stage.peak_bytes == stage.bound_bytes or in_flight == plan.num_micro_batches or tied_here


def test_positional_peak_by_hand():
    activations, transients, gradients = [10, 20, 30], [50, 5, 7], [1, 2, 4]
    steady = positional_peak_bytes(100, 3, 4, activations, transients, transients, gradients)
    assert steady == 100 + 2 * 60 + max(10 + 50, 30 + 5, 60 + 7)
    # All three micro-batches are there before the first gradient: only the head's is beside them at the peak.
    first = positional_peak_bytes(100, 3, 3, activations, transients, transients, gradients)
    assert first == 100 - 7 + 2 * 60 + max(10 + 50 + 7, 30 + 5 + 6, 60 + 7 + 4)
    large = positional_peak_bytes(100, 2, 2, activations, transients, transients, [0, 0, 90])
    assert large == 100 + 60 + 7 - 90 + 90 + 60
    assert positional_peak_bytes(50, 1, 1, [1], [9], [0], [50]) == 51
    assert positional_peak_bytes(50, 1, 1, [1], [9], [0], [0]) == 51
    # With little to keep, the second backward pass, which has all gradients, is the higher one.
    assert positional_peak_bytes(100, 2, 2, [1, 1], [0, 40], [0, 40], [30, 0]) == 100 + 0 + 1 + 1 + 40


def test_the_step_is_the_event_loop_and_splits_into_busy_and_bubble(plan: Plan):
    predicted = predict(plan)
    rows = [
        [getattr(stage.micro_batch, phase).total_s for stage in predicted.stages] for phase in ("forward", "backward")
    ]
    rows.append([stage.step.total_s for stage in predicted.stages])
    assert predicted.step_s == pytest.approx(event_loop(plan.schedule, *rows, plan.num_micro_batches)[0], rel=1e-12)
    for stage in predicted.stages:
        busy = plan.num_micro_batches * stage.micro_batch.total_s + stage.step.total_s
        assert stage.busy_s == pytest.approx(busy, rel=1e-12)
        assert stage.busy_s + stage.bubble_s == pytest.approx(predicted.step_s, rel=1e-12)


def test_throughput_and_mfu_by_their_definitions(plan: Plan):
    predicted = predict(plan)
    tokens = plan.global_batch_size * plan.job.seq_len
    assert predicted.tokens_per_s == pytest.approx(tokens / predicted.step_s)
    assert predicted.samples_per_s == pytest.approx(plan.global_batch_size / predicted.step_s)
    flops = 0
    for layer in plan.model.layers[1:]:  # looking up a row is no arithmetic
        matrices = [p for p in layer_parameters(layer) if len(p.shape) == 2]
        flops += 6 * tokens * sum(p.num_elements for p in matrices)
        if isinstance(layer, BlockLayer):
            flops += 12 * tokens * plan.job.seq_len * layer.attention.num_heads * layer.attention.head_size
    peak = plan.cluster.device.peak_flops_per_s(plan.job.param_dtype) * plan.num_devices
    assert predicted.mfu == pytest.approx(flops / predicted.step_s / peak, rel=1e-12)
    assert 0 < predicted.mfu < 0.75


def test_one_stage_holds_a_tied_weight_once():
    one = predict(PLANS["tied-one-stage"]).stages[0].states.master_bytes
    weight = next(p for p in layer_parameters(PLANS["tied-one-stage"].model.head) if p.name == TIED_WEIGHT)
    untied = PLANS["tied-one-stage"].model.model_copy(update={"tied_embedding": False})
    two = predict(uniform(untied, "4xa100-sxm-40g", TP4, batch=16, seq_len=1024, micro_batches=4))
    assert two.stages[0].states.master_bytes - one == 4 * weight.num_elements // 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_more_micro_batches_shrink_the_bubble(schedule):
    plans = [
        uniform(
            "gpt2", "4xa100-sxm-40g", Strategy(), batch=64, seq_len=1024, stages=4, micro_batches=m, schedule=schedule
        )
        for m in (4, 8, 16)
    ]
    shares = [max(stage.bubble_s for stage in predict(plan).stages) / predict(plan).step_s for plan in plans]
    assert shares[0] > shares[1] > shares[2] > 0


@pytest.mark.parametrize(
    ("plan", "measured_s"),
    [
        # Narayanan et al. 2021 (arXiv 2104.04473), table 2: 174.6B on 1536 A100, tp 8, pp 12, full recomputation.
        (
            uniform(
                "gpt3-175b",
                "192x8xa100-sxm-80g",
                Strategy(tp=8, dp_replicate=16, recompute="full"),
                batch=1536,
                seq_len=2048,
                stages=12,
                micro_batches=96,
            ),
            20.829,
        ),
        # torchtitan docs/performance.md, September 2024: Llama 3 8B on 64 A100, FSDP, every other layer recomputed.
        (
            by_hand(
                "llama-3-8b",
                "8x8xa100-sxm-80g",
                [
                    Strategy(dp_shard=64, zero_stage=3, recompute="full" if 0 < layer < 33 and layer % 2 else "none")
                    for layer in range(34)
                ],
                batch=64,
                seq_len=8192,
            ),
            2.8209,
        ),
    ],
    ids=["megatron-175b", "torchtitan-8b"],
)
def test_published_runs_are_not_far(plan: Plan, measured_s: float):
    """A loose check that nothing is off by a factor; no term is fitted to these two."""
    assert predict(plan).step_s == pytest.approx(measured_s, rel=0.2)
