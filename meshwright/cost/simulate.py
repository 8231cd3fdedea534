"""Event simulation of one training step of a pipeline.

Stage i runs the actions of `spec.schedule.make_schedule` in order; an action starts once the stage is free and its
`prerequisites` have ended (a send is part of the duration of both neighbours, so nothing waits on a link):

    end(a) = max(end(previous action of the stage), max over prerequisites p of end(p)) + duration(a)
    step   = max over stages i of (end of the last action of stage i + step_s[i])

`step_s[i]` are the once-a-step seconds (gradient synchronisation, optimizer) of stage i. The recurrence is the
longest path in the graph of actions (PipeDream-Flush, arXiv 2006.09503); actions of equal depth in that graph are
independent, so one numpy operation ends all of them, for all candidates at once. Integer times stay integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.spec.schedule import Action, ScheduleName, make_schedule, prerequisites

_MAX_CELLS = 1 << 23  # actions x candidates held at once: 64 MiB


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """The actions of all stages sorted by depth; `num_actions` as a prerequisite stands for "nothing, time 0"."""

    num_actions: int
    level_starts: tuple[int, ...]  # [depth + 1]: actions of depth d are level_starts[d]:level_starts[d + 1]
    previous: NDArray[np.intp]  # [action] the action before it on its stage
    needed: NDArray[np.intp]  # [action] its prerequisite on another stage
    duration_row: NDArray[np.intp]  # [action] stage for a forward, num_stages + stage for a backward
    order: tuple[NDArray[np.intp], ...]  # [stage][position] action
    last: NDArray[np.intp]  # [stage] the last action


@dataclass(frozen=True, kw_only=True)
class StageTimeline:
    """What one stage does in a step; `bubble_s` is the idle time between 0 and the end of the step."""

    actions: tuple[Action, ...]
    start_s: tuple[float, ...]  # [position]
    end_s: tuple[float, ...]  # [position]
    step_start_s: float  # the once-a-step work follows the last action
    step_end_s: float
    busy_s: float
    bubble_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step: its length and what every stage does."""

    step_s: float
    stages: tuple[StageTimeline, ...]


def simulate(
    schedule_name: ScheduleName,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    step_s: ArrayLike,
    num_micro_batches: int,
) -> float:
    """Return the seconds of one step; the arrays are [stage]."""
    forward, backward, step = (np.asarray(values)[None, :] for values in (forward_s, backward_s, step_s))
    return float(simulate_many(schedule_name, forward, backward, step, num_micro_batches)[0])


def simulate_many(
    schedule_name: ScheduleName,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    step_s: ArrayLike,
    num_micro_batches: int,
) -> NDArray[Any]:
    """Return [candidate] step times for [candidate, stage] arrays, in the dtype of the arrays (int64 or float64)."""
    forward, backward, step = (np.asarray(values) for values in (forward_s, backward_s, step_s))
    if forward.ndim != len(("candidate", "stage")) or forward.shape != backward.shape or forward.shape != step.shape:
        raise ValueError(f"simulate: shapes {forward.shape}, {backward.shape}, {step.shape}; all [candidate, stage]")
    num_candidates, num_stages = forward.shape
    graph = _graph(schedule_name, num_stages, num_micro_batches)
    chunk = max(1, _MAX_CELLS // (graph.num_actions + 1))
    times = [
        _step_times(graph, forward[at : at + chunk], backward[at : at + chunk], step[at : at + chunk])
        for at in range(0, num_candidates, chunk)
    ]
    return np.concatenate(times) if times else np.zeros(0, np.result_type(forward, backward, step))


def timeline(
    schedule_name: ScheduleName,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    step_s: ArrayLike,
    num_micro_batches: int,
) -> Timeline:
    """Return start and end of every action; the arrays are [stage]."""
    forward, backward, step = (np.asarray(values, float) for values in (forward_s, backward_s, step_s))
    graph = _graph(schedule_name, len(forward), num_micro_batches)
    ends = _end_times(graph, forward[None, :], backward[None, :])[:, 0]
    schedule = make_schedule(schedule_name, len(forward), num_micro_batches)
    durations = np.concatenate([forward, backward])[graph.duration_row]
    total = float(np.max(ends[graph.last] + step))
    stages: list[StageTimeline] = []
    for stage, actions in enumerate(schedule):
        end, duration = ends[graph.order[stage]], durations[graph.order[stage]]
        busy = float(num_micro_batches * (forward[stage] + backward[stage]) + step[stage])
        stages.append(
            StageTimeline(
                actions=actions,
                start_s=tuple((end - duration).tolist()),
                end_s=tuple(end.tolist()),
                step_start_s=float(end[-1]),
                step_end_s=float(end[-1] + step[stage]),
                busy_s=busy,
                bubble_s=total - busy,
            )
        )
    return Timeline(step_s=total, stages=tuple(stages))


def _step_times(graph: _Graph, forward: NDArray[Any], backward: NDArray[Any], step: NDArray[Any]) -> NDArray[Any]:
    ends = _end_times(graph, forward, backward)
    return (ends[graph.last] + step.T).max(axis=0)


def _end_times(graph: _Graph, forward: NDArray[Any], backward: NDArray[Any]) -> NDArray[Any]:
    """Return [action, candidate] end times."""
    durations = np.concatenate([forward, backward], axis=1).T
    ends = np.zeros((graph.num_actions + 1, len(forward)), durations.dtype)
    for low, high in zip(graph.level_starts, graph.level_starts[1:], strict=False):
        start = np.maximum(ends[graph.previous[low:high]], ends[graph.needed[low:high]])
        ends[low:high] = start + durations[graph.duration_row[low:high]]
    return ends


@lru_cache(maxsize=64)
def _graph(name: ScheduleName, num_stages: int, num_micro_batches: int) -> _Graph:
    """Sort the actions by depth. Every action has at most one prerequisite on another stage in these schedules."""
    schedule = make_schedule(name, num_stages, num_micro_batches)
    depth: dict[tuple[int, Action], int] = {}
    before: dict[tuple[int, Action], tuple[int, Action]] = {}
    across: dict[tuple[int, Action], tuple[int, Action]] = {}
    position = [0] * num_stages
    while len(depth) < 2 * num_stages * num_micro_batches:
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions):
                key = (stage, actions[position[stage]])
                needs = prerequisites(stage, key[1], num_stages)
                if any(need not in depth for need in needs):
                    break
                others = [need for need in needs if need[0] != stage]
                if len(others) > 1:
                    raise ValueError(f"simulate: {key} has {len(others)} prerequisites on other stages; at most one")
                if others:
                    across[key] = others[0]
                if position[stage]:
                    before[key] = (stage, actions[position[stage] - 1])
                earlier = [table[key] for table in (across, before) if key in table]
                depth[key] = 1 + max((depth[other] for other in earlier), default=-1)
                position[stage] += 1
    keys = sorted(depth, key=lambda key: (depth[key], key[0]))
    return _as_arrays(keys, depth, before, across, num_stages)


def _as_arrays(
    keys: list[tuple[int, Action]],
    depth: dict[tuple[int, Action], int],
    before: dict[tuple[int, Action], tuple[int, Action]],
    across: dict[tuple[int, Action], tuple[int, Action]],
    num_stages: int,
) -> _Graph:
    nothing = len(keys)
    index = {key: at for at, key in enumerate(keys)}
    depths = np.array([depth[key] for key in keys])
    order: list[list[int]] = [[] for _ in range(num_stages)]
    for key, at in index.items():  # an action is deeper than the one before it on its stage
        order[key[0]].append(at)
    return _Graph(
        num_actions=nothing,
        level_starts=tuple(np.searchsorted(depths, np.arange(int(depths[-1]) + 2)).tolist()),
        previous=np.array([index[before[key]] if key in before else nothing for key in keys], np.intp),
        needed=np.array([index[across[key]] if key in across else nothing for key in keys], np.intp),
        duration_row=np.array([key[0] + num_stages * (key[1].phase == "backward") for key in keys], np.intp),
        order=tuple(np.array(actions, np.intp) for actions in order),
        last=np.array([actions[-1] for actions in order], np.intp),
    )
