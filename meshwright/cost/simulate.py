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

from meshwright.spec.schedule import ScheduleName, in_flight, make_schedule

_MAX_CELLS = 1 << 23  # actions x candidates held at once: 64 MiB


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """The actions of all stages sorted by depth; `num_actions` as a prerequisite stands for "nothing, time 0"."""

    num_actions: int
    level_starts: tuple[int, ...]  # [depth + 1]: actions of depth d are level_starts[d]:level_starts[d + 1]
    previous: NDArray[np.intp]  # [action] the action before it on its stage
    needed: NDArray[np.intp]  # [action] its prerequisite on another stage
    duration_row: NDArray[np.intp]  # [action] stage for a forward, num_stages + stage for a backward
    last: NDArray[np.intp]  # [stage] the last action


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
    """Sort the actions by depth. Every action has at most one prerequisite on another stage in these schedules.

    With all passes of one length, stage i of P starts forward j at i + j, or once backwards have begun at i + 2 j,
    and backward j at 2 P - 1 - i + 2 j in 1F1B (GPipe: m + 2 P - 2 - i + j). Used as depths: every edge rises.
    """
    make_schedule(name, num_stages, 1)  # refuses what is no schedule
    stage = np.repeat(np.arange(num_stages), 2 * num_micro_batches)
    is_backward = np.tile(np.repeat([False, True], num_micro_batches), num_stages)
    number = np.tile(np.arange(num_micro_batches), 2 * num_stages)
    ahead = np.array([in_flight(name, num_stages, num_micro_batches, i) for i in range(num_stages)])[stage]
    if name == "gpipe":
        backward = num_micro_batches + 2 * num_stages - 2 - stage + number
    else:
        backward = 2 * num_stages - 1 - stage + 2 * number
    depths = np.where(is_backward, backward, stage + np.where(number < ahead, number, 2 * number))
    keys = np.lexsort((stage, depths))
    count = len(keys)
    index = np.empty(count + 1, np.intp)
    index[keys], index[count] = np.arange(count), count
    # Places before sorting: (stage, phase, micro-batch), one after the other.
    place = np.arange(count)
    forward, nothing = place - num_micro_batches * is_backward, count
    earlier_b = np.where(number >= ahead, forward + num_micro_batches - ahead, place - 1)
    before_f = np.where(number == 0, nothing, earlier_b)
    last_f = forward + ahead - 1
    before_b = np.where(number + ahead <= num_micro_batches, last_f, place - 1)
    needed_f = np.where(stage == 0, nothing, place - 2 * num_micro_batches)
    needed_b = np.where(stage == num_stages - 1, nothing, place + 2 * num_micro_batches)
    previous, needed = np.where(is_backward, before_b, before_f), np.where(is_backward, needed_b, needed_f)
    sorted_depths = depths[keys]
    return _Graph(
        num_actions=count,
        level_starts=tuple(np.searchsorted(sorted_depths, np.arange(int(sorted_depths[-1]) + 2)).tolist()),
        previous=index[previous[keys]],
        needed=index[needed[keys]],
        duration_row=stage[keys] + num_stages * is_backward[keys],
        last=np.array([np.flatnonzero(stage[keys] == i)[-1] for i in range(num_stages)], np.intp),
    )
