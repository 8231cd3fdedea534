"""The calls that a step issues are the calls that are priced; tests/parity holds them against a real step."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.cost.comm import collective_s
from meshwright.cost.inventory import Call, step_calls
from meshwright.cost.predict import predict
from meshwright.spec.plan import Plan
from meshwright.spec.strategy import Strategy
from tests.plans import by_hand, uniform

# One layout, so that nothing is re-laid out: a re-layout's price holds copies too.
REPLICATED = Strategy(tp=2, dp_replicate=2)
ZERO2 = Strategy(tp=2, dp_shard=2, zero_stage=2, recompute="full")
ZERO3 = Strategy(tp=2, dp_shard=2, zero_stage=3)
MIXED = [REPLICATED, ZERO2, ZERO3, REPLICATED, ZERO3, REPLICATED]
PLANS = {
    "one-stage": by_hand("tiny-llama", "4xcpu", MIXED, batch=16, seq_len=64, micro_batches=4),
    "three-stages": by_hand("tiny-llama", "12xcpu", MIXED, sizes=[2, 1, 3], batch=16, seq_len=64, micro_batches=4),
    "tied-stages": by_hand("tiny-gpt2", "8xcpu", MIXED, sizes=[3, 3], batch=16, seq_len=64, micro_batches=8),
    "hybrid": uniform(
        "tiny-llama", "8xcpu", Strategy(tp=2, dp_replicate=2, dp_shard=2, zero_stage=3), batch=8, seq_len=64
    ),
}


def calls_of(plan: Plan, rank: int) -> Counter[Call]:
    """Return what `rank` takes part in: its collectives and sends, and the sends that it receives."""
    calls = step_calls(plan, rank)
    for other in range(plan.num_devices):
        if other != rank:
            received = {c: n for c, n in step_calls(plan, other).items() if c.op == "send" and c.ranks[1] == rank}
            calls += Counter(received)
    return calls


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_seconds_of_all_calls_are_the_communication_that_is_priced(plan: Plan):
    """On CPUs nothing overlaps, so all communication is exposed."""
    for index, stage in enumerate(predict(plan).stages):
        calls = calls_of(plan, index * plan.stage_devices)
        issued_s = sum(count * collective_s(c.op, c.message_bytes, c.ranks, plan.cluster) for c, count in calls.items())
        both = stage.micro_batch.forward + stage.micro_batch.backward
        step = stage.step
        assert both.relayout_s == both.hidden_s == step.hidden_s == 0
        priced_s = plan.num_micro_batches * (both.tp_s + both.zero_s + both.border_s)
        priced_s += step.gradient_sync_s + step.parameter_gather_s + step.tied_sync_s + step.other_s
        assert issued_s == pytest.approx(priced_s, rel=1e-9)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_all_members_of_a_group_issue_the_same_calls(plan: Plan):
    issued = [step_calls(plan, rank) for rank in range(plan.num_devices)]
    for rank, calls in enumerate(issued):
        for call, count in calls.items():
            if call.op == "send":
                assert call.ranks[0] == rank
            else:
                assert {issued[member][call] for member in call.ranks} == {count}


def test_one_device_issues_nothing():
    assert not step_calls(uniform("tiny-gpt2", "1xcpu", Strategy(), batch=4, seq_len=64), 0)
