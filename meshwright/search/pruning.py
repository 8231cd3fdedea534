"""What choices and labels have to keep to when a plan is to stay within a time and a budget: reduced costs and guides.

For any multiplier lam >= 0, least sums of time + lam * memory over the layers before and after a choice bound all plans
with it (relaxation.py). So choices go before labels are made, and labels go when none that comes before can complete
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.search.additive import Labels, most_weighted
from meshwright.search.labels import FAR, SLACK, Floats
from meshwright.search.peaks import Peaks
from meshwright.search.relaxation import LayerProblem, Sums, prefix_sums, suffix_sums

Guides = tuple[tuple[Floats, Sums], ...]  # V of peaks.py by layer, and least sums of the layers before


def narrowed(problem: LayerProblem, before: Sums, through: Floats, threshold: int) -> LayerProblem:
    """Forbid the choices that no plan within threshold and budget contains; peaks know what is left.

    `before`: least sums of the layers before each choice; `through`: of all layers, through each choice.
    """
    smaller = _reduced(problem, before, through, threshold)
    if problem.peaks is None:
        return smaller
    smaller = _with_room_for_moments(smaller, problem.peaks, before, threshold)
    return replace(smaller, peaks=problem.peaks.within(smaller.time < FAR))


def _reduced(problem: LayerProblem, before: Sums, through: Floats, threshold: int) -> LayerProblem:
    """Forbid the choices that no plan within threshold and budget contains (reduced-cost fixing)."""
    room = most_weighted(problem, before, threshold) + before.multipliers * float(problem.budget)
    keep = (through[:-1] <= room[:, None, None]).all(axis=0)
    keep &= through[-1] <= problem.budget + SLACK * abs(problem.budget)
    return replace(problem, time=np.where(keep, problem.time, FAR), memory=np.where(keep, problem.memory, FAR))


def _with_room_for_moments(problem: LayerProblem, peaks: Peaks, before: Sums, threshold: int) -> LayerProblem:
    """Forbid the choices that no plan within threshold and budget contains, each being what the peak falls on."""
    lam = before.multipliers
    own = np.append(lam, 1.0)[:, None, None] * (peaks.transient + peaks.freed).astype(float)
    later = np.where(problem.time < FAR, peaks.memory - peaks.freed, FAR)
    front = prefix_sums(_plain(problem, peaks), lam)
    back = suffix_sums(replace(problem, memory=later, peaks=None), lam)
    return _reduced(problem, before, front.value + back.value + own, threshold)


def _plain(problem: LayerProblem, peaks: Peaks) -> LayerProblem:
    """Return the problem with sums of m alone."""
    return replace(problem, memory=np.where(problem.time < FAR, peaks.memory, FAR), peaks=None)


def guides_of(problem: LayerProblem, before: Sums) -> Guides:
    """Return what labels are pruned by: the problem's own relaxation, and with peaks that of their sum of m as well."""
    if problem.peaks is None or problem.weights is None:
        return ((np.ones(len(problem.time)), before),)
    counted = np.cumsum(problem.weights[::-1])[::-1]
    plain = prefix_sums(_plain(problem, problem.peaks), before.multipliers)
    return (counted, before), (np.ones(len(counted)), plain)


def completable(problem: LayerProblem, guides: Guides, threshold: int, layer: int, labels: Labels) -> NDArray[np.bool_]:
    """Return which labels some layers before them may complete within budget and threshold."""
    keep = np.ones(labels.time.shape, bool)
    for counted, before in guides:
        used, rest = _used(counted, layer, labels), before.value[:, layer, labels.strategy]
        room = most_weighted(problem, before, threshold)
        keep &= used + rest[-1] <= problem.budget + SLACK * abs(problem.budget)
        over = used - float(problem.budget)
        for number, multiplier in enumerate(before.multipliers.tolist()):
            keep &= labels.time + multiplier * over <= room[number] - rest[number]
    if layer == 0:  # complete: integers decide
        keep &= (labels.memory <= problem.budget) & (labels.time <= threshold)
    return keep


def promising(problem: LayerProblem, guides: Guides, layer: int, labels: Labels, most: int) -> Labels:
    """Return `most` labels, those that may be completed with the least time by what the guides know."""
    if len(labels.time) <= most:
        return labels
    least = labels.time.astype(float)
    for counted, before in guides:
        over, rest = _used(counted, layer, labels) - float(problem.budget), before.value[:, layer, labels.strategy]
        for number, multiplier in enumerate(before.multipliers.tolist()):
            np.maximum(least, labels.time + multiplier * over + rest[number], out=least)
    return labels.take(np.sort(np.argsort(least, kind="stable")[:most]))


def _used(counted: Floats, layer: int, labels: Labels) -> Any:
    """Return what labels count of the memory that a guide sums up."""
    share = float(counted[layer])
    return labels.memory if labels.base is None else share * labels.memory + (1 - share) * labels.base
