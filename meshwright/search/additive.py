"""Labels (time, memory) of layers whose memory is a plain sum, few of them with few choices: few array operations.

What every label has to keep to, by layer and strategy, is worked out once; a layer then takes a sum, a comparison a
multiplier, and one sort by time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import FAR, LARGEST_KEY, SLACK, Floats, Ints
from meshwright.search.relaxation import LayerProblem, Sums, change

_FEW_LABELS = 100  # so many are not held against those of other strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels of the layers from one on, sorted by strategy; with peaks, `memory` is P and `base` b (peaks.py)."""

    strategy: NDArray[np.intp]
    time: Ints
    memory: Ints
    base: Ints | None = None

    def take(self, at: NDArray[np.intp]) -> Labels:
        """Return some of them."""
        base = None if self.base is None else self.base[at]
        return Labels(strategy=self.strategy[at], time=self.time[at], memory=self.memory[at], base=base)


def switched(problem: LayerProblem, layer: int) -> Ints:
    """Return [before, here] the switches into a layer, changes counted."""
    switch = problem.switches[layer]
    return switch.counted if change(problem) else switch.whole


def most_weighted(problem: LayerProblem, before: Sums, threshold: int) -> Floats:
    """Return [lam] what time + lam * (memory - budget) may be at most: the threshold, and a little for floats."""
    return threshold + SLACK * (abs(threshold) + before.multipliers * float(problem.budget)) + 1


class Additive:
    """The labels of one problem below one threshold, a layer at a time."""

    def __init__(self, problem: LayerProblem, before: Sums, threshold: int) -> None:
        """Work out what labels may need at most; `before` are the least sums of the layers before each choice."""
        self.problem, self.threshold = problem, threshold
        multipliers = before.multipliers
        most = most_weighted(problem, before, threshold) + multipliers * float(problem.budget)
        self._most_memory = problem.budget + SLACK * abs(problem.budget) - before.value[-1]  # [layer, strategy]
        # [(multiplier, [layer, strategy] what time + multiplier * memory may be)]
        self._most = list(zip(multipliers.tolist(), most[:, None, None] - before.value[:-1], strict=True))
        self.here = [np.flatnonzero(row) for row in problem.time < FAR]

    def extended(self, layer: int, later: Labels) -> Labels:
        """Put every choice of `layer` before every label of layer + 1; keep what may be part of a plan, unbeaten."""
        problem, here = self.problem, self.here[layer]
        column = here[:, None]
        links = switched(problem, layer + 1)[here] + problem.time[layer, column]
        time = links.take(later.strategy, axis=1) + later.time
        memory = problem.memory[layer, column] + later.memory
        keep = memory <= self._most_memory[layer, column]
        for multiplier, most in self._most:
            keep &= time + multiplier * memory <= most[layer, column]
        if layer == 0:  # complete: integers decide
            keep &= (memory <= problem.budget) & (time <= self.threshold)
        at = keep.ravel().nonzero()[0]
        return self._unbeaten(layer, at // max(1, len(later.time)), time.ravel()[at], memory.ravel()[at])

    def _unbeaten(self, layer: int, choice: NDArray[np.intp], time: Ints, memory: Ints) -> Labels:
        """Drop the labels that another of the same strategy beats in both, or clearly one that is entered alike."""
        here = self.here[layer]
        order = time.argsort()
        choice, time, memory = choice[order], time[order], memory[order]
        if len(time) > _FEW_LABELS and layer:
            alike, more = self.problem.switches[layer].entered_alike
            if (alike[here] == alike[here[0]]).all():
                # The least memory of those that are clearly faster.
                least = np.minimum.accumulate(memory)
                faster = time.searchsorted(time - (more + change(self.problem)))
                keep = ((faster == 0) | (least[faster - 1] > memory)).nonzero()[0]
                choice, time, memory = choice[keep], time[keep], memory[keep]
        if len(here) > 1:
            order = choice.astype(np.uint16).argsort(kind="stable")  # quick for short numbers
            choice, time, memory = choice[order], time[order], memory[order]
        keep = falling(choice, memory)
        return Labels(strategy=here[choice[keep]], time=time[keep], memory=memory[keep])


def falling(group: NDArray[np.intp], values: Ints) -> NDArray[np.intp]:
    """Return which of `values`, by rising group, lie below all before them in theirs."""
    if len(values) <= 1:
        return np.arange(len(values))
    low, last = int(values.min()), int(group[-1])
    size = int(values.max()) - low + 1
    if size * (last + 1) > LARGEST_KEY:
        starts = np.flatnonzero(np.diff(group)) + 1
        parts = [np.minimum.accumulate(part) for part in np.split(values, starts)]
        before = np.concatenate([[FAR], np.concatenate(parts)[:-1]])
        before[starts] = FAR
        return (values < before).nonzero()[0]
    # Later groups get smaller keys, so that the running minimum starts afresh with each.
    key = (last - group) * size + (values - low)
    keep = np.ones(len(key), bool)
    keep[1:] = key[1:] < np.minimum.accumulate(key)[:-1]
    return keep.nonzero()[0]
