"""The simulator against a plain event loop that knows only the schedule and its prerequisites."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from meshwright.cost.simulate import simulate, simulate_many
from meshwright.spec.schedule import Action, ScheduleName, make_schedule, prerequisites

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe")


def event_loop(
    name: ScheduleName, forward: list[Any], backward: list[Any], step: list[Any], num_micro_batches: int
) -> tuple[Any, dict[tuple[int, Action], Any]]:
    """Run the actions one at a time; return the step time and the end of every action."""
    schedule = make_schedule(name, len(forward), num_micro_batches)
    queues = [list(actions) for actions in schedule]
    free: list[Any] = [0] * len(forward)
    ends: dict[tuple[int, Action], Any] = {}
    while any(queues):
        for stage, queue in enumerate(queues):
            needs = prerequisites(stage, queue[0], len(forward)) if queue else ()
            if queue and all(need in ends for need in needs):
                action = queue.pop(0)
                duration = forward[stage] if action.phase == "forward" else backward[stage]
                free[stage] = max([free[stage], *(ends[need] for need in needs)]) + duration
                ends[stage, action] = free[stage]
    return max(end + extra for end, extra in zip(free, step, strict=True)), ends


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_the_event_loop_on_random_integers(name: ScheduleName) -> None:
    rng = random.Random(1)
    for _ in range(150):
        stages, micro = rng.randint(1, 9), rng.randint(1, 24)
        rows = [[rng.randint(0, 50) for _ in range(stages)] for _ in range(3)]
        expected, _ = event_loop(name, *rows, micro)
        found = simulate_many(name, *(np.array([row]) for row in rows), micro)
        assert found.dtype.kind == "i"
        assert found.tolist() == [expected]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (1, 7), (6, 1), (6, 3), (4, 4), (3, 17)])
def test_edge_shapes(name: ScheduleName, stages: int, micro: int) -> None:
    rng = random.Random(stages * 100 + micro)
    forward, backward, step = ([rng.random() for _ in range(stages)] for _ in range(3))
    assert simulate(name, forward, backward, step, micro) == event_loop(name, forward, backward, step, micro)[0]


def test_equal_stages_have_the_closed_form() -> None:
    for name in SCHEDULES:
        assert simulate(name, [1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0], 8) == (8 + 4 - 1) * 3
    assert simulate("1f1b", [1.0], [2.0], [5.0], 8) == 29.0


def test_many_candidates_are_independent() -> None:
    rng = np.random.default_rng(2)
    forward, backward, step = rng.random((3, 20, 5))
    together = simulate_many("1f1b", forward, backward, step, 12)
    alone = [simulate("1f1b", forward[at], backward[at], step[at], 12) for at in range(20)]
    assert together.tolist() == alone


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="shapes"):
        simulate("1f1b", [1.0, 2.0], [1.0], [0.0, 0.0], 4)
