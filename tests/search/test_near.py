"""Runners-up are good plans of their settings, found by the same work each time."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright
from meshwright import Found
from meshwright.search.problem import price, stage_bytes
from meshwright.search.stages import better_plan, solve_problem
from tests.search.bruteforce import a_random_problem


@pytest.mark.parametrize("seed", range(80))
def test_a_better_plan_fits_and_is_one(seed: int):
    problem = a_random_problem(seed)
    known = solve_problem(problem, time_limit_s=30.0)
    if known is None:
        return
    # Nothing is better than the best; a plan that is called worse than it is may be replaced.
    assert better_plan(problem, known) is None
    worse = price(problem, known.boundaries, known.strategies)
    worse = type(worse)(**{**worse.__dict__, "objective_s": 10 * worse.objective_s})
    found = better_plan(problem, worse)
    if found is not None:
        assert known.objective_s * (1 - 1e-12) <= found.objective_s < worse.objective_s
        used = stage_bytes(problem, found.boundaries, found.strategies)
        assert all(one <= budget for one, budget in zip(used, problem.budget_bytes, strict=True))
        assert better_plan(problem, worse) == found


@pytest.mark.parametrize("memory", ["17GiB", "20GiB"])
def test_runners_up_come_near_the_best_plans_of_their_settings(memory: str):
    options: dict[str, Any] = {"global_batch": 64, "seq_len": 4096, "memory": memory}
    whole = meshwright.plan("llama-2-7b", "8xa100-sxm-40g", **options)
    assert isinstance(whole, Found)
    steps: list[float] = []
    for plan in whole.runners_up[:3]:
        alone = meshwright.plan(
            "llama-2-7b",
            "8xa100-sxm-40g",
            stages=plan.num_stages,
            micro_batches=plan.num_micro_batches,
            **options,
        )
        assert isinstance(alone, Found)
        assert alone.plan.predicted is not None
        assert plan.predicted is not None
        steps.append(plan.predicted.step_s / alone.plan.predicted.step_s)
    assert max(steps) < 1.03
    assert sum(steps) / len(steps) < 1.01
