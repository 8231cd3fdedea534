"""Whatever is asked, a search ends soon after its time limit, with a plan wherever one can be had, and says so."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

import meshwright
from meshwright import Found, Infeasible
from meshwright.search import explain, stages, sweep
from meshwright.search.curve import curve_until
from meshwright.search.engine import search
from meshwright.search.planner import make_request
from meshwright.search.shortfall import least_overflow, shortfall
from meshwright.search.stages import solve_problem
from tests.search.bruteforce import random_freeing, random_problem

SLACK_S = 10.0  # graces of 3 and 2 s, one setting, and a busy machine


@pytest.mark.parametrize("seed", range(60))
def test_without_time_there_is_a_plan_where_one_fits(seed: int, monkeypatch: pytest.MonkeyPatch):
    problem = random_freeing(seed) if seed % 2 else random_problem(seed)
    best = solve_problem(problem, time_limit_s=30.0)
    monkeypatch.setattr(stages, "_GRACE_S", -1.0)
    found = solve_problem(problem, time_limit_s=0.0)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.lower_bound_s <= best.objective_s <= found.objective_s * (1 + 1e-12)
        fits = zip(found.stage_bytes, problem.budget_bytes, strict=True)
        assert all(used <= budget for used, budget in fits)


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_of_what_is_short_is_one(seed: int):
    problem = random_freeing(seed) if seed % 2 else random_problem(seed)
    short = shortfall(problem)
    if short is not None:
        assert least_overflow(problem) <= max(short.over_bytes)


def test_a_search_without_time_returns_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweep, "_GRACE_S", -1.0)
    outcome = meshwright.plan("tiny-gpt2", "4xcpu", global_batch=16, seq_len=128, time_limit_s=1e-9)
    assert isinstance(outcome, Found)
    assert outcome.stopped == "time limit"
    assert outcome.plan.predicted is not None
    assert outcome.plan.predicted.peak_bytes <= outcome.plan.budget.usable_bytes
    assert outcome.plan.proof is not None
    assert 0 < outcome.plan.proof.gap < 1


def test_a_search_without_time_does_not_claim_that_nothing_fits(monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"global_batch": 16, "seq_len": 128, "memory": "1MiB"}
    whole = meshwright.plan("tiny-gpt2", "4xcpu", **options)
    monkeypatch.setattr(sweep, "_GRACE_S", -1.0)
    outcome = meshwright.plan("tiny-gpt2", "4xcpu", time_limit_s=1e-9, **options)
    assert isinstance(whole, Infeasible)
    assert not whole.stopped
    assert isinstance(outcome, Infeasible)
    assert outcome.stopped == "time limit"
    assert "not all settings were looked at" in outcome.reason
    assert max(outcome.shortfall_bytes) >= max(whole.shortfall_bytes)


@pytest.mark.parametrize("partition", [None, "bmw", "memory"])
@pytest.mark.parametrize("memory", ["1GiB", None])
def test_many_settings_end_in_time(memory: str | None, partition: Any):
    request = make_request(
        "llama-2-7b",
        "8x8xa100-sxm-40g",
        global_batch="64..1024",
        seq_len=4096,
        memory=memory,
        partition=partition,
        time_limit_s=0.5,
    )
    started = time.perf_counter()
    outcome = search(request)
    assert time.perf_counter() - started < request.time_limit_s + SLACK_S
    assert isinstance(outcome, Found) or memory is not None
    assert outcome.stopped == "time limit"


def test_an_explanation_says_what_there_was_no_time_for():
    plan = meshwright.plan("gpt2", "8xa100-sxm-40g", global_batch=16, seq_len=1024, memory="2GiB")
    assert isinstance(plan, Found)
    request = replace(explain.request_of(plan.plan), time_limit_s=0.2)
    points, cut_short = curve_until(request, (plan.plan,), time.perf_counter())
    assert [point.memory_bytes for point in points] == sorted(point.memory_bytes for point in points)
    assert request.budget.memory_bytes in [point.memory_bytes for point in points]
    assert "the search at budgets of" in cut_short[-1]
    started = time.perf_counter()
    found = explain.explain(plan.plan, time_limit_s=0.01)
    assert time.perf_counter() - started < 2 * 0.01 + SLACK_S
    assert found.cut_short
