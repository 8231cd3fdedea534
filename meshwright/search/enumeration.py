"""All choices of a stage's layers up to a key, less those that another one beats: the rows of a cell (rows.py).

Labels (F, B, g, P, b) of the layers from one to the last of the stage, by the layouts of both, are put together from
the last layer to the first; P and b are what peaks.py needs. A label that another one of the same layouts beats in all
five is dropped, and so is one that no layers before it complete within the budget and the key (pruning.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.additive import Labels
from meshwright.search.labels import FAR, Ints, pareto_rows, present
from meshwright.search.peaks import Peaks
from meshwright.search.problem import Exact
from meshwright.search.pruning import Guides, completable, guides_of, narrowed
from meshwright.search.relaxation import LayerProblem, prefix_sums, relax, suffix_sums

_MAX_CANDIDATES = 150_000  # labels before dominance
_MAX_LABELS = 6_000  # labels after dominance


class TooManyLabels(Exception):
    """There are more labels than the cap, or the time is over."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a cell."""

    values: Ints  # [row, 3] F, B, g
    entry: NDArray[np.intp]  # [row] layout of the first layer
    exit: NDArray[np.intp]  # [row] layout of the last layer
    plans: NDArray[np.intp]  # [row, layer]


def empty_rows(length: int) -> Rows:
    """Return no rows of `length` layers."""
    none = np.zeros(0, np.intp)
    return Rows(values=np.zeros((0, 3), np.int64), entry=none, exit=none, plans=np.zeros((0, length), np.intp))


@dataclass(frozen=True, kw_only=True)
class Span:
    """Layers `start` to `end` as one stage. A choice's key is a weighted sum of F + B and g, and what it receives."""

    exact: Exact
    start: int
    end: int
    is_last: bool  # of the stages: the others send
    weights: tuple[int, int]
    received: Ints  # [layout of the first layer] the cheapest that can be received, forward and backward
    once: int  # the stage's constant once-a-step time, part of g

    def key(self, values: Ints) -> Ints:
        """Return the keys of (F, B, g, ..) without what is received and the constant."""
        weight, once = self.weights
        return weight * (values[:, 0] + values[:, 1]) + once * values[:, 2]

    def put_before(self, at: int, later: Ints, entry: NDArray[np.intp], chosen: NDArray[np.intp]) -> Ints:
        """Return (F, B, g, ..) with layer `at` of the span under `chosen` put before `later`, whose layouts follow."""
        exact, layer = self.exact, self.start + at
        layouts = exact.layout[chosen]
        values = later.copy()
        values[:, 0] += exact.forward[layer, chosen]
        values[:, 1] += exact.backward[layer, chosen]
        values[:, 2] += exact.step[layer, chosen]
        for way in (0, 1):
            if layer < self.end - 1:
                values[:, way] += exact.switch[way, layer + 1, layouts, entry]
            elif not self.is_last:
                values[:, way] += exact.border[way, layer, layouts]
        return values


def rows_below(span: Span, problem: LayerProblem, limit: int, *, room: int = 1, deadline: float) -> tuple[Rows, bool]:
    """Return the rows with a key of at most `limit`, and whether that are all there are.

    `problem` is the span by its key, with peaks and weights; its times leave the constant out. Raises TooManyLabels
    beyond `room` times the caps, or after `deadline`.
    """
    threshold = limit - span.weights[1] * span.once
    left = _left(problem, threshold)
    if left is None:
        return empty_rows(span.end - span.start), True
    problem, peaks, guides, complete = left
    exact, labels = span.exact, np.zeros((1, 5), np.int64)  # F, B, g, P, b
    first, last = np.full(1, -1), np.full(1, -1)
    arrows: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for at in range(span.end - span.start - 1, -1, -1):
        strategies = np.flatnonzero(problem.time[at] < FAR)
        if len(labels) * len(strategies) > 4 * room * _MAX_CANDIDATES or time.perf_counter() > deadline:
            raise TooManyLabels
        parent, chosen = (grid.ravel() for grid in np.meshgrid(np.arange(len(labels)), strategies, indexing="ij"))
        values = span.put_before(at, labels[parent], first[parent], chosen)
        values[:, 3], values[:, 4] = peaks.put_before(at, chosen, values[:, 3], values[:, 4])
        key = span.key(values)
        if at == 0:
            key = key + span.weights[0] * span.received[exact.layout[chosen]]
        found = Labels(strategy=chosen, time=key, memory=values[:, 3], base=values[:, 4])
        keep = np.flatnonzero(completable(problem, guides, threshold, at, found))
        if complete:
            complete = len(keep) == np.count_nonzero(completable(problem, guides, FAR, at, found))
        if len(keep) > room * _MAX_CANDIDATES:
            raise TooManyLabels
        exits = exact.layout[chosen] if not arrows else last[parent]
        group = exact.layout[chosen] * exact.num_layouts + exits
        if at == 0:
            values = values[:, :3]
            group = group if span.start > 0 else exits
        keep = keep[pareto_rows(values[keep], group[keep])]
        if len(keep) > room * _MAX_LABELS:
            raise TooManyLabels
        labels, first, last = values[keep], exact.layout[chosen[keep]], exits[keep]
        arrows.append((parent[keep], chosen[keep]))
    values = labels + np.array([0, 0, span.once])
    return Rows(values=values, entry=first, exit=last, plans=_plans(arrows)), complete


def _left(problem: LayerProblem, threshold: int) -> tuple[LayerProblem, Peaks, Guides, bool] | None:
    """Return the problem less the choices of no plan within threshold and budget, its peaks, what labels keep to, and
    whether only the budget has forbidden something; None: nothing fits."""
    relaxed = relax(problem)
    if relaxed is None:
        return None
    before = relaxed.before
    through = before.value + suffix_sums(problem, before.multipliers).value
    smaller, any_time = (narrowed(problem, before, through, most) for most in (threshold, FAR))
    complete = bool((smaller.time == any_time.time).all())
    guides = guides_of(smaller, prefix_sums(smaller, before.multipliers))
    return smaller, present(smaller.peaks), guides, complete


def _plans(arrows: list[tuple[NDArray[np.intp], NDArray[np.intp]]]) -> NDArray[np.intp]:
    """Follow the labels of the first layer to the last one."""
    at = np.arange(len(arrows[-1][0]))
    columns: list[NDArray[np.intp]] = []
    for parent, chosen in reversed(arrows):
        columns.append(chosen[at])
        at = parent[at]
    return np.stack(columns, axis=1)
