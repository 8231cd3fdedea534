"""Schedules: known small ones, and what must hold of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.spec.schedule import Action, ScheduleName, check_schedule, in_flight, make_schedule, prerequisites

NAMES = st.sampled_from(["1f1b", "gpipe"])


def shown(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{action.phase[0].upper()}{action.micro_batch}" for action in actions)


def test_1f1b_by_hand():
    stages = [shown(actions) for actions in make_schedule("1f1b", 3, 4)]
    assert stages == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_by_hand():
    assert [shown(actions) for actions in make_schedule("gpipe", 2, 2)] == ["F0 F1 B0 B1", "F0 F1 B0 B1"]


@given(NAMES, st.integers(1, 6), st.integers(1, 9))
def test_in_flight_is_what_the_actions_hold(name: ScheduleName, num_stages: int, num_micro_batches: int):
    for stage, actions in enumerate(make_schedule(name, num_stages, num_micro_batches)):
        held = most = 0
        for action in actions:
            held += 1 if action.phase == "forward" else -1
            most = max(most, held)
        assert held == 0
        assert most == in_flight(name, num_stages, num_micro_batches, stage)


@given(NAMES, st.integers(1, 6), st.integers(1, 9))
def test_neighbours_exchange_in_the_same_order(name: ScheduleName, num_stages: int, num_micro_batches: int):
    """What a stage sends in order is what its neighbour expects in order: messages need no tags."""
    schedule = make_schedule(name, num_stages, num_micro_batches)
    for phase in ("forward", "backward"):
        orders = {tuple(a.micro_batch for a in actions if a.phase == phase) for actions in schedule}
        assert orders == {tuple(range(num_micro_batches))}


def test_prerequisites():
    forward, backward = Action("forward", 1), Action("backward", 1)
    assert prerequisites(0, forward, 3) == ()
    assert prerequisites(1, forward, 3) == ((0, forward),)
    assert prerequisites(1, backward, 3) == ((1, forward), (2, backward))
    assert prerequisites(2, backward, 3) == ((2, forward),)


def test_a_deadlock_is_found():
    f0, f1, b0, b1 = (Action(phase, j) for phase in ("forward", "backward") for j in (0, 1))
    with pytest.raises(ValueError, match=r"stages \[0, 1\] wait for each other"):
        check_schedule(((f0, b0, f1, b1), (f0, f1, b0, b1)), 2)


def test_a_lost_micro_batch_is_found():
    f0, b0 = Action("forward", 0), Action("backward", 0)
    for actions in ((f0,), (f0, b0, b0), (f0, Action("backward", 1))):
        with pytest.raises(ValueError, match="stage 0 does not run every micro-batch once"):
            check_schedule((actions,), 1)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(0, 1), (1, 0)])
def test_empty_schedules_are_refused(num_stages: int, num_micro_batches: int):
    with pytest.raises(UserError, match="both must be at least 1"):
        make_schedule("1f1b", num_stages, num_micro_batches)
