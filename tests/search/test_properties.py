"""What must hold of every answer: more of anything is never worse, and the order of equals does not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright
from meshwright import Found
from meshwright.search.balance import solve_balanced
from meshwright.search.problem import StageProblem
from meshwright.search.space import PARTITIONS, SPACES
from meshwright.search.stages import solve_problem
from meshwright.spec.library import model
from tests.plans import cut
from tests.search.bruteforce import a_random_problem
from tests.search.uniform import step_s

ROUNDING = 1e-9
SEEDS = st.integers(0, 10**6)


def best(problem: StageProblem) -> float:
    """Return the proved optimum; inf when nothing fits."""
    found = solve_problem(problem, time_limit_s=30.0)
    if found is None:
        return np.inf
    assert found.lower_bound_s == found.objective_s
    return found.objective_s


def without(problem: StageProblem, column: int) -> StageProblem:
    forward = problem.forward_s.copy()
    forward[:, column] = np.inf
    return replace(problem, forward_s=forward)


def permuted(problem: StageProblem, order: np.ndarray) -> StageProblem:
    """Return the problem with its strategies in another order."""

    def pairs(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[..., order, :][..., order]

    def last(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[..., order]

    by_strategy = ("forward_s", "backward_s", "step_s", "states_bytes", "act_bytes", "transient_bytes",
                   "freed_bytes", "layout",
                   "border_forward_s", "border_backward_s", "tied_step_s", "tied_extra_bytes")  # fmt: skip
    by_pair = ("switch_forward_s", "switch_backward_s", "enter_forward_s", "enter_backward_s")
    changes: dict[str, Any] = {name: last(getattr(problem, name)) for name in by_strategy}
    changes |= {name: pairs(getattr(problem, name)) for name in by_pair}
    return replace(problem, **changes)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(1.0, 3.0))
def test_more_memory_is_never_worse(seed: int, factor: float):
    problem = a_random_problem(seed)
    richer = replace(problem, budget_bytes=problem.budget_bytes * factor)
    assert best(richer) <= best(problem) * (1 + ROUNDING)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(0, 3))
def test_more_strategies_are_never_worse(seed: int, column: int):
    problem = a_random_problem(seed)
    fewer = without(problem, column % problem.forward_s.shape[1])
    assert best(problem) <= best(fewer) * (1 + ROUNDING)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.randoms())
def test_the_order_of_strategies_does_not_matter(seed: int, draw: Any):
    problem = a_random_problem(seed)
    order = list(range(problem.forward_s.shape[1]))
    draw.shuffle(order)
    assert best(permuted(problem, np.array(order))) == best(problem)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_the_papers_loop_is_never_better(seed: int):
    problem = a_random_problem(seed)
    found = solve_balanced(problem)
    if found.choice is None:
        return
    assert best(problem) <= found.choice.objective_s * (1 + ROUNDING)
    assert all(used <= budget for used, budget in zip(found.choice.stage_bytes, problem.budget_bytes, strict=True))
    assert [one.name for one in found.balances][-1] == "answer"
    for one in found.balances:
        assert 0 <= one.alpha_t <= 1 - 1 / problem.num_stages + ROUNDING
        assert 0 <= one.alpha_m <= 1 - 1 / problem.num_stages + ROUNDING


REQUESTS = st.fixed_dictionaries(
    {
        "global_batch": st.sampled_from([4, 6, 8, 12]),
        "seq_len": st.sampled_from([32, 64, 128]),
        "memory": st.sampled_from([None, "1MiB", "1500KiB", "2MiB", "3MiB", "4MiB"]),
        "schedule": st.sampled_from(["1f1b", "gpipe"]),
    }
)
MODELS = st.sampled_from(["tiny-llama", "tiny-gpt2"])
CLUSTERS = st.sampled_from(["2xcpu", "3xcpu", "4xcpu", "6xcpu", "2x2xa100-pcie-40g"])


def planned(name: str, ranks: str, blocks: int, **options: Any) -> float:
    """Return the printed seconds a sample; inf when nothing fits."""
    outcome = meshwright.plan(cut(model(name), blocks), ranks, **options)
    return step_s(outcome.plan) / outcome.plan.global_batch_size if isinstance(outcome, Found) else np.inf


@settings(max_examples=25, deadline=None)
@given(MODELS, CLUSTERS, st.integers(2, 5), REQUESTS, st.sampled_from(sorted(SPACES)))
def test_full_is_never_worse_than_a_sub_space(name: str, ranks: str, blocks: int, options: Any, space: str):
    assert planned(name, ranks, blocks, **options) <= planned(name, ranks, blocks, space=space, **options) * (
        1 + ROUNDING
    )


@settings(max_examples=20, deadline=None)
@given(MODELS, CLUSTERS, st.integers(2, 5), REQUESTS, st.sampled_from(sorted(PARTITIONS)))
def test_exact_stages_are_never_worse_than_others(name: str, ranks: str, blocks: int, options: Any, partition: Any):
    for space in ("full", "base"):
        exact = planned(name, ranks, blocks, space=space, partition="exact", **options)
        assert exact <= planned(name, ranks, blocks, space=space, partition=partition, **options) * (1 + ROUNDING)


@settings(max_examples=15, deadline=None)
@given(MODELS, CLUSTERS, st.integers(2, 4), REQUESTS, st.sampled_from([2, 3, 4, 6, 8]))
def test_more_batch_sizes_are_never_worse(name: str, ranks: str, blocks: int, options: Any, largest: int):
    options = {**options, "global_batch": f"2..{largest}"}
    wider = {**options, "global_batch": f"2..{2 * largest}"}
    assert planned(name, ranks, blocks, **wider) <= planned(name, ranks, blocks, **options) * (1 + ROUNDING)
