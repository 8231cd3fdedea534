"""Explanations are facts: terms add up, the curve rises from the least memory, a why-not is what brute force says."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import meshwright
from meshwright import Found, Infeasible, Plan, UserError
from meshwright.cost.predict import predict
from meshwright.search import explain
from meshwright.search.curve import NUM_BUDGETS, curve_until
from meshwright.search.engine import search
from meshwright.search.fixes import with_memory
from meshwright.search.wanted import parse_wanted
from meshwright.spec.legality import why_illegal
from meshwright.spec.library import cluster, model
from meshwright.spec.strategy import Strategy
from meshwright.units import GiB
from tests.plans import cut, uniform
from tests.search.test_engine import every_tiny_plan
from tests.search.uniform import bound_bytes, step_s

PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-4cpu": ("tiny-llama", "4xcpu", {"global_batch": 8, "seq_len": 64}),
    "gpt2-4cpu-tight": ("tiny-gpt2", "4xcpu", {"global_batch": 16, "seq_len": 128, "memory": "4MiB"}),
    "llama-4cpu-reserve": ("tiny-llama", "4xcpu", {"global_batch": 8, "seq_len": 64, "memory": "3MiB",
                                                   "reserve": "512KiB"}),
    "gpt2-8a100-3d": ("gpt2", "8xa100-sxm-40g", {"global_batch": 16, "seq_len": 512, "memory": "4GiB", "space": "3d"}),
    "gpt2-8a100": ("gpt2", "8xa100-sxm-40g", {"global_batch": 16, "seq_len": 1024, "memory": "2GiB"}),
}  # fmt: skip


@cache
def planned(name: str) -> Plan:
    model_name, ranks, options = PLANS[name]
    outcome = meshwright.plan(model_name, ranks, **options)
    assert isinstance(outcome, Found)
    return outcome.plan


@cache
def explained(name: str) -> explain.Explanation:
    return explain.explain(planned(name), time_limit_s=4.0)


def priced(plan: Plan) -> Plan:
    return plan.model_copy(update={"predicted": predict(plan)})


@pytest.mark.parametrize("name", PLANS)
def test_terms_add_up(name: str):
    plan = planned(name)
    assert plan.predicted is not None
    for stage, seconds, held in zip(
        plan.predicted.stages, explain.stages_s(plan), explain.stages_bytes(plan), strict=True
    ):
        assert sum(seconds.values()) == pytest.approx(plan.predicted.step_s, rel=1e-9)
        assert sum(seconds.values()) - seconds["bubble_s"] == pytest.approx(stage.busy_s, rel=1e-9)
        parts = (held["states_bytes"], held["activation_bytes"], held["transient_bytes"])
        assert sum(parts) == held["bound_bytes"] == stage.bound_bytes
        assert all(part >= 0 for part in parts)


@pytest.mark.parametrize("name", PLANS)
def test_the_curve_rises_from_the_least_memory_to_the_whole_device(name: str):
    plan, points = planned(name), explained(name).curve
    budgets = [point.memory_bytes for point in points]
    assert budgets == sorted(set(budgets))
    assert len(points) >= NUM_BUDGETS
    assert {plan.budget.memory_bytes, plan.cluster.device.memory_bytes} <= set(budgets)
    times = [step_s(point.plan) for point in points]
    assert times == sorted(times, reverse=True)
    for point in points:
        assert predict(point.plan) == point.plan.predicted
        assert max(bound_bytes(point.plan)) <= point.memory_bytes - plan.budget.reserved_bytes
        assert point.gap is None or 0 <= point.gap < 1
    own = points[budgets.index(plan.budget.memory_bytes)]
    assert step_s(own.plan) <= step_s(plan)


@pytest.mark.parametrize("name", PLANS)
def test_below_the_first_point_nothing_fits(name: str):
    plan, first = planned(name), explained(name).curve[0]
    request = explain.request_of(plan)
    assert isinstance(search(with_memory(request, first.memory_bytes)), Found)
    # Where one strategy for all blocks is searched for, the least memory is known to a thousandth.
    less = first.memory_bytes // 1000 if request.space.uniform else 1
    assert isinstance(search(with_memory(request, first.memory_bytes - less)), Infeasible)


@pytest.mark.parametrize("name", PLANS)
def test_the_next_gib_is_a_difference_of_two_searches(name: str):
    plan, more = planned(name), explained(name).more_memory
    assert more is not None
    left = plan.cluster.device.memory_bytes - plan.budget.memory_bytes
    assert more.extra_bytes == min(GiB, left)
    assert step_s(more.after) <= step_s(more.before) <= step_s(plan)
    if not left:
        assert more.after == more.before
        return
    request = with_memory(explain.request_of(plan), plan.budget.memory_bytes + more.extra_bytes)
    outcome = search(request)
    assert isinstance(outcome, Found)
    assert step_s(more.after) == pytest.approx(step_s(outcome.plan), rel=0.01)


@pytest.mark.parametrize("name", PLANS)
def test_others_lose_what_their_terms_say(name: str):
    plan, others = planned(name), explained(name).others
    assert others or name == "gpt2-8a100-3d"
    for one in others:
        assert (one.plan.num_stages, one.plan.num_micro_batches) != (plan.num_stages, plan.num_micro_batches)
        assert one.slower_s == pytest.approx(step_s(one.plan) - step_s(plan), rel=1e-9)
        assert sum(one.terms_s.values()) == pytest.approx(one.slower_s, abs=1e-9 * step_s(plan))
        assert one.slower_s >= -1e-9 * step_s(plan)


def test_what_binds_is_what_is_short():
    tight, free = explained("gpt2-4cpu-tight").binding, explained("llama-4cpu").binding
    assert tight.what == "memory"
    fullest = max(bound_bytes(planned("gpt2-4cpu-tight")))
    assert tight.stages_bytes[tight.stage]["bound_bytes"] == fullest
    assert tight.share == pytest.approx(fullest / (4 << 20))
    assert tight.stages_bytes[tight.stage][tight.term] == max(
        tight.stages_bytes[tight.stage][term] for term in ("states_bytes", "activation_bytes", "transient_bytes")
    )
    assert free.what == "time"
    assert free.stages_s[free.stage][free.term] == max(free.stages_s[free.stage].values())


def test_a_worse_plan_is_told_of_the_better_one():
    plan = priced(uniform("tiny-llama", "4xcpu", Strategy(), batch=8, seq_len=64, stages=4, micro_batches=1))
    found = explain.explain(plan, curve=False)
    assert found.others[0].slower_s < 0
    assert step_s(found.others[0].plan) == step_s(planned("llama-4cpu"))
    assert found.curve == ()


def test_a_plan_over_its_budget_is_explained_too():
    plan = planned("llama-4cpu")
    tiny = plan.model_copy(update={"budget": plan.budget.model_copy(update={"memory_bytes": 1 << 16})})
    found = explain.explain(tiny, time_limit_s=4.0)
    assert found.binding.what == "memory"
    assert found.binding.share > 1
    assert found.others == ()
    assert found.curve[0].memory_bytes > 1 << 16
    assert found.more_memory is None


ASKED = [
    "tp=2",
    "zero=3",
    "recompute=full",
    "pp=2",
    "pp=1 m=2",
    "tp=2 recompute=full m=4",
    "dp=2 zero=2",
    "replicate=2",
]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
@pytest.mark.parametrize("text", ASKED)
@pytest.mark.parametrize("share", [0.05, 1.0])
def test_why_not_is_what_brute_force_says(name: str, text: str, share: float):
    """Of every plan of a tiny problem, those that have what is asked: the best, whether they fit, or that none is."""
    wanted, plans = parse_wanted(text), every_tiny_plan(name)
    needs = sorted(max(bound_bytes(plan)) for plan in plans)
    budget = int(needs[0] + share * (needs[-1] - needs[0]))
    outcome = meshwright.plan(cut(model(name), 2), "2xcpu", global_batch=4, seq_len=32, memory=budget)
    assert isinstance(outcome, Found)
    answer = explain.why_not(outcome.plan, wanted)
    matching = [
        plan
        for plan in plans
        if wanted.num_stages in (None, plan.num_stages)
        and wanted.num_micro_batches in (None, plan.num_micro_batches)
        and all(wanted.allows(strategy) for strategy in plan.strategies[1:-1])
    ]
    fitting = [plan for plan in matching if max(bound_bytes(plan)) <= budget]
    if answer.verdict == "already so":
        assert outcome.plan.strategies in {plan.strategies for plan in matching}
    elif not matching:
        assert answer.verdict == "illegal"
    elif not fitting:
        assert answer.verdict == "does not fit"
        assert max(answer.over_bytes) == min(max(bound_bytes(plan)) for plan in matching) - budget
        over = [max(0, held["bound_bytes"] - held["budget_bytes"]) for held in answer.stages_bytes]
        assert over == list(answer.over_bytes)
    else:
        assert answer.plan is not None
        assert answer.against is not None
        assert step_s(answer.plan) == pytest.approx(min(map(step_s, fitting)), rel=1e-9)
        assert answer.against.slower_s == pytest.approx(step_s(answer.plan) - step_s(outcome.plan), rel=1e-9)
        assert answer.verdict == ("equal" if math.isclose(step_s(answer.plan), step_s(outcome.plan)) else "slower")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=4", ("num_kv_heads=2",)),
        ("tp=3", ("tp=3 is not possible",)),
        ("tp=4 zero=3", ("exclude each other",)),
        ("zero=5", ("zero=5 is not possible",)),
        ("pp=3", ("pp=3", "1, 2, 4")),
        ("m=3", ("m=3 does not divide",)),
        ("dp=4 m=4", ("dp 4 does not divide the micro-batch of 2",)),
    ],
)
def test_what_cannot_be_has_the_rule(text: str, words: tuple[str, ...]):
    answer = explain.why_not(planned("llama-4cpu"), parse_wanted(text))
    assert answer.verdict == "illegal"
    assert answer.reasons
    assert all(word in " ".join(answer.reasons) for word in words)


def test_an_illegal_answer_is_the_rule_of_the_layers():
    rule = why_illegal(model("tiny-llama").layers[1], Strategy(tp=4), 8)
    assert rule is not None
    answer = explain.why_not(planned("llama-4cpu"), parse_wanted("tp=4"))
    assert any(f"blocks 1-4: {rule}" in reason for reason in answer.reasons)


def test_what_the_space_lacks_is_said():
    plan = planned("gpt2-8a100-3d")
    answer = explain.why_not(plan, parse_wanted("zero=3"))
    assert answer.verdict == "not in the space"
    assert "space full" in " ".join(answer.reasons)
    assert explain.why_not(planned("llama-4cpu"), parse_wanted("zero=1")).verdict == "not in the space"


def test_a_better_plan_than_the_given_one_is_admitted():
    options: dict[str, Any] = {"batch": 16, "seq_len": 512, "stages": 8, "micro_batches": 1}
    plan = priced(uniform("gpt2", "8xa100-sxm-40g", Strategy(), **options))
    answer = explain.why_not(plan, parse_wanted("pp=8 m=16"))
    assert answer.verdict == "faster"
    assert answer.against is not None
    assert answer.against.slower_s < 0
    assert explain.why_not(plan, parse_wanted("pp=8 m=1 tp=1")).verdict == "already so"


def test_two_plans_side_by_side():
    first = planned("llama-4cpu")
    second = priced(uniform("tiny-llama", "4xcpu", Strategy(), batch=8, seq_len=64, stages=4, micro_batches=1))
    found = explain.compare(first, second)
    assert found.differs == ()
    assert found.against.slower_s == pytest.approx(step_s(second) - step_s(first), rel=1e-9)
    assert sum(found.against.terms_s.values()) == pytest.approx(found.against.slower_s, rel=1e-9)
    other = explain.compare(first, planned("gpt2-4cpu-tight"))
    assert [line.split(":")[0] for line in other.differs] == ["model", "job", "budget"]


def test_batches_are_compared_for_equal_samples():
    small = priced(uniform("tiny-llama", "4xcpu", Strategy(dp_replicate=4), batch=8, seq_len=64, micro_batches=1))
    large = priced(uniform("tiny-llama", "4xcpu", Strategy(dp_replicate=4), batch=16, seq_len=64, micro_batches=2))
    held = explain.against(large, small)
    assert held.slower_s == pytest.approx(step_s(large) / 2 - step_s(small), rel=1e-9)
    assert held.slower_s < 0, "the large batch synchronises gradients half as often"
    assert held.terms_s["compute_s"] == pytest.approx(0, abs=1e-3 * step_s(small))


def test_the_question_is_that_of_the_plan():
    for name, (_, _, options) in PLANS.items():
        plan = planned(name)
        request = explain.request_of(plan)
        assert request.space.name == options.get("space", "full")
        assert (request.job, request.budget) == (plan.job, plan.budget)
        explain.check_plan(plan, where=name)
    even = meshwright.plan("tiny-llama", "4xcpu", global_batch=8, seq_len=64, partition="even")
    assert isinstance(even, Found)
    assert explain.request_of(even.plan).space.partition == "even"
    strange = even.plan.model_copy(update={"proof": even.plan.proof and even.plan.proof.model_copy(
        update={"space": "of another version"})})  # fmt: skip
    assert explain.request_of(strange).space.name == "full"


def slower_links(plan: Plan) -> Plan:
    link = plan.cluster.intra_node.model_copy(update={"bytes_per_s": plan.cluster.intra_node.bytes_per_s / 2})
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"intra_node": link})})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: plan.model_copy(update={"predicted": None}), "no prediction|is null"),
        (slower_links, "not the price of this plan"),
        (lambda plan: plan.model_copy(update={"model": cut(plan.model, 4).model_copy(update={"groups": tuple(
            group.model_copy(update={"layer": group.layer.model_copy(update={"norm": "layernorm"})})
            if group.layer.kind == "block" else group for group in plan.model.groups)})}), "not the price"),
        (lambda plan: plan.model_copy(update={"cluster": cluster("2x4xcpu")}), "num_devices"),
    ],
)  # fmt: skip
def test_what_is_not_the_prediction_of_the_plan_is_refused(change: Any, says: str):
    with pytest.raises(UserError, match=says) as caught:
        explain.check_plan(change(planned("llama-4cpu")), where="plan.json")
    assert "\n" not in str(caught.value)


def test_time_limits_are_kept_and_the_curve_rises_without_time():
    plan = planned("gpt2-8a100")
    request = replace(explain.request_of(plan), time_limit_s=0.1)
    times = [step_s(point.plan) for point in curve_until(request, (plan,), math.inf)[0]]
    assert times == sorted(times, reverse=True)
