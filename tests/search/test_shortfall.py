"""The least overfull plan against every plan of random small problems."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.search.problem import StageProblem, stage_bytes
from meshwright.search.shortfall import shortfall
from tests.search.bruteforce import Plans, a_random_problem, every_plan


def over_budget(problem: StageProblem, plans: list[Plans]) -> float | None:
    """Return the least largest overflow; plans whose bytes are not finite cannot run."""
    excess = np.concatenate([part.excess for part in plans])
    excess = excess[np.isfinite(excess)]
    return float(excess.min()) if len(excess) else None


@pytest.mark.parametrize("seed", range(120))
def test_no_plan_is_less_overfull(seed: int):
    problem = a_random_problem(seed)
    plans = every_plan(problem)
    found = shortfall(problem)
    expected = over_budget(problem, plans)
    if found is None:
        assert expected is None
        return
    assert max(found.over_bytes) == expected
    assert list(found.stage_bytes) == stage_bytes(problem, found.boundaries, found.strategies)
    assert found.over_bytes[found.worst_stage] == max(found.over_bytes)
    one = plans[seed % len(plans)]
    within = shortfall(problem, partitions=(one.boundaries,))
    assert within is not None
    assert within.boundaries == one.boundaries
    assert max(within.over_bytes) == over_budget(problem, [one])
