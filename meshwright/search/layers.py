"""Strategies of the layers of one stage: least time under a memory budget, exactly; and the whole frontier.

    minimise   sum_i time[i, s_i] + sum_{i>=1} switch[i, s_{i-1}, s_i]
    subject to sum_i bytes[i, s_i] + max_i (transient[i, s_i] - sum_{j>i} freed[j, s_j]) <= budget

Labels (time, memory) of the layers i..L-1, by the strategy of layer i, are built from the last layer to the first;
a label that another one of the same strategy beats in both is dropped. For any multiplier lam >= 0 the minimum of
time + lam * memory over a prefix, minus lam * budget, bounds every completion, so labels above a threshold go too
(Lagrangian relaxation; Handler and Zang, Networks 10, 1980). The threshold starts just above the dual bound and grows
until a plan is found: that plan is optimal. Sums are integers (labels.py), nothing is rounded coarsely.

Ties: the number of neighbours with different strategies is the lowest digit of the time, and labels from the back
allow the lexicographically smallest of the best plans to be read from the front.

The maximum is not additive. Where nothing is freed, an interval of its value is relaxed (only strategies up to its top,
budget less its bottom) and split at the maximum of the relaxed optimum until that optimum fits. Where something is,
what layers see of the peak is counted, a plain sum: first what the last one sees, then means with the one that the
optimum's peak falls on. Where no such optimum fits, labels (time, peak, what is held when an earlier layer runs
backward; peaks.py) are pruned by the best of these relaxations.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.search.additive import Additive, Labels, switched
from meshwright.search.labels import (
    FAR,
    Floats,
    Ints,
    Switch,
    decimal_scale,
    group_switch,
    near_best,
    pareto,
    to_ints,
)
from meshwright.search.peaks import Peaks, highest, least_peak, near_undominated, undominated
from meshwright.search.pruning import Guides, completable, guides_of, narrowed, promising
from meshwright.search.relaxation import (
    SLACK,
    LayerProblem,
    Relaxation,
    Sums,
    change,
    crossed,
    peaks_of,
    prefix_sums,
    relax,
    seen,
    suffix_sums,
)

_FIRST_GAP, _NEAR, _USUAL_CHOICES = 1e-3, 30, 1000
_PROMISING = 300  # labels a layer, for a plan near the best
_FEW_MOVES, _FEW_PAIRS, _FEW_LABELS = 2000, 20_000, 100
_RELAXATIONS, _WORTH, _SHARES = 8, 1e-3, (0.25, 0.5, 1.0)  # of one problem with peaks, before labels
_PER_LAYER = 3  # dimensions of a switch table with an entry for each layer


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The best strategies of a stage's layers, their time and the peak of their memory."""

    strategies: tuple[int, ...]
    time_s: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Times (falling) and memories (rising) that nothing beats; `error` e: every plan is matched by a point with no
    more memory and at most (1 + e) times its time."""

    time_s: Floats
    memory_bytes: Floats
    error: float


Found = tuple[int, NDArray[np.intp]]  # time and strategies of a plan


class OutOfTime(Exception):
    """A problem's deadline has passed before it was solved: no plan takes less than `proved`, `known` is a good one."""

    def __init__(self, proved: int = 0, known: Found | None = None) -> None:
        super().__init__(proved, known)
        self.proved, self.known = proved, known


def solve(
    *,
    layer_s: ArrayLike,
    layer_bytes: ArrayLike,
    switch_s: ArrayLike,
    budget_bytes: float,
    transient_bytes: ArrayLike | None = None,
    freed_bytes: ArrayLike | None = None,
) -> LayerChoice | None:
    """Return the fastest choice that fits `budget_bytes`, or None.

    `layer_s`, `layer_bytes`, `transient_bytes`, `freed_bytes` are [layer, strategy] (inf: not allowed), `switch_s` is
    [strategy, strategy] or [layer, strategy, strategy] with entry i between layers i-1 and i (entry 0 is ignored). A
    layer's `freed_bytes` (None: 0) are gone when earlier ones need their `transient_bytes`.
    """
    times, memories, switch, transients = _arrays(layer_s, layer_bytes, switch_s, transient_bytes)
    freed = np.zeros_like(times) if freed_bytes is None else np.array(freed_bytes, float)
    largest = _largest_sum(memories) + _largest_sum(transients) + _largest_sum(freed)
    budget_bytes = min(budget_bytes, largest + 1)  # more is ample
    memory_scale = decimal_scale(largest + abs(budget_bytes), 9)
    times = np.where(np.isfinite(freed), times, np.inf)
    problem = _problem(times, memories, switch, memory_scale, budget_bytes)
    found = solve_fitting(problem, to_ints(transients, memory_scale), to_ints(freed, memory_scale))
    if found is None:
        return None
    rows = np.arange(len(found))
    moved = (
        switch[rows[1:], found[:-1], found[1:]].sum()
        if switch.ndim == _PER_LAYER
        else switch[found[:-1], found[1:]].sum()
    )
    return LayerChoice(
        strategies=tuple(int(s) for s in found),
        time_s=float(times[rows, found].sum() + moved),
        memory_bytes=float(memories[rows, found].sum() + highest(transients[rows, found], freed[rows, found])),
    )


def frontier(
    *,
    layer_s: ArrayLike,
    layer_bytes: ArrayLike,
    switch_s: ArrayLike,
    budget_bytes: float = float("inf"),
    transient_bytes: ArrayLike | None = None,
    epsilon: float = 0.0,
) -> Frontier:
    """Return the best times for every memory up to `budget_bytes`; `epsilon` thins with a certified error.

    The exact frontier can hold 1e5 points; epsilon is spread evenly over the layers. Every distinct transient is
    solved for, so many different ones are slow.
    """
    times, memories, switch, transients = _arrays(layer_s, layer_bytes, switch_s, transient_bytes)
    largest = _largest_sum(memories) + _largest_sum(transients)
    memory_scale = decimal_scale(largest, 9)
    problem = _problem(times, memories, switch, memory_scale, min(budget_bytes, largest))
    scale = _time_scale(times, switch) * problem.changes_base
    tops = to_ints(transients, memory_scale)
    points = [_frontier_points(problem, tops, int(top), epsilon) for top in np.unique(tops[tops < FAR])]
    nothing = np.zeros(0, np.int64)
    time, memory = (np.concatenate([nothing, *(point[axis] for point in points)]) for axis in (0, 1))
    keep = pareto(np.zeros(len(time), np.intp), time // problem.changes_base, memory)
    return Frontier(
        time_s=(time[keep] // problem.changes_base) * problem.changes_base / scale,
        memory_bytes=memory[keep] / memory_scale,
        error=epsilon,
    )


def _arrays(
    layer_s: ArrayLike, layer_bytes: ArrayLike, switch_s: ArrayLike, transient_bytes: ArrayLike | None
) -> tuple[Floats, Floats, Floats, Floats]:
    times, memories, switch = (np.array(values, float) for values in (layer_s, layer_bytes, switch_s))
    transients = np.zeros_like(memories) if transient_bytes is None else np.array(transient_bytes, float)
    allowed = np.isfinite(times) & np.isfinite(memories) & np.isfinite(transients)
    for values in (times, memories, transients):
        values[~allowed] = np.inf
    if switch.ndim == _PER_LAYER:
        switch[0] = 0.0
    return times, memories, switch, transients


def _largest_sum(values: Floats) -> float:
    """Return a bound on the sum of one finite entry a layer."""
    return float(np.where(np.isfinite(values), np.abs(values), 0).reshape(len(values), -1).max(axis=1).sum())


def _time_scale(times: Floats, switch: Floats) -> float:
    moves = (
        _largest_sum(switch)
        if switch.ndim == _PER_LAYER
        else len(times) * float(switch[np.isfinite(switch)].max(initial=0))
    )
    return decimal_scale((_largest_sum(times) + moves) * max(1, len(times)), 15)


def _problem(times: Floats, memories: Floats, switch: Floats, memory_scale: float, budget: float) -> LayerProblem:
    """Scale to integers. Equal switch tables of different layers are grouped once."""
    time_scale, base = _time_scale(times, switch), max(1, len(times))
    made: dict[bytes, Switch] = {}
    switches: list[Switch] = []
    for table in switch if switch.ndim == _PER_LAYER else [switch] * len(times):
        key = table.tobytes()
        if key not in made:
            ints = to_ints(table, time_scale)
            made[key] = group_switch(np.where(ints < FAR, ints * base, FAR))
        switches.append(made[key])
    time = to_ints(times, time_scale)
    return LayerProblem(
        time=np.where(time < FAR, time * base, FAR),
        memory=to_ints(memories, memory_scale),
        switches=tuple(switches),
        changes_base=base,
        budget=int(np.rint(budget * memory_scale)) if np.isfinite(budget) else FAR,
    )


def _limited(problem: LayerProblem, transients: Ints, bottom: int, top: int) -> LayerProblem:
    """Relax "the largest transient lies in bottom..top"; exact where they are equal."""
    allowed = transients <= top
    return LayerProblem(
        time=np.where(allowed, problem.time, FAR),
        memory=np.where(allowed, problem.memory, FAR),
        switches=problem.switches,
        changes_base=problem.changes_base,
        budget=problem.budget - bottom,
        deadline=problem.deadline,
    )


def relaxed_bound(problem: LayerProblem, transients: Ints, freed: Ints) -> int:
    """Return a bound on the time of every plan that fits; FAR when none does. Takes moments."""
    relaxed = relax(with_last(problem, transients)) if freed.any() else _relaxed(problem, transients)
    return FAR if relaxed is None else math.floor(relaxed.lower * (1 - SLACK)) - 1


def least_multiplier(problem: LayerProblem, transients: Ints) -> float:
    """Return the multiplier of memory at which `relaxed_bound` is reached: time per byte; 0 where memory is ample."""
    relaxed = _relaxed(problem, transients)
    return 0.0 if relaxed is None else relaxed.best


def _relaxed(problem: LayerProblem, transients: Ints) -> Relaxation | None:
    values = transients[transients < FAR]
    bottom = _least_transient(transients)
    return relax(_limited(problem, transients, bottom, int(values.max()))) if bottom < FAR else None


def _least_transient(transients: Ints) -> int:
    """Return what the largest transient of any plan is at least: the largest of the layers' least; FAR: no plan."""
    return int(transients.min(axis=1).max(initial=0))


@dataclass(slots=True)
class Hint:
    """The weights of layers (peaks.py) that bounded the last of a series of like problems; None: the usual ones."""

    weights: Floats | None = None


def solve_fitting(
    problem: LayerProblem, transients: Ints, freed: Ints, limit: int = FAR, least: int = 0, hint: Hint | None = None
) -> NDArray[np.intp] | None:
    """Return the best strategies with time <= limit whose peak is within the budget.

    None takes less than `least`. A `hint` that like problems share saves work where much is freed; the answer is the
    same.
    """
    if not freed.any():
        try:
            return solve_intervals(problem, transients, limit)
        except OutOfTime as late:  # what is known is of one interval
            raise OutOfTime from late
    allowed = problem.time < FAR
    if not allowed.any(axis=1).all():
        return None
    peaks = peaks_of(problem, transients, freed)
    hint = Hint() if hint is None else hint
    weights = np.eye(len(allowed))[-1] if hint.weights is None else hint.weights
    relaxed = seen(problem, peaks, weights)
    for left in range(_RELAXATIONS, 0, -1):
        found = _solve_additive(relaxed, limit, 0)
        if found is None:
            return None
        peak, critical = peaks.of_plan(found[1])
        if peak <= problem.budget:
            return found[1]
        least = max(least, found[0])
        sharper = _sharper(problem, peaks, weights, critical, limit) if left > 1 else None
        if sharper is None:
            break
        weights = hint.weights = sharper
        relaxed = seen(problem, peaks, weights)
    if least_peak(peaks, allowed) > problem.budget:
        return None
    found = _solve_additive(replace(relaxed, peaks=peaks, weights=weights), limit, least)
    return None if found is None else found[1]


def _sharper(problem: LayerProblem, peaks: Peaks, weights: Floats, critical: int, limit: int) -> Floats | None:
    """Return weights that count `critical` more and bound clearly better, the first beyond `limit`; None: none do."""
    known, count = relax(seen(problem, peaks, weights)), len(weights)
    best, sharper = (FAR if known is None else known.lower * (1 + _WORTH)), None
    for target in (np.eye(count)[critical], np.full(count, 1 / count)):
        for share in _SHARES:
            mixed = (1 - share) * weights + share * target
            relaxed = relax(seen(problem, peaks, mixed))
            if relaxed is None or relaxed.lower > limit * (1 + SLACK) + 1:
                return mixed
            if relaxed.lower > best:
                best, sharper = relaxed.lower, mixed
    return sharper


def with_last(problem: LayerProblem, transients: Ints) -> LayerProblem:
    """Count the last layer's transient with its memory: no peak is less."""
    memory = problem.memory.copy()
    memory[-1] = np.where(problem.time[-1] < FAR, memory[-1] + transients[-1], FAR)
    return replace(problem, memory=memory)


def solve_intervals(problem: LayerProblem, transients: Ints, limit: int = FAR) -> NDArray[np.intp] | None:
    """Branch on the largest transient; return the best strategies with time <= limit."""
    values = np.unique(transients[transients < FAR])
    values = values[values >= _least_transient(transients)]
    stack = [(0, len(values) - 1)] if len(values) else []
    best: NDArray[np.intp] | None = None
    best_time = limit
    while stack:
        low, high = stack.pop()
        found = _solve_additive(_limited(problem, transients, int(values[low]), int(values[high])), best_time)
        if found is None:
            continue
        time, plan = found
        rows = np.arange(len(plan))
        largest = int(transients[rows, plan].max())
        if problem.memory[rows, plan].sum() + largest <= problem.budget:
            if best is None or (time, tuple(plan)) < (best_time, tuple(best)):
                best_time, best = time, plan
            continue
        split = int(np.searchsorted(values, largest))  # > low: with `bottom` itself the plan would fit
        stack.append((split, high))
        stack.append((low, split - 1))
    return best


def _solve_additive(problem: LayerProblem, limit: int, least: int = 0) -> Found | None:
    """Return the best (time, strategies) with time <= limit, or None; none takes less than `least`."""
    columns = _useful(problem)
    if len(columns) == problem.time.shape[1]:
        return _solve_useful(problem, limit, least)
    try:
        found = _solve_useful(_of(problem, columns), limit, least)
    except OutOfTime as late:
        known = late.known
        raise OutOfTime(late.proved, None if known is None else (known[0], columns[known[1]])) from late
    return None if found is None else (found[0], columns[found[1]])


def _of(problem: LayerProblem, columns: NDArray[np.intp]) -> LayerProblem:
    """Return the problem with some of its strategies."""
    distinct = {id(switch): switch for switch in problem.switches}
    made = {name: switch.of(columns) for name, switch in distinct.items()}
    return replace(
        problem,
        time=problem.time[:, columns],
        memory=problem.memory[:, columns],
        switches=tuple(made[id(switch)] for switch in problem.switches),
        peaks=None if problem.peaks is None else problem.peaks.of(columns),
    )


def _useful(problem: LayerProblem) -> NDArray[np.intp]:
    """Return the strategies that some layer may use: no other, entered and left alike, clearly beats them there."""
    useful = np.zeros(problem.time.shape[1], bool)
    last, seen = len(problem.time) - 1, set[tuple[bytes, bytes, int, int]]()
    for layer, (ticks, memory) in enumerate(zip(problem.time, problem.memory, strict=True)):
        into, out_of = problem.switches[layer], problem.switches[min(layer + 1, last)]
        key = (ticks.tobytes(), memory.tobytes(), id(into), id(out_of))
        if problem.peaks is not None:  # times, bytes and what is freed do not make an order
            useful |= ticks < FAR
        elif key not in seen:
            seen.add(key)
            (entered, more), (left, even_more) = into.entered_alike, out_of.left_alike
            here = np.flatnonzero(ticks < FAR)
            alike = (entered * len(ticks) + left)[here]
            slack = more + even_more + 2 * change(problem)
            useful[here[near_best(alike, ticks[here], memory[here], slack)]] = True
    return np.flatnonzero(useful)


def _solve_useful(problem: LayerProblem, limit: int, least: int) -> Found | None:
    relaxed = relax(problem)
    if relaxed is None or relaxed.lower > limit * (1 + SLACK) + 1:
        return None
    lower, before = max(relaxed.lower, float(least)), relaxed.before
    after = suffix_sums(problem, before.multipliers)
    upper = min(limit, crossed(problem, before, after))
    through = before.value + after.value
    # The more choices, the nearer the best plan is to the bound, and the more labels lie between.
    share = _FIRST_GAP * min(1.0, _USUAL_CHOICES / np.count_nonzero(problem.time < FAR))
    gap, proved = max(share * abs(lower), float(problem.changes_base)), math.floor(lower * (1 - SLACK))
    known, tries = None, problem.peaks is not None
    while True:
        threshold = min(upper, int(lower + gap) + 1)
        if upper - threshold < (_NEAR if problem.peaks is None else 1) * gap:  # the plan in hand: no second pass
            threshold = upper
        try:
            found = _within(problem, before, through, threshold)
            if found is not None or threshold >= upper:
                return found
            proved = threshold + 1
            if tries:  # with peaks labels are many, and a plan near the best saves most of them
                tries, known = False, _within(problem, before, through, upper, most=_PROMISING)
        except OutOfTime as late:
            raise OutOfTime(proved, known) from late
        upper = upper if known is None else known[0]
        gap *= 4 if problem.peaks is None else 2  # labels with peaks grow faster


def _within(
    problem: LayerProblem, before: Sums, through: Floats, threshold: int, most: int | None = None
) -> Found | None:
    """Return the best plan within the threshold; with `most` labels a layer a good one, or none where they end.

    `before`: least sums of the layers before each choice; `through`: of all layers, through each choice.
    """
    smaller = narrowed(problem, before, through, threshold)
    sums = before if problem.peaks is None else prefix_sums(smaller, before.multipliers)
    labels = _all_labels(smaller, sums, threshold, most)
    return (int(labels[0].time.min()), _read_plan(problem, labels)) if len(labels[0].time) else None


def _all_labels(problem: LayerProblem, before: Sums, threshold: int, most: int | None) -> list[Labels]:
    """Return the labels of every layer that can be part of a plan within budget and threshold; of `most` the best."""
    num_layers = len(problem.time)
    num_choices = np.count_nonzero(problem.time < FAR, axis=1).tolist()
    guides = guides_of(problem, before)
    additive = Additive(problem, before, threshold) if problem.peaks is None else None
    labels = [_kept(problem, guides, threshold, num_layers - 1, _last_labels(problem))]
    for layer in range(num_layers - 2, -1, -1):
        if time.perf_counter() > problem.deadline:
            raise OutOfTime
        if most is not None:
            labels[-1] = promising(problem, guides, layer + 1, labels[-1], most)
        few = len(labels[-1].time) * num_choices[layer] <= _FEW_PAIRS
        if few and additive is not None:
            labels.append(additive.extended(layer, labels[-1]))
        elif few:
            labels.append(_extended(problem, guides, threshold, layer, labels[-1]))
        else:
            labels.append(_kept(problem, guides, threshold, layer, _candidates(problem, layer, labels[-1])))
    return labels[::-1]


def _extended(problem: LayerProblem, guides: Guides, threshold: int, layer: int, later: Labels) -> Labels:
    """Put every choice of layer `layer` before every label of layer + 1; drop as `_kept` does."""
    here = np.flatnonzero(problem.time[layer] < FAR)
    time = switched(problem, layer + 1)[here[:, None], later.strategy] + problem.time[layer, here][:, None] + later.time
    memory, base = _put_before(problem, layer, here[:, None], later.memory, later.base)
    labels = Labels(strategy=here[:, None], time=time, memory=memory, base=base)
    choice, at = np.nonzero(completable(problem, guides, threshold, layer, labels))
    base = None if base is None else base[choice, at]
    labels = Labels(strategy=here[choice], time=time[choice, at], memory=memory[choice, at], base=base)
    return _best(problem, layer, labels)


def _put_before(
    problem: LayerProblem, layer: int, choice: NDArray[np.intp], memory: Ints, base: Ints | None
) -> tuple[Ints, Ints | None]:
    """Return memory and base of labels with a choice of `layer` put before them, all broadcast."""
    if base is None or problem.peaks is None:
        return problem.memory[layer, choice] + memory, None
    return problem.peaks.put_before(layer, choice, memory, base)


def _last_labels(problem: LayerProblem) -> Labels:
    strategy = np.flatnonzero(problem.time[-1] < FAR)
    memory, base, peaks = problem.memory[-1, strategy], None, problem.peaks
    if peaks is not None:
        base = peaks.memory[-1, strategy] - peaks.freed[-1, strategy]
        memory = peaks.memory[-1, strategy] + peaks.transient[-1, strategy]
    return Labels(strategy=strategy, time=problem.time[-1, strategy], memory=memory, base=base)


def _kept(problem: LayerProblem, guides: Guides, threshold: int, layer: int, labels: Labels) -> Labels:
    """Drop the labels that no prefix can complete, then the dominated ones."""
    kept = np.flatnonzero(completable(problem, guides, threshold, layer, labels))
    return _best(problem, layer, labels.take(kept))


def _best(problem: LayerProblem, layer: int, labels: Labels) -> Labels:
    """Drop the labels that another of the same strategy beats in all, or one that is entered alike clearly does."""
    if layer and len(labels.time) > _FEW_LABELS:
        alike, more = problem.switches[layer].entered_alike
        group, more = alike[labels.strategy], more + change(problem)
        labels = labels.take(near_undominated(group, labels.time, labels.memory, labels.base, more))
    return labels.take(undominated(labels.strategy, labels.time, labels.memory, labels.base))


def _candidates(problem: LayerProblem, layer: int, later: Labels) -> Labels:
    """Put layer `layer` before the labels of layer + 1: through the switch groups, or with an unchanged strategy."""
    switch = problem.switches[layer + 1]
    entry = switch.entry_group[later.strategy]
    few = len(entry) * len(switch.cost) <= _FEW_MOVES
    first = np.arange(len(entry)) if few else undominated(entry, later.time, later.memory, later.base)
    moves = switch.cost[:, entry[first]]  # [exit group, label]
    group, at = np.nonzero(moves < FAR)
    leaving = later.take(first[at])
    time = leaving.time + moves[group, at] + change(problem)
    left = undominated(group, time, leaving.memory, leaving.base)
    group, time, leaving = group[left], time[left], leaving.take(left)
    allowed = np.flatnonzero(problem.time[layer] < FAR)
    starts = np.searchsorted(group, np.arange(len(switch.cost) + 1))
    counts = np.diff(starts)[switch.exit_group[allowed]]
    moved = np.repeat(allowed, counts)
    # Positions 0, 1, .. within each strategy's span, moved to where the labels of its exit group start.
    at = np.arange(len(moved)) + np.repeat(starts[switch.exit_group[allowed]] - (np.cumsum(counts) - counts), counts)
    same = np.flatnonzero((problem.time[layer, later.strategy] < FAR) & (switch.own[later.strategy] < FAR))
    kept = later.strategy[same]
    strategy = np.concatenate([moved, kept])
    time = np.concatenate([time[at], later.time[same] + switch.own[kept]]) + problem.time[layer, strategy]
    base = None
    if later.base is not None and leaving.base is not None:
        base = np.concatenate([leaving.base[at], later.base[same]])
    memory, base = _put_before(problem, layer, strategy, np.concatenate([leaving.memory[at], later.memory[same]]), base)
    return Labels(strategy=strategy, time=time, memory=memory, base=base)


def _read_plan(problem: LayerProblem, labels: list[Labels]) -> NDArray[np.intp]:
    """Return the lexicographically smallest of the best plans: any label that completes to the optimum will do."""
    time, memory = int(labels[0].time.min()), problem.budget
    plan: list[int] = []
    highest_so_far = -FAR  # h of peaks.py
    for layer, here in enumerate(labels):
        rest = here.time
        if plan:
            rest = rest + switched(problem, layer)[plan[-1], here.strategy]
        fits = here.memory <= memory
        if here.base is not None:
            fits &= here.base + highest_so_far <= memory
        choice = int(here.strategy[(rest == time) & fits].min())
        if plan:
            time -= int(switched(problem, layer)[plan[-1], choice])
        time -= int(problem.time[layer, choice])
        memory -= int((problem.memory if problem.peaks is None else problem.peaks.memory)[layer, choice])
        if problem.peaks is not None:
            highest_so_far = problem.peaks.after(layer, choice, highest_so_far)
        plan.append(choice)
    return np.array(plan)


def _frontier_points(problem: LayerProblem, transients: Ints, top: int, epsilon: float) -> tuple[Ints, Ints]:
    """Return the (time, memory) labels of the plans whose transients are at most `top`."""
    limited = _limited(problem, transients, top, top)
    num_layers = len(problem.time)
    before = prefix_sums(limited, np.zeros(1))
    guides = guides_of(limited, before)
    labels = _kept(limited, guides, FAR, num_layers - 1, _last_labels(limited))
    for layer in range(num_layers - 2, -1, -1):
        labels = _thinned(labels, epsilon / num_layers)
        labels = _kept(limited, guides, FAR, layer, _candidates(limited, layer, labels))
    keep = pareto(np.zeros(len(labels.time), np.intp), labels.time, labels.memory)
    return labels.time[keep], labels.memory[keep] + top


def _thinned(labels: Labels, step: float) -> Labels:
    """Keep the least memory in every bucket of times within a factor 1 + step / 2."""
    if step <= 0 or not len(labels.time):
        return labels
    ratio = np.log1p(step / 2)  # (1 + step/2)**layers <= 1 + epsilon for epsilon <= 1
    bucket = np.floor(np.log(np.maximum(labels.time, 1)) / ratio).astype(np.int64)
    keep = np.ones(len(bucket), bool)
    keep[1:] = (bucket[1:] != bucket[:-1]) | (labels.strategy[1:] != labels.strategy[:-1])
    return Labels(strategy=labels.strategy[keep], time=labels.time[keep], memory=labels.memory[keep])
