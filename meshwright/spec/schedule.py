"""In which order each stage runs its micro-batches, as data: priced by `cost`, executed by `runtime`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from meshwright.errors import UserError

ScheduleName = Literal["1f1b", "gpipe"]


class Action(NamedTuple):
    """One step of a stage: the forward or backward pass of one micro-batch."""

    phase: Literal["forward", "backward"]
    micro_batch: int


Schedule = tuple[tuple[Action, ...], ...]  # [stage][position]


def make_schedule(name: ScheduleName, num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the checked schedule `name`: for each stage its actions in order.

    GPipe runs all forwards, then all backwards. 1F1B (PipeDream-Flush, arXiv 2006.09503) starts
    stage i with P - i - 1 forwards and then alternates, so that at most P - i micro-batches are
    in flight. Backwards run in the order of the micro-batches in both.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise UserError(f"schedule: {num_stages} stages and {num_micro_batches} micro-batches; both must be at least 1")
    if name == "gpipe":
        schedule = tuple(_stage_actions(num_micro_batches, num_micro_batches) for _ in range(num_stages))
    else:
        schedule = tuple(
            _stage_actions(min(num_micro_batches, num_stages - stage), num_micro_batches) for stage in range(num_stages)
        )
    check_schedule(schedule, num_micro_batches)
    return schedule


def in_flight(name: ScheduleName, num_stages: int, num_micro_batches: int, stage: int) -> int:
    """Return the most micro-batches whose activations stage `stage` (from 0) holds at once."""
    if name == "gpipe":
        return num_micro_batches
    return min(num_micro_batches, num_stages - stage)


def check_schedule(schedule: Schedule, num_micro_batches: int) -> None:
    """Raise ValueError unless every micro-batch runs once each way on every stage and nothing waits forever."""
    expected = {Action(phase, j) for phase in ("forward", "backward") for j in range(num_micro_batches)}
    for stage, actions in enumerate(schedule):
        if set(actions) != expected or len(actions) != len(expected):
            raise ValueError(f"schedule: stage {stage} does not run every micro-batch once forward and once backward")
    done: set[tuple[int, Action]] = set()
    position = [0] * len(schedule)
    progressed = True
    while progressed:
        progressed = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions) and all(
                needed in done for needed in prerequisites(stage, actions[position[stage]], len(schedule))
            ):
                done.add((stage, actions[position[stage]]))
                position[stage] += 1
                progressed = True
    stuck = [stage for stage, actions in enumerate(schedule) if position[stage] < len(actions)]
    if stuck:
        raise ValueError(f"schedule: stages {stuck} wait for each other")


def prerequisites(stage: int, action: Action, num_stages: int) -> tuple[tuple[int, Action], ...]:
    """Return what must have ended, as (stage, action), before `action` can start on `stage`."""
    if action.phase == "forward":
        return ((stage - 1, action),) if stage else ()
    own_forward = (stage, Action("forward", action.micro_batch))
    return (own_forward,) if stage == num_stages - 1 else (own_forward, (stage + 1, action))


def _stage_actions(num_ahead: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return `num_ahead` forwards, then backwards and forwards in turn, then the remaining backwards."""
    actions = [Action("forward", j) for j in range(num_ahead)]
    for j in range(num_micro_batches):
        actions.append(Action("backward", j))
        if num_ahead + j < num_micro_batches:
            actions.append(Action("forward", num_ahead + j))
    return tuple(actions)
