"""The peak of a stage whose layers free what they hold before earlier ones run backward, and labels that know it.

With m_l the states and all in-flight activations of layer l, T_l what is alive for a moment, and a_l what it frees:

    peak = sum m + max over l of (T_l - sum over j > l of a_j)

From the last layer n to the first, two numbers tell what later layers mean to earlier ones: P, the peak so far, and b,
what they still hold when an earlier layer runs backward. From the first layer on, h is the maximum above so far:

    P = m_n + T_n,  b = m_n - a_n;    P' = m_i + max(P, b + T_i),  b' = b + m_i - a_i      (layer i put in front)
    h' = max(h - a_i, T_i);           peak = sum of m before + max(P, h + b)

With c the layer of the maximum, m_j for j < c, m_c + T_c and m_j - a_j for j > c add up to the peak; for any other c to
no more. So every mean over c, with weights w, is a relaxation that is a plain sum:

    peak >= sum over j of (m_j + w_j T_j - (sum over c < j of w_c) a_j)

and labels at layer i count in it for V P + (1 - V) b or less, V being the weights from i on.

Where low <= h <= high for whatever lies before, b may be raised to P - high and P to b + low: the peak stays. Labels
whose b is P - high are told apart by P alone; where much is freed, nearly all are such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import FAR, LARGEST_KEY, SLACK, Floats, Ints, near_best, pareto, pareto_rows

_MANY = 1000  # labels from which groups are compared one by one


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a peak is made of; 0 where a choice is not allowed."""

    memory: Ints  # [layer, strategy] m
    transient: Ints  # [layer, strategy] T
    freed: Ints  # [layer, strategy] a
    windows: tuple[tuple[int, int], ...] = ()  # [layer] low and high of what is before it; (): not known

    def of(self, columns: NDArray[np.intp]) -> Peaks:
        """Return those of some strategies."""
        return Peaks(memory=self.memory[:, columns], transient=self.transient[:, columns], freed=self.freed[:, columns])

    def seen(self, weights: Floats) -> Ints:
        """Return [layer, strategy] what adds up to no more than any peak; `weights` of layers add up to 1."""
        before = (np.cumsum(weights) - weights)[:, None]
        seen = weights[:, None] * self.transient - before * self.freed
        return self.memory + np.floor(seen - SLACK * np.abs(seen)).astype(np.int64)

    def put_before(self, layer: int, choice: NDArray[np.intp], peak: Ints, base: Ints) -> tuple[Ints, Ints]:
        """Return P and b of labels with a choice of `layer` put before them, all broadcast."""
        memory = self.memory[layer, choice]
        peak = memory + np.maximum(peak, base + self.transient[layer, choice])
        base = memory + base - self.freed[layer, choice]
        if not layer or not self.windows:
            return peak, base
        low, high = self.windows[layer]
        base = np.maximum(base, peak - high)
        return np.maximum(peak, base + low), base

    def after(self, layer: int, choice: int, highest_before: int) -> int:
        """Return h with a choice of `layer` put behind what has `highest_before`."""
        return max(highest_before - int(self.freed[layer, choice]), int(self.transient[layer, choice]))

    def of_plan(self, plan: NDArray[np.intp]) -> tuple[int, int]:
        """Return the peak and the layer that runs backward then."""
        rows = np.arange(len(plan))
        moments = _moments(self.transient[rows, plan], self.freed[rows, plan])
        return int(self.memory[rows, plan].sum() + moments.max()), int(moments.argmax())

    def within(self, allowed: NDArray[np.bool_]) -> Peaks:
        """Let labels be told apart only as far as the `allowed` choices before them can."""
        low, high = -FAR, -FAR
        windows: list[tuple[int, int]] = []
        for ok, transient, freed in zip(allowed, self.transient, self.freed, strict=True):
            windows.append((low, high))
            low = max(low - int(freed.max(where=ok, initial=0)), int(transient.min(where=ok, initial=FAR)))
            high = max(high - int(freed.min(where=ok, initial=FAR)), int(transient.max(where=ok, initial=0)))
        return replace(self, windows=tuple(windows))


def least_peak(peaks: Peaks, allowed: NDArray[np.bool_]) -> int:
    """Return the least peak of all plans of `allowed` choices, whatever their times."""
    peaks = peaks.within(allowed)
    peak, base = np.zeros(1, np.int64), np.zeros(1, np.int64)
    kinds: dict[bytes, NDArray[np.intp]] = {}
    for layer in range(len(allowed) - 1, -1, -1):
        here = np.flatnonzero(allowed[layer])
        rows = np.stack([part[layer, here] for part in (peaks.memory, peaks.transient, -peaks.freed)], axis=1)
        key = here.tobytes() + rows.tobytes()
        if key not in kinds:
            kinds[key] = here[pareto_rows(rows)]
        peak, base = peaks.put_before(layer, kinds[key][:, None], peak, base)
        peak, base = peak.ravel(), base.ravel()
        order = np.lexsort((base, peak))
        peak, base = peak[order], base[order]
        lowest = np.append(FAR, np.minimum.accumulate(base)[:-1])
        peak, base = peak[base < lowest], base[base < lowest]
    return int(peak.min(initial=FAR))


def highest(transient: NDArray[Any], freed: NDArray[Any]) -> Any:
    """Return max over l of (T_l - sum over j > l of a_j) of one choice a layer."""
    return _moments(transient, freed).max()


def _moments(transient: NDArray[Any], freed: NDArray[Any]) -> NDArray[Any]:
    """Return [layer] T_l - sum over j > l of a_j."""
    later = np.append(np.cumsum(freed[:0:-1])[::-1], 0)
    return transient - later


def undominated(group: NDArray[np.intp], time: Ints, memory: Ints, base: Ints | None) -> NDArray[np.intp]:
    """Return the labels that no other of their group beats or equals in time, P (`memory`) and b; one of equals."""
    if base is None or not len(time):
        return pareto(group, time, memory)
    tight = _tight(memory, base)
    at_tight, at_loose = np.flatnonzero(tight), np.flatnonzero(~tight)
    at_tight = at_tight[pareto(group[at_tight], time[at_tight], memory[at_tight])]
    if len(at_loose):
        lowest = _lowest(group, time, memory, tight)
        at_loose = at_loose[lowest[at_loose] > time[at_loose]]
    if not len(at_loose):
        return at_tight
    kept = np.concatenate([at_tight, at_loose])
    kept = kept[np.isin(group[kept], group[at_loose])]
    alone = at_tight[~np.isin(group[at_tight], group[at_loose])]
    if len(kept) > _MANY:
        values = np.stack([time[kept], memory[kept], base[kept]], axis=1)
        kept = kept[pareto_rows(values, group[kept])]
    else:
        # A group is two columns, so that only its own labels are comparable: one pass over few labels of all groups.
        values = np.stack([group[kept], -group[kept], time[kept], memory[kept], base[kept]], axis=1)
        kept = kept[pareto_rows(values)]
    kept = np.concatenate([alone, kept])
    return kept[np.lexsort((time[kept], memory[kept], group[kept]))]


def near_undominated(
    group: NDArray[np.intp], time: Ints, memory: Ints, base: Ints | None, slack: int
) -> NDArray[np.intp]:
    """Return the labels that no other of their group, whose b is told by its P, beats by more than `slack`."""
    if base is None:
        return near_best(group, time, memory, slack)
    return np.flatnonzero(time - slack <= _lowest(group, time, memory, _tight(memory, base)))


def _tight(memory: Ints, base: Ints) -> NDArray[np.bool_]:
    """Return the labels with the largest P - b: with no more P than another, they have no more b either."""
    apart = memory - base
    tight: NDArray[np.bool_] = apart == apart.max(initial=-FAR)
    return tight


def _lowest(group: NDArray[np.intp], time: Ints, memory: Ints, counted: NDArray[np.bool_]) -> Ints:
    """Return for every label the least time of the counted ones of its group with no more memory; FAR: none."""
    lowest = np.full(len(time), FAR)
    if not len(time):
        return lowest
    order = np.lexsort((~counted, memory, group))  # of equal memory the counted ones first
    size, last = int(time.max()) - int(time.min()) + 2, int(group.max())
    if size * (last + 1) > LARGEST_KEY:
        return lowest
    rank = np.where(counted[order], time[order] - time.min(), size - 1)
    # Later groups get smaller keys, so that the running minimum starts afresh with each group.
    start = (last - group[order]) * size
    least = np.minimum.accumulate(start + rank) - start
    lowest[order] = np.where(least < size - 1, least + time.min(), FAR)
    return lowest
