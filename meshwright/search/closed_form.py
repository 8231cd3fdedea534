"""Small pipelines whose step is sum C + (m - 1) max C: exact, by labels of every range of layers at once.

That is what a GPipe of forward passes alone takes where nothing is paid once a step or at borders (stages.py). It grows
with every stage's C, so each range needs only its least, and cuts are labels (sum, largest). For one stage, labels
(time, memory) by end of the range and first strategy are built from the last layer to the first, all ends together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import FAR, Ints, joined, pareto
from meshwright.search.problem import Exact

_MOST_LAYERS, _MOST_LABELS = 24, 4000

Plan = tuple[tuple[int, ...], tuple[int, ...]]  # boundaries, strategies


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Labels of the ranges that start at one layer; `later` is the label of the rest of the range (-1: nothing)."""

    end: NDArray[np.intp]
    strategy: NDArray[np.intp]
    time: Ints
    memory: Ints
    later: NDArray[np.intp]

    def take(self, at: NDArray[np.intp]) -> _Labels:
        return _Labels(
            end=self.end[at],
            strategy=self.strategy[at],
            time=self.time[at],
            memory=self.memory[at],
            later=self.later[at],
        )


def is_closed_form(exact: Exact) -> bool:
    """Return whether the step is sum C + (m - 1) max C and memory a plain sum, of few layers."""
    source, allowed = exact.source, exact.forward < FAR
    if source.schedule != "gpipe" or source.tied or source.num_layers > _MOST_LAYERS:
        return False
    parts = (exact.backward, exact.step, exact.transient, exact.freed)
    outside = (exact.switch[1], exact.enter, exact.border, np.array(exact.stage_step))
    return not any(part[allowed].any() for part in parts) and not any(part.any() for part in outside)


def solve_closed_form(exact: Exact) -> tuple[int, Plan | None] | None:
    """Return the optimum and its plan, (FAR, None) when nothing fits, or None when there are too many labels."""
    stages: list[list[_Labels]] = []
    for stage in range(exact.source.num_stages):
        labels = _ranges(exact, stage)
        if labels is None:
            return None
        stages.append(labels)
    cut = _best_cut(exact, [_least(labels) for labels in stages])
    if cut is None:
        return FAR, None
    total, cuts = cut
    strategies: list[int] = []
    for stage, start in enumerate(cuts[:-1]):
        labels = stages[stage]
        ends = np.flatnonzero(labels[start].end == cuts[stage + 1])
        at = int(ends[labels[start].time[ends].argmin()])
        for here in labels[start : cuts[stage + 1]]:
            strategies.append(int(here.strategy[at]))
            at = int(here.later[at])
    return total, (cuts, tuple(strategies))


def _ranges(exact: Exact, stage: int) -> list[_Labels] | None:
    """Return [start] the labels of the ranges that `stage` may hold; None: too many."""
    num_layers, num_stages = exact.source.num_layers, exact.source.num_stages
    first_end, last_end = (num_layers if stage == num_stages - 1 else stage + 1), num_layers - (num_stages - 1 - stage)
    whole = exact.switch[0][:, exact.layout[:, None], exact.layout]  # [layer, before, here]
    labels: list[_Labels] = []
    for layer in range(last_end - 1, stage - 1, -1):
        here = np.flatnonzero(exact.forward[layer] < FAR)
        parts = [_alone(exact, stage, layer, here)] if layer + 1 >= first_end else []
        if labels:
            parts.append(_extended(exact, stage, layer, here, whole[layer + 1], labels[-1]))
        both = parts[0] if len(parts) == 1 else joined(*parts)
        both = both.take(np.flatnonzero(both.memory <= exact.budget[stage]))
        both = both.take(pareto(both.end * exact.forward.shape[1] + both.strategy, both.time, both.memory))
        if len(both.time) > _MOST_LABELS:
            return None
        labels.append(both)
    nothing = labels[0].take(np.zeros(0, np.intp))
    return [nothing] * stage + labels[::-1]


def _alone(exact: Exact, stage: int, layer: int, here: NDArray[np.intp]) -> _Labels:
    return _Labels(
        end=np.full(len(here), layer + 1),
        strategy=here,
        time=exact.forward[layer, here],
        memory=exact.memory[stage][layer, here],
        later=np.full(len(here), -1),
    )


def _extended(exact: Exact, stage: int, layer: int, here: NDArray[np.intp], switch: Ints, later: _Labels) -> _Labels:
    count, column = len(later.time), here[:, None]
    time = switch[column, later.strategy] + exact.forward[layer, column] + later.time
    memory = exact.memory[stage][layer, column] + later.memory
    return _Labels(
        end=np.tile(later.end, len(here)),
        strategy=np.repeat(here, count),
        time=time.ravel(),
        memory=memory.ravel(),
        later=np.tile(np.arange(count), len(here)),
    )


def _least(labels: list[_Labels]) -> list[dict[int, int]]:
    """Return [start][end] the least time."""
    least: list[dict[int, int]] = []
    for here in labels:
        best: dict[int, int] = {}
        for end, time in zip(here.end.tolist(), here.time.tolist(), strict=True):
            best[end] = min(time, best.get(end, FAR))
        least.append(best)
    return least


def _best_cut(exact: Exact, least: list[list[dict[int, int]]]) -> tuple[int, tuple[int, ...]] | None:
    """Return the least sum C + (m - 1) max C and its boundaries, the smallest of equal ones; None: nothing fits."""
    num_layers, more = exact.source.num_layers, exact.source.num_micro_batches - 1
    ways: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {num_layers: [(0, 0, (num_layers,))]}
    for stage in reversed(least):
        longer: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
        for start, ends in enumerate(stage):
            found = [
                (total + time, max(largest, time), (start, *cuts))
                for end, time in ends.items()
                for total, largest, cuts in ways.get(end, ())
            ]
            kept = longer.setdefault(start, [])
            for way in sorted(found):
                if not kept or way[1] < kept[-1][1]:
                    kept.append(way)
        ways = longer
    return min(((total + more * largest, cuts) for total, largest, cuts in ways.get(0, ())), default=None)
