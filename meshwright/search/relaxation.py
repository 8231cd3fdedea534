"""The problem of one stage's layers in integers, and its Lagrangian relaxation.

For any multiplier lam >= 0 the least of time + lam * (memory - budget) bounds the time of every plan within the budget.
Least sums over the layers before and after every choice are made for many multipliers in one pass each (arrays over
multiplier and strategy); they give the bound, what no plan below a threshold contains, and plans that fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import FAR, SLACK, Floats, Ints, Switch
from meshwright.search.peaks import Peaks

_GRID = 5.0 ** np.arange(-4.0, 5.0)  # multipliers of memory, around what layers trade on the whole
_FAR_GRID = 4.0 ** np.arange(6.0)  # beyond it
_BETWEEN = (0.0, 0.5, 1.0)  # from the multiplier below the best to the best, and on to the one above


@dataclass(frozen=True, kw_only=True)
class LayerProblem:
    """Integers; the time's lowest digit (base `changes_base`; 1: none) counts changes of strategy.

    Solving it raises OutOfTime after `deadline` (of time.perf_counter).
    """

    time: Ints  # [layer, strategy]
    memory: Ints  # [layer, strategy]
    switches: tuple[Switch, ...]  # [layer]; entry i is between i-1 and i, without the counted change
    changes_base: int
    budget: int
    deadline: float = math.inf
    peaks: Peaks | None = None  # what the budget is for; `memory` then adds up to no more (None: sums of `memory`)
    weights: Floats | None = None  # [layer] with peaks: of `memory`


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Least time + lam * memory of the layers before each choice, or of it and those after; switches included.

    Rows are multipliers, and one more for memory alone. `used` is the memory of the choices with that least sum;
    where peaks count, `peak` and `base` are their P and b, or before a choice the sum of m and h (peaks.py). `beside`:
    the choice of the neighbouring layer in those sums, where it was asked for.
    """

    multipliers: Floats  # [lam]
    value: Floats  # [lam + 1, layer, strategy]
    used: Ints  # [lam + 1, layer, strategy]
    peak: Ints | None = None  # [lam + 1, layer, strategy]
    base: Ints | None = None  # [lam + 1, layer, strategy]
    beside: NDArray[np.intp] | None = None  # [lam + 1, layer, strategy]


def peaks_of(problem: LayerProblem, transients: Ints, freed: Ints) -> Peaks:
    """Return what the peaks of a problem's choices are made of."""
    allowed = problem.time < FAR
    memory, transient, freed = (np.where(allowed, part, 0) for part in (problem.memory, transients, freed))
    return Peaks(memory=memory, transient=transient, freed=freed)


def seen(problem: LayerProblem, peaks: Peaks, weights: Floats) -> LayerProblem:
    """Return the relaxation in which memory is a plain sum, with these weights of layers."""
    return replace(problem, memory=np.where(problem.time < FAR, peaks.seen(weights), FAR))


def plan_sums(problem: LayerProblem, plan: NDArray[np.intp]) -> tuple[int, int]:
    """Return the integer time (changes in its lowest digit) and memory of a plan."""
    rows = np.arange(len(plan))
    time = int(problem.time[rows, plan].sum())
    for layer in range(1, len(plan)):
        before, here = plan[layer - 1], plan[layer]
        switch = problem.switches[layer]
        time += int(switch.cost[switch.exit_group[before], switch.entry_group[here]]) + change(problem) * int(
            before != here
        )
    return time, int(problem.memory[rows, plan].sum())


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """The largest bound min(time + lam * (memory - budget)), its multiplier, and the sums around it."""

    lower: float
    best: float
    before: Sums


def relax(problem: LayerProblem) -> Relaxation | None:
    """Maximise the bound over lam >= 0; None: nothing fits.

    The bound is concave and, between two multipliers, below where the lines of their plans cross: a grid in one pass
    over the layers finds the two around the best, and a second pass looks at the crossing and around it.
    """
    slope = _slope(problem)
    before = prefix_sums(problem, np.concatenate([[0.0], slope * _GRID]) if slope else np.zeros(1))
    value, used = _ended(problem, before)
    if not np.isfinite(value[0]) or used[-1] > problem.budget:
        return None
    if used[0] <= problem.budget or not slope:  # no slope: the fastest are the leanest
        return Relaxation(lower=float(value[0]), best=0.0, before=_around(before, 0))
    grid, fits = before.multipliers, used[:-1] <= problem.budget
    if fits.any():
        at = int(fits.argmax())
        time = value[:-1] - grid * used[:-1]
        crossing = float(time[at] - time[at - 1]) / max(1, int(used[at - 1] - used[at]))
        middle = min(max(crossing, float(grid[at - 1])), float(grid[at]))
        low, high = float(grid[at - 1]), float(grid[at])
        wanted = [begin + (end - begin) * part for begin, end in ((low, middle), (middle, high)) for part in _BETWEEN]
    else:
        wanted = list(grid[-1] * _FAR_GRID)
    before = prefix_sums(problem, np.unique([0.0, *wanted]))
    value, _ = _ended(problem, before)
    bounds = value[:-1] - before.multipliers * problem.budget
    best = int(bounds.argmax())
    return Relaxation(lower=float(bounds[best]), best=float(before.multipliers[best]), before=_around(before, best))


def _slope(problem: LayerProblem) -> float:
    """Return the time that all layers together give for memory, from the fastest choices to the leanest; 0: none."""
    rows = np.arange(len(problem.time))
    fastest, leanest = problem.time.argmin(axis=1), problem.memory.argmin(axis=1)
    time = float((problem.time[rows, leanest] - problem.time[rows, fastest]).sum())
    memory = float((problem.memory[rows, fastest] - problem.memory[rows, leanest]).sum())
    distinct = {id(switch): switch for switch in problem.switches}.values()
    switch = max(float(np.max(s.cost, initial=0, where=s.cost < FAR)) for s in distinct)
    return max(time, switch) / memory if memory > 0 and max(time, switch) > 0 else 0.0


def _ended(problem: LayerProblem, before: Sums) -> tuple[Floats, Ints]:
    """Return [lam + 1]: the weighted sum and the memory of the whole plans with the least sums."""
    value = before.value[:, -1] + _weighted(problem, before.multipliers, -1)[1]
    last = value.argmin(axis=1)
    rows = np.arange(len(value))
    return value[rows, last], before.used[rows, -1, last] + problem.memory[-1, last]


def _around(sums: Sums, best: int) -> Sums:
    """Keep 0, the best multiplier and its neighbours."""
    kept = sorted({max(0, best - 1), best, min(best + 1, len(sums.multipliers) - 1)})
    rows = [*kept, -1]
    return Sums(
        multipliers=sums.multipliers[kept],
        value=sums.value[rows],
        used=sums.used[rows],
        peak=None if sums.peak is None else sums.peak[rows],
        base=None if sums.base is None else sums.base[rows],
    )


def crossed(problem: LayerProblem, before: Sums, after: Sums) -> int:
    """Return a time that some plan needs at most: begun as one of the least sums has it, ended as another; FAR: none.

    Between a plan that is too large and one that is too slow lie plans that nearly fill the budget.
    """
    weights = before.multipliers[:, None, None]
    first, second = (sums.value[:-1] - weights * sums.used[:-1] for sums in (before, after))
    least = np.inf
    for one, weight in enumerate(before.multipliers):
        for two, other in enumerate(before.multipliers):
            fits = _joined(before, one, after, two) <= problem.budget
            time = (first[one] + second[two]).min(initial=np.inf, where=fits)
            least = min(least, time + SLACK * (time + (weight + other) * problem.budget))  # what subtracting lost
    changes = change(problem) * (len(problem.time) - 1)  # which the sums do not count
    return int(least) + 1 + changes if least < FAR else FAR


def crossed_plan(problem: LayerProblem, before: Sums, after: Sums) -> NDArray[np.intp] | None:
    """Return the fastest of the plans that `crossed` looks at, from sums that were traced; None: none fits."""
    weights = before.multipliers[:, None, None]
    first, second = (sums.value[:-1] - weights * sums.used[:-1] for sums in (before, after))
    least, found = np.inf, None
    for one, two in np.ndindex(len(weights), len(weights)):
        time = np.where(_joined(before, one, after, two) <= problem.budget, first[one] + second[two], np.inf)
        layer, strategy = np.unravel_index(time.argmin(), time.shape)
        if time[layer, strategy] < least:
            least, found = float(time[layer, strategy]), (one, two, int(layer), int(strategy))
    if found is None or before.beside is None or after.beside is None:
        return None
    one, two, turn, strategy = found
    plan = [strategy]
    for layer in range(turn, 0, -1):
        plan.insert(0, int(before.beside[one, layer, plan[0]]))
    for layer in range(turn, len(problem.time) - 1):
        plan.append(int(after.beside[two, layer, plan[-1]]))
    return np.array(plan)


def _joined(before: Sums, one: int, after: Sums, two: int) -> Ints:
    """Return [layer, strategy] what plans need that are begun like one least sum and ended like another."""
    whole: Ints = before.used[one] + after.used[two]
    if before.peak is not None and before.base is not None and after.peak is not None and after.base is not None:
        whole = before.peak[one] + np.maximum(after.peak[two], before.base[one] + after.base[two])
    return whole


def change(problem: LayerProblem) -> int:
    """Return what a change of strategy counts in the lowest digit of the time."""
    return int(problem.changes_base > 1)


def prefix_sums(problem: LayerProblem, multipliers: Floats, *, traced: bool = False) -> Sums:
    """Return the sums of the layers before each choice, for all multipliers at once."""
    weight, cost = _weighted(problem, multipliers)
    moves, memory = _weighted_moves(problem, weight, transposed=True), np.where(problem.memory < FAR, problem.memory, 0)
    value, used, peaks = np.zeros_like(cost), np.zeros(cost.shape, np.int64), problem.peaks
    peak, base = (None, None) if peaks is None else (np.zeros_like(used), np.full(cost.shape, -FAR))
    beside = np.zeros(cost.shape, np.intp) if traced else None
    rows = np.arange(len(cost))[:, None]
    for layer in range(1, len(cost[0])):
        switch = problem.switches[layer]
        leaving, strategy = switch.leaving(value[:, layer - 1] + cost[:, layer - 1])
        least, source = _least(leaving[:, None, :] + moves[layer], rows)
        if not switch.is_plain:
            source = _picked(strategy, rows, source)
        value[:, layer] = switch.by_entry(least)
        if beside is not None:
            beside[:, layer] = switch.by_entry(source)
        used[:, layer] = switch.by_entry((used[:, layer - 1] + memory[layer - 1])[rows, source])
        if peaks is not None and peak is not None and base is not None:
            peak[:, layer] = switch.by_entry((peak[:, layer - 1] + peaks.memory[layer - 1])[rows, source])
            highest = np.maximum(base[:, layer - 1] - peaks.freed[layer - 1], peaks.transient[layer - 1])
            base[:, layer] = switch.by_entry(highest[rows, source])
    return Sums(multipliers=multipliers, value=value, used=used, peak=peak, base=base, beside=beside)


def suffix_sums(problem: LayerProblem, multipliers: Floats, *, traced: bool = False) -> Sums:
    """Return the sums of each choice and the layers after it, for all multipliers at once."""
    weight, value = _weighted(problem, multipliers)
    moves, memory = _weighted_moves(problem, weight), np.where(problem.memory < FAR, problem.memory, 0)
    used, peaks = np.zeros(value.shape, np.int64) + memory, problem.peaks
    peak = base = None
    if peaks is not None:
        peak, base = (np.zeros_like(used) + part for part in (peaks.memory, peaks.memory - peaks.freed))
        peak[:, -1] += peaks.transient[-1]
    beside = np.zeros(value.shape, np.intp) if traced else None
    rows = np.arange(len(value))[:, None]
    for layer in range(len(value[0]) - 2, -1, -1):
        switch = problem.switches[layer + 1]
        entering, strategy = switch.entering(value[:, layer + 1])
        least, source = _least(moves[layer + 1] + entering[:, None, :], rows)
        if not switch.is_plain:
            source = _picked(strategy, rows, source)
        value[:, layer] += switch.by_exit(least)
        if beside is not None:
            beside[:, layer] = switch.by_exit(source)
        used[:, layer] += switch.by_exit(used[:, layer + 1][rows, source])
        if peaks is not None and peak is not None and base is not None:
            held = switch.by_exit(base[:, layer + 1][rows, source])
            highest = switch.by_exit(peak[:, layer + 1][rows, source])
            peak[:, layer] += np.maximum(highest, held + peaks.transient[layer])
            base[:, layer] += held
    return Sums(multipliers=multipliers, value=value, used=used, peak=peak, base=base, beside=beside)


def _least(total: Floats, rows: NDArray[np.intp]) -> tuple[Floats, NDArray[np.intp]]:
    """Return the least of `total` along its last axis and where it is: a look-up is faster than to reduce twice."""
    source = total.argmin(axis=2)
    least: Floats = total[rows, np.arange(total.shape[1]), source]
    return least, source


def _picked(strategy: NDArray[np.intp], rows: NDArray[np.intp], group: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the strategy of each row that has the least of a group."""
    picked: NDArray[np.intp] = strategy[group] if strategy.ndim == 1 else strategy[rows, group]
    return picked


def _weighted(problem: LayerProblem, multipliers: Floats, layer: int | slice = slice(None)) -> tuple[Floats, Floats]:
    """Return the weights of time, [lam + 1], and time + lam * memory of every choice; the last row is memory alone."""
    weight, scale = np.append(np.ones(len(multipliers)), 0.0), np.append(multipliers, 1.0)
    ticks, memory = problem.time[layer], problem.memory[layer]
    shape = (-1, *[1] * ticks.ndim)
    weighted = weight.reshape(shape) * ticks.astype(float) + scale.reshape(shape) * memory.astype(float)
    return weight, np.where(ticks < FAR, weighted, np.inf)


def _weighted_moves(problem: LayerProblem, weight: Floats, *, transposed: bool = False) -> list[Floats]:
    """Return [layer] the weighted switches [weight, exit, entry group]; equal tables are weighted once."""
    distinct = {id(switch): switch for switch in problem.switches}
    made = {name: _weighted_switch(switch, weight) for name, switch in distinct.items()}
    if transposed:
        made = {name: np.ascontiguousarray(moves.swapaxes(1, 2)) for name, moves in made.items()}
    return [made[id(switch)] for switch in problem.switches]


def _weighted_switch(switch: Switch, weight: Floats) -> Floats:
    """Return [weight, exit group, entry group]; a weight is 1, or 0 for what takes no memory."""
    finite = np.isfinite(switch.floats)
    return np.where(finite, weight[:, None, None] * np.where(finite, switch.floats, 0.0), np.inf)
