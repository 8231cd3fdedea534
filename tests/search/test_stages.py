"""The stage solver against every plan of small problems, and its promises on larger ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cost.simulate import simulate_many
from meshwright.search import enumeration, rows
from meshwright.search.bound import Pipe, bound_of
from meshwright.search.problem import StageProblem, price
from meshwright.search.shortfall import shortfall
from meshwright.search.stages import Unfinished, solve, solve_below, solve_problem
from tests.search.bruteforce import Plans, a_random_problem, every_plan, random_freeing, random_growing, random_problem


def best_time(plans: list[Plans]) -> float:
    return min((part.times[part.excess <= 0].min(initial=np.inf) for part in plans), default=np.inf)


def check(problem: StageProblem, plans: list[Plans], partitions: tuple[tuple[int, ...], ...] | None = None) -> bool:
    """Compare with enumeration; return whether something fits."""
    expected = best_time(plans)
    found = solve_problem(problem, time_limit_s=30.0, partitions=partitions)
    if not np.isfinite(expected):
        assert found is None
        return False
    assert found is not None
    assert found.objective_s == pytest.approx(expected, rel=1e-9, abs=0)
    assert found.lower_bound_s == found.objective_s, "small problems are proved"
    part = next(part for part in plans if part.boundaries == found.boundaries)
    row = np.flatnonzero((part.strategies == found.strategies).all(axis=1))
    assert len(row) == 1
    assert part.excess[row[0]] <= 0
    assert part.times[row[0]] == pytest.approx(found.objective_s, rel=1e-9, abs=0)
    assert price(problem, found.boundaries, found.strategies).objective_s == found.objective_s
    assert all(used <= budget for used, budget in zip(found.stage_bytes, problem.budget_bytes, strict=True))
    return True


@pytest.mark.parametrize("block", range(10))
def test_equals_enumeration(block: int) -> None:
    fitting = [
        check(problem, every_plan(problem)) for problem in map(random_problem, range(block * 60, block * 60 + 60))
    ]
    assert 20 < sum(fitting) < 60


@pytest.mark.parametrize("random_one", [random_freeing, random_growing])
@pytest.mark.parametrize("block", range(10))
def test_equals_enumeration_where_layers_free_what_they_hold(
    block: int, random_one: Callable[[int], StageProblem]
) -> None:
    problems = [random_one(seed) for seed in range(10_000 + block * 40, 10_040 + block * 40)]
    fitting = [check(problem, every_plan(problem)) for problem in problems]
    assert sum(fitting) > 20


def test_freeing_lets_better_plans_fit() -> None:
    """The peaks of the random problems are below the sums with the largest transient, and it matters."""
    better = 0
    for seed in range(10_000, 10_200):
        problem = random_freeing(seed)
        free, held = (solve_problem(one, time_limit_s=30.0) for one in (problem, replace(problem, freed_bytes=None)))
        assert held is None or free is not None
        if free is not None:
            assert held is None or free.objective_s <= held.objective_s
            better += held is None or free.objective_s < held.objective_s
    assert better > 20


@pytest.mark.parametrize("random_one", [random_problem, random_freeing, random_growing])
def test_rows_made_little_by_little_prove_the_same(random_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cells are enumerated at once; here they go through limits and tails like large ones."""
    monkeypatch.setattr(rows, "_FEW_PLANS", 0)
    for seed in range(3000, 3150):
        problem = random_one(seed)
        check(problem, every_plan(problem))


def test_capped_rows_leave_a_valid_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_FEW_PLANS", 0)
    monkeypatch.setattr(rows, "_WIDEST", 1)
    monkeypatch.setattr(enumeration, "_MAX_LABELS", 3)
    open_gaps = 0
    for seed in range(4000, 4200):
        problem = a_random_problem(seed)
        expected = best_time(every_plan(problem))
        found = solve_problem(problem, time_limit_s=30.0)
        assert (found is None) == (not np.isfinite(expected))
        if found is not None:
            assert found.lower_bound_s <= expected * (1 + 1e-12)
            assert found.objective_s >= expected * (1 - 1e-12)
            open_gaps += found.gap > 0
    assert open_gaps


def test_what_a_cap_has_ended_goes_on_with_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds only rise, plans only get better, neither passes the optimum, and some problems are closed so."""
    monkeypatch.setattr(rows, "_FEW_PLANS", 0)
    monkeypatch.setattr(enumeration, "_MAX_LABELS", 2)
    closed = 0
    for seed in range(4000, 4200):
        problem, unfinished = a_random_problem(seed), Unfinished()
        first, bound_s = solve_below(problem, beat_s=None, unfinished=unfinished)
        if first is None or not unfinished.can_widen or first.gap == 0:
            continue
        expected = best_time(every_plan(problem))
        better, later_s = solve_below(problem, beat_s=first.objective_s, unfinished=unfinished)
        assert bound_s <= later_s * (1 + 1e-12)
        assert later_s <= expected * (1 + 1e-12)
        assert better is None or expected * (1 - 1e-12) <= better.objective_s < first.objective_s
        whole = solve_problem(problem)
        assert whole is not None
        assert whole.objective_s <= (first if better is None else better).objective_s
        closed += whole.gap == 0
    assert closed


def test_only_plans_that_beat_what_is_given() -> None:
    """Also where a stage has a constant once a step, which one stage leaves out of its labels."""
    for seed in range(5000, 5060):
        problem = a_random_problem(seed)
        best = solve_problem(problem)
        if best is None:
            continue
        for factor in (0.8, 1.0):
            beat_s = best.objective_s * factor
            assert solve_below(problem, beat_s=beat_s) == (None, pytest.approx(beat_s, rel=1e-9))
        found, _ = solve_below(problem, beat_s=best.objective_s * 1.1 + 1)
        assert found is not None
        assert found.objective_s == best.objective_s


def test_time_that_is_over_says_nothing_of_partitions() -> None:
    problem = random_problem(1_000_006)
    cuts = tuple(part.boundaries for part in every_plan(problem))
    assert solve_below(problem, beat_s=1e6, time_limit_s=0.0, partitions=cuts) == (None, 0.0)


def test_partitions_restrict_the_cuts() -> None:
    for seed in range(1000, 1060):
        problem = a_random_problem(seed)
        plans = every_plan(problem)[seed % 3 :: 3]
        if problem.num_stages > 1 and plans:
            check(problem, plans, tuple(part.boundaries for part in plans))


def test_shortfall_equals_enumeration() -> None:
    for seed in range(2000, 2200):
        problem = a_random_problem(seed)
        plans = every_plan(problem)
        found = shortfall(problem)
        expected = min((part.excess.min(initial=np.inf) for part in plans), default=np.inf)
        if not np.isfinite(expected):
            assert found is None
            continue
        assert found is not None
        assert max(found.over_bytes) == pytest.approx(expected, rel=1e-12, abs=1e-9)
        assert found.over_bytes[found.worst_stage] == max(found.over_bytes)


def test_the_bound_never_exceeds_the_simulation() -> None:
    rng = np.random.default_rng(3)
    for case in range(200):
        stages, m = int(rng.integers(1, 8)), int(rng.integers(1, 20))
        name = "1f1b" if case % 2 else "gpipe"
        f, b, g = rng.integers(0, 100, (3, 30, stages))
        ahead = tuple(min(m, stages - i) if case % 2 else m for i in range(stages))
        pipe = Pipe(num_micro_batches=m, num_ahead=ahead, phased=name == "gpipe")
        assert (bound_of(pipe, f, b, g) <= simulate_many(name, f, b, g, m)).all()


def llama_like(stages: int, m: int, **changes: object) -> StageProblem:
    """32 equal blocks between an embedding and a head; 24 strategies that trade seconds for bytes; 6 layouts."""
    rng = np.random.default_rng(7)
    count = 24
    speed, layout = rng.uniform(1.0, 2.0, count), np.arange(count) % 6
    weight = np.array([0.1, *[1.0] * 32, 2.5])[:, None]
    table = np.abs(np.arange(6)[:, None] - np.arange(6)[None, :])[np.ix_(layout, layout)] * 1e-4
    problem = StageProblem(
        forward_s=weight * speed * 3e-3,
        backward_s=weight * speed * rng.uniform(1.8, 2.6, count) * 3e-3,
        step_s=weight * rng.uniform(0, 4e-3, count),
        states_bytes=weight * 4e8 / speed,
        act_bytes=weight * 1e8 / speed**2,
        transient_bytes=weight * rng.choice([0.0, 1e8, 3e8], count),
        switch_forward_s=table,
        switch_backward_s=table,
        border_forward_s=np.full(count, 2e-4),
        border_backward_s=np.full(count, 2e-4),
        layout=layout,
        in_flight=np.array([min(m, stages - i) for i in range(stages)]),
        budget_bytes=np.full(stages, 1.1e10 / stages + 2e9),
        stage_step_s=np.zeros(stages),
        num_micro_batches=m,
        schedule="1f1b",
    )
    return replace(problem, **changes)


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize(("stages", "m"), [(1, 16), (2, 16), (4, 32)])
def test_larger_problems_keep_their_promises(stages: int, m: int, *, frees: bool) -> None:
    problem = llama_like(stages, m)
    problem = replace(problem, freed_bytes=problem.act_bytes if frees else None)
    found = solve_problem(problem, time_limit_s=1.0)
    assert found is not None
    assert 0 <= found.gap < 0.03
    assert stages > 1 or found.gap == 0.0
    assert all(used <= budget for used, budget in zip(found.stage_bytes, problem.budget_bytes, strict=True))
    assert price(problem, found.boundaries, found.strategies).objective_s == found.objective_s


def test_no_time_still_gives_a_plan() -> None:
    found = solve_problem(llama_like(4, 8), time_limit_s=0.0)
    assert found is not None
    assert found.lower_bound_s <= found.objective_s


def test_even_partition_is_never_better() -> None:
    problem = llama_like(2, 16)
    even = solve_problem(problem, time_limit_s=1.0, partitions=((0, 17, 34),))
    free = solve_problem(problem, time_limit_s=1.0)
    assert even is not None
    assert free is not None
    assert even.boundaries == (0, 17, 34)
    assert free.lower_bound_s <= even.objective_s


def test_switch_costs_must_follow_the_layout() -> None:
    problem = llama_like(2, 4)
    table = problem.switch_forward_s.copy()
    table[0, 7] += 1e-3
    with pytest.raises(ValueError, match="layout"):
        solve_problem(replace(problem, switch_forward_s=table))


def test_more_stages_than_layers() -> None:
    problem = llama_like(2, 4)
    many = replace(problem, in_flight=np.ones(40, int), budget_bytes=np.full(40, 1e12), stage_step_s=np.zeros(40))
    assert solve_problem(many) is None
    assert shortfall(many) is None


PIPES = sorted((Path(__file__).resolve().parents[3] / "shared" / "solver" / "dev").glob("pipe_*.npz"))


@pytest.mark.skipif(not PIPES, reason="the shared solver instances are absent")
@pytest.mark.parametrize("path", PIPES, ids=lambda path: path.stem)
def test_shared_pipelines_in_closed_form(path: Path) -> None:
    data = np.load(path)
    found = solve(
        layer_s=data["time_s"],
        states_bytes=data["state_mb"],
        act_bytes=data["act_mb"],
        switch_s=data["switch_s"],
        border_s=0,
        step_s=np.zeros_like(data["time_s"]),
        in_flight=data["inflight"],
        budget_bytes=data["budget_mb"],
        num_micro_batches=int(data["n_microbatches"]),
    )
    expected = float(data["opt_objective_s"])
    if not np.isfinite(expected):
        assert found is None
        return
    assert found is not None
    assert found.objective_s == pytest.approx(expected, rel=1e-9)
    assert found.lower_bound_s == found.objective_s
    assert len(found.stage_s) == len(found.stage_bytes) == len(data["inflight"])


@pytest.mark.parametrize("seed", range(60))
def test_arrays_in_closed_form_equal_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, count, stages, m = 4, int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 7))

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(0, 5 if seed % 2 else 900, shape).astype(float)

    seconds, once, states, act, transient, freed = (draw(layers, count) for _ in range(6))
    freed *= seed % 3 > 0
    switch, border = draw(layers, count, count), draw(count, count) * float(rng.integers(0, 2))
    in_flight, budget = np.array([stages - i for i in range(stages)]), draw(stages) + 3 * states.mean() + act.mean()
    best = np.inf
    for cuts in product(range(1, layers), repeat=stages - 1):
        bounds = (0, *cuts, layers)
        if any(low >= high for low, high in pairwise(bounds)):
            continue
        for plan in product(range(count), repeat=layers):
            c, g, fits = [], [], True
            for i, (low, high) in enumerate(pairwise(bounds)):
                span = range(low, high)
                c.append(sum(seconds[n, plan[n]] for n in span))
                c[-1] += sum(switch[n, plan[n - 1], plan[n]] for n in span if n > low)
                c[-1] += border[plan[low - 1], plan[low]] if i else 0.0
                g.append(sum(once[n, plan[n]] for n in span))
                held = sum(states[n, plan[n]] + in_flight[i] * act[n, plan[n]] for n in span)
                moments = [transient[n, plan[n]] - sum(freed[j, plan[j]] for j in span if j > n) for n in span]
                fits &= held + max(moments) <= budget[i]
            if fits:
                best = min(best, sum(c) + (m - 1) * max(c) + max(g))
    found = solve(
        layer_s=seconds, step_s=once, states_bytes=states, act_bytes=act, transient_bytes=transient, switch_s=switch,
        border_s=border, in_flight=in_flight, budget_bytes=budget, num_micro_batches=m, freed_bytes=freed,
    )  # fmt: skip
    assert (found is None) == (not np.isfinite(best))
    if found is not None:
        assert found.objective_s == pytest.approx(best, rel=1e-9)
        assert found.lower_bound_s == found.objective_s
