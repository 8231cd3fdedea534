"""Strategies of the layers of one stage: least time under a memory budget, exactly; and the whole frontier.

    minimise   sum_i time[i, s_i] + sum_{i>=1} switch[i, s_{i-1}, s_i]
    subject to sum_i bytes[i, s_i] + max_i transient[i, s_i] <= budget

Labels (time, memory) of the layers i..L-1, by the strategy of layer i, are built from the last layer to the first;
a label that another one of the same strategy beats in both is dropped. For any multiplier lam >= 0 the minimum of
time + lam * memory over a prefix, minus lam * budget, bounds every completion, so labels above a threshold go too
(Lagrangian relaxation; Handler and Zang, Networks 10, 1980). The threshold starts just above the dual bound and grows
until a plan is found: that plan is optimal. Sums are integers (labels.py), nothing is rounded coarsely.

Ties: the number of neighbours with different strategies is the lowest digit of the time, and labels from the back
allow the lexicographically smallest of the best plans to be read from the front. A maximum of transients is not
additive: an interval of its value is relaxed (only strategies up to its top, budget less its bottom) and split at the
maximum of the relaxed optimum until that optimum fits.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.search.labels import FAR, Floats, Ints, Switch, decimal_scale, group_switch, pareto, to_ints

_SLACK = 1e-12  # relative; floats bound, integers decide
_CROSSINGS = 3
_GRIDS, _GRID = 2, 4.0 ** np.arange(-7.0, 6.0)
_BETWEEN: Floats = np.linspace(0.0, 1.0, len(_GRID) + 2)[1:-1]
_FIRST_GAP, _USUAL_CHOICES = 1e-3, 1000
_FEW_MOVES, _FEW_PAIRS = 2000, 20_000
_PER_LAYER = 3  # dimensions of a switch table with an entry for each layer


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The best strategies of a stage's layers, their time and their memory (with the largest transient)."""

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


class OutOfTime(Exception):
    """A problem's deadline has passed before it was solved."""


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


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Labels of the layers from one on, sorted by strategy, then memory."""

    strategy: NDArray[np.intp]
    time: Ints
    memory: Ints


@dataclass(frozen=True, kw_only=True)
class PrefixBound:
    """prefix[lam, layer, strategy]: least time + lam * memory of the layers before, switch included."""

    multipliers: Floats  # [lam]
    prefix: Floats
    prefix_memory: Floats  # [layer, strategy] the least memory of the layers before


def solve(
    *,
    layer_s: ArrayLike,
    layer_bytes: ArrayLike,
    switch_s: ArrayLike,
    budget_bytes: float,
    transient_bytes: ArrayLike | None = None,
) -> LayerChoice | None:
    """Return the fastest choice that fits `budget_bytes`, or None.

    `layer_s`, `layer_bytes`, `transient_bytes` are [layer, strategy] (inf: not allowed), `switch_s` is
    [strategy, strategy] or [layer, strategy, strategy] with entry i between layers i-1 and i (entry 0 is ignored).
    """
    times, memories, switch, transients = _arrays(layer_s, layer_bytes, switch_s, transient_bytes)
    memory_scale = decimal_scale(_largest_sum(memories) + _largest_sum(transients) + abs(budget_bytes), 9)
    problem = _problem(times, memories, switch, memory_scale, budget_bytes)
    found = solve_intervals(problem, to_ints(transients, memory_scale))
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
        memory_bytes=float(memories[rows, found].sum() + transients[rows, found].max()),
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


def relaxed_bound(problem: LayerProblem, transients: Ints) -> int:
    """Return a bound on the time of every plan that fits; FAR when none does. Takes moments."""
    dual = _relaxed_dual(problem, transients)
    return FAR if dual is None else math.floor(dual[0] * (1 - _SLACK)) - 1


def least_multiplier(problem: LayerProblem, transients: Ints) -> float:
    """Return the multiplier of memory at which `relaxed_bound` is reached: time per byte; 0 where memory is ample."""
    dual = _relaxed_dual(problem, transients)
    return 0.0 if dual is None or len(dual[2]) == 1 else dual[2][2]


def _relaxed_dual(problem: LayerProblem, transients: Ints) -> tuple[float, int, list[float]] | None:
    values = transients[transients < FAR]
    bottom = _least_transient(transients)
    return _dual(_limited(problem, transients, bottom, int(values.max()))) if bottom < FAR else None


def _least_transient(transients: Ints) -> int:
    """Return what the largest transient of any plan is at least: the largest of the layers' least; FAR: no plan."""
    return int(transients.min(axis=1).max(initial=0))


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


def _solve_additive(problem: LayerProblem, limit: int) -> tuple[int, NDArray[np.intp]] | None:
    """Return the best (time, strategies) with time <= limit, or None."""
    dual = _dual(problem)
    if dual is None:
        return None
    lower, upper, multipliers = dual
    upper = min(upper, limit)
    if lower > upper * (1 + _SLACK) + 1:
        return None
    bound = prefix_bounds(problem, np.array(multipliers))
    through = _least_through(problem, bound)
    # The more choices, the nearer the best plan is to the bound, and the more labels lie between.
    share = _FIRST_GAP * min(1.0, _USUAL_CHOICES / np.count_nonzero(problem.time < FAR))
    gap = max(share * abs(lower), float(problem.changes_base))
    while True:
        threshold = min(upper, int(lower + gap) + 1)
        if upper - threshold < 2 * gap:  # the plan in hand is near: no second pass
            threshold = upper
        labels = _all_labels(_reduced(problem, bound, through, threshold), bound, threshold)
        if len(labels[0].time):
            return int(labels[0].time.min()), _read_plan(problem, labels)
        if threshold >= upper:
            return None
        gap *= 4


@dataclass(frozen=True, kw_only=True)
class _Relaxed:
    """The plan with the least weighted sum of time and memory, and that sum."""

    plan: NDArray[np.intp]
    ticks: int
    used: int
    value: float


def _relaxed(problem: LayerProblem, weights: tuple[float, float]) -> _Relaxed | None:
    """Return it, or None when no plan is allowed; the weight of time is 1 or 0."""
    time_weight, memory_weight = weights
    cost = np.where(
        problem.time < FAR,
        time_weight * problem.time.astype(float) + memory_weight * problem.memory.astype(float),
        np.inf,
    )
    value, arrows = cost[-1], [np.zeros(0, np.intp)] * len(cost)
    for layer in range(len(cost) - 1, 0, -1):
        switch = problem.switches[layer]
        moves = switch.floats if time_weight else np.where(np.isfinite(switch.floats), 0.0, np.inf)
        order = np.lexsort((-value, switch.entry_group))  # the last of each group wins the assignment below
        best_of = np.zeros(moves.shape[1], np.intp)
        best_of[switch.entry_group[order]] = order
        total = moves + value[best_of][None, :]
        chosen = total.argmin(axis=1)
        arrows[layer] = best_of[chosen][switch.exit_group]
        value = cost[layer - 1] + total[np.arange(len(total)), chosen][switch.exit_group]
    at = int(value.argmin())
    if not np.isfinite(value[at]):
        return None
    steps = [at]
    for layer in range(1, len(cost)):
        steps.append(int(arrows[layer][steps[-1]]))
    plan = np.array(steps)
    time, memory = plan_sums(problem, plan)
    return _Relaxed(plan=plan, ticks=time, used=memory, value=float(value[at]))


def plan_sums(problem: LayerProblem, plan: NDArray[np.intp]) -> tuple[int, int]:
    """Return the integer time (changes in its lowest digit) and memory of a plan."""
    rows = np.arange(len(plan))
    time = int(problem.time[rows, plan].sum())
    for layer in range(1, len(plan)):
        before, here = plan[layer - 1], plan[layer]
        switch = problem.switches[layer]
        time += int(switch.cost[switch.exit_group[before], switch.entry_group[here]]) + _change(problem) * int(
            before != here
        )
    return time, int(problem.memory[rows, plan].sum())


def _dual(problem: LayerProblem) -> tuple[float, int, list[float]] | None:
    """Maximise min(time + lam * (memory - budget)) over lam; return (bound, time of a plan that fits, multipliers)."""
    fastest = _relaxed(problem, (1.0, 0.0))
    if fastest is None:
        return None
    if fastest.used <= problem.budget:
        return fastest.value, fastest.ticks, [0.0]
    smallest = _relaxed(problem, (0.0, 1.0))
    if smallest is None or smallest.used > problem.budget:
        return None
    lower, best, heavy, light = _best_multiplier(problem, fastest, smallest)
    upper = min(smallest.ticks, light.ticks, _crossed(problem, heavy.plan, light.plan))
    return lower, upper, [0.0, best / 3, best, best * 3] if best else [0.0]


def _best_multiplier(
    problem: LayerProblem, fastest: _Relaxed, smallest: _Relaxed
) -> tuple[float, float, _Relaxed, _Relaxed]:
    """Return the best bound, its multiplier, and the plans on both sides of the budget: one too large, one that fits.

    The bound is concave in the multiplier: whole grids of them are tried in one pass over the layers, each between
    the neighbours of the best before. The first spans slopes from far below to far above that of the two plans.
    """
    lower, best, heavy, light = fastest.value, 0.0, fastest, smallest
    slope = (light.ticks - heavy.ticks) / (heavy.used - light.used)
    if slope <= 0:
        return lower, best, heavy, light
    grid, low, high = slope * _GRID, 0.0, 0.0
    for _ in range(_GRIDS):
        values = suffix_sums(problem, grid)[:-1, 0].min(axis=1) - grid * problem.budget
        at = int(values.argmax())
        if values[at] > lower:
            lower, best = float(values[at]), float(grid[at])
        low = float(grid[at - 1]) if at else 0.0
        high = float(grid[min(at + 1, len(grid) - 1)])
        grid = low + (high - low) * _BETWEEN
    for multiplier in (low, high, best):
        found = _relaxed(problem, (1.0, multiplier))
        if found is not None and found.used > problem.budget:
            heavy = min(heavy, found, key=lambda one: one.used)
        elif found is not None:
            light = min(light, found, key=lambda one: one.ticks)
    return lower, best, heavy, light


def _crossed(problem: LayerProblem, heavy: NDArray[np.intp], light: NDArray[np.intp]) -> int:
    """Return the least time of a plan that fits and begins as one of two and ends as the other; FAR: none does.

    Both are best for one multiplier, but only one fits: between them lie plans that nearly fill the budget.
    """
    rows = np.arange(len(heavy))
    best = FAR
    for first, second in ((heavy, light), (light, heavy)):
        memory = np.concatenate([[0], np.cumsum(problem.memory[rows, first])])
        rest = problem.memory[rows, second]
        after = int(rest.sum()) - np.concatenate([[0], np.cumsum(rest)])
        fitting = np.flatnonzero(memory + after <= problem.budget)
        gain = np.cumsum(problem.time[rows, first] - problem.time[rows, second])
        value = np.concatenate([[0], gain])[fitting]
        for at in fitting[np.argsort(value, kind="stable")[:_CROSSINGS]]:  # switches decide between the best
            best = min(best, plan_sums(problem, np.concatenate([first[:at], second[at:]]))[0])
    return best


def _change(problem: LayerProblem) -> int:
    return int(problem.changes_base > 1)


def prefix_bounds(problem: LayerProblem, multipliers: Floats) -> PrefixBound:
    """Return least sums of the layers before each layer, for all multipliers at once and for memory alone."""
    weight, cost = _weighted_costs(problem, multipliers)
    prefix = np.zeros_like(cost)
    for layer in range(1, len(problem.time)):
        switch = problem.switches[layer]
        leaving = switch.leaving(prefix[:, layer - 1] + cost[:, layer - 1])
        prefix[:, layer] = (leaving[:, :, None] + _weighted(switch, weight)).min(axis=1)[:, switch.entry_group]
    return PrefixBound(multipliers=multipliers, prefix=prefix[:-1], prefix_memory=prefix[-1])


def _weighted_costs(problem: LayerProblem, multipliers: Floats) -> tuple[Floats, Floats]:
    """Return the weights of time, [lam + 1], and time + lam * memory of every choice; the last row is memory alone."""
    weight, scale = np.append(np.ones(len(multipliers)), 0.0), np.append(multipliers, 1.0)[:, None, None]
    time, memory = problem.time.astype(float), problem.memory.astype(float)
    return weight, np.where(problem.time < FAR, weight[:, None, None] * time + scale * memory, np.inf)


def _least_through(problem: LayerProblem, bound: PrefixBound) -> Floats:
    """Return [lam, layer, strategy]: least time + lam * memory of a plan with that choice; the last row: memory."""
    prefix = np.concatenate([bound.prefix, bound.prefix_memory[None]])
    return prefix + suffix_sums(problem, bound.multipliers)


def suffix_sums(problem: LayerProblem, multipliers: Floats) -> Floats:
    """Return [lam, layer, strategy]: least sums from a layer, under a strategy, to the end; the last row: memory."""
    weight, suffix = _weighted_costs(problem, multipliers)
    for layer in range(len(problem.time) - 2, -1, -1):
        switch = problem.switches[layer + 1]
        entering = switch.entering(suffix[:, layer + 1])
        suffix[:, layer] += (_weighted(switch, weight) + entering[:, None, :]).min(axis=2)[:, switch.exit_group]
    return suffix


def _weighted(switch: Switch, weight: Floats) -> Floats:
    """Return [weight, exit group, entry group]; a weight is 1, or 0 for what takes no memory."""
    finite = np.isfinite(switch.floats)
    return np.where(finite, weight[:, None, None] * np.where(finite, switch.floats, 0.0), np.inf)


def _reduced(problem: LayerProblem, bound: PrefixBound, through: Floats, threshold: int) -> LayerProblem:
    """Forbid the choices that no plan within threshold and budget contains (reduced-cost fixing)."""
    room = _room(problem, bound, threshold) + bound.multipliers * float(problem.budget)
    keep = (through[:-1] <= room[:, None, None]).all(axis=0)
    keep &= through[-1] <= problem.budget + _SLACK * abs(problem.budget)
    return replace(problem, time=np.where(keep, problem.time, FAR), memory=np.where(keep, problem.memory, FAR))


def _room(problem: LayerProblem, bound: PrefixBound, threshold: int) -> Floats:
    """Return [lam] what time + lam * (memory - budget) may be at most: the threshold, and a little for floats."""
    return threshold + _SLACK * (abs(threshold) + bound.multipliers * float(problem.budget)) + 1


def _all_labels(problem: LayerProblem, bound: PrefixBound, threshold: int) -> list[_Labels]:
    """Return the labels of every layer that can be part of a plan within budget and threshold."""
    num_layers = len(problem.time)
    labels = [_kept(problem, bound, threshold, num_layers - 1, _last_labels(problem))]
    for layer in range(num_layers - 2, -1, -1):
        if time.perf_counter() > problem.deadline:
            raise OutOfTime
        if len(labels[-1].time) * np.count_nonzero(problem.time[layer] < FAR) <= _FEW_PAIRS:
            labels.append(_extended(problem, bound, threshold, layer, labels[-1]))
        else:
            labels.append(_kept(problem, bound, threshold, layer, _candidates(problem, layer, labels[-1])))
    return labels[::-1]


def _extended(problem: LayerProblem, bound: PrefixBound, threshold: int, layer: int, later: _Labels) -> _Labels:
    """Put every choice of layer `layer` before every label of layer + 1; drop as `_kept` does."""
    switch = problem.switches[layer + 1]
    here = np.flatnonzero(problem.time[layer] < FAR)
    moves = switch.cost[switch.exit_group[here][:, None], switch.entry_group[later.strategy][None, :]]
    if _change(problem):
        moves = moves + (here[:, None] != later.strategy[None, :])
    time = moves + problem.time[layer, here][:, None] + later.time[None, :]
    memory = problem.memory[layer, here][:, None] + later.memory[None, :]
    slack = _SLACK * abs(problem.budget)
    keep = memory + bound.prefix_memory[layer, here][:, None] <= problem.budget + slack
    over = memory - float(problem.budget)
    room = _room(problem, bound, threshold)[:, None] - bound.prefix[:, layer, here]
    for number, multiplier in enumerate(bound.multipliers.tolist()):
        keep &= time + multiplier * over <= room[number][:, None]
    if layer == 0:  # complete: integers decide
        keep &= (memory <= problem.budget) & (time <= threshold)
    choice, at = np.nonzero(keep)
    strategy, time, memory = here[choice], time[choice, at], memory[choice, at]
    order = pareto(strategy, time, memory)
    return _Labels(strategy=strategy[order], time=time[order], memory=memory[order])


def _last_labels(problem: LayerProblem) -> _Labels:
    strategy = np.flatnonzero(problem.time[-1] < FAR)
    return _Labels(strategy=strategy, time=problem.time[-1, strategy], memory=problem.memory[-1, strategy])


def _kept(problem: LayerProblem, bound: PrefixBound, threshold: int, layer: int, labels: _Labels) -> _Labels:
    """Drop the labels that no prefix can complete, then the dominated ones."""
    lam = bound.multipliers[:, None]
    value = labels.time + lam * (labels.memory - float(problem.budget)) + bound.prefix[:, layer, labels.strategy]
    keep = (value <= _room(problem, bound, threshold)[:, None]).all(axis=0)
    fits = labels.memory + bound.prefix_memory[layer, labels.strategy]
    keep &= fits <= problem.budget + _SLACK * abs(problem.budget)
    if layer == 0:  # complete: integers decide
        keep &= (labels.memory <= problem.budget) & (labels.time <= threshold)
    return _selected(labels, keep)


def _selected(labels: _Labels, keep: NDArray[np.bool_]) -> _Labels:
    strategy, time, memory = labels.strategy[keep], labels.time[keep], labels.memory[keep]
    order = pareto(strategy, time, memory)
    return _Labels(strategy=strategy[order], time=time[order], memory=memory[order])


def _candidates(problem: LayerProblem, layer: int, later: _Labels) -> _Labels:
    """Put layer `layer` before the labels of layer + 1: through the switch groups, or with an unchanged strategy."""
    switch = problem.switches[layer + 1]
    entry = switch.entry_group[later.strategy]
    few = len(entry) * len(switch.cost) <= _FEW_MOVES
    first = np.arange(len(entry)) if few else pareto(entry, later.time, later.memory)
    moves = switch.cost[:, entry[first]]  # [exit group, label]
    group, at = np.nonzero(moves < FAR)
    time, memory = later.time[first][at] + moves[group, at] + _change(problem), later.memory[first][at]
    left = pareto(group, time, memory)
    group, time, memory = group[left], time[left], memory[left]
    allowed = np.flatnonzero(problem.time[layer] < FAR)
    starts = np.searchsorted(group, np.arange(len(switch.cost) + 1))
    counts = np.diff(starts)[switch.exit_group[allowed]]
    moved = np.repeat(allowed, counts)
    # Positions 0, 1, .. within each strategy's span, moved to where the labels of its exit group start.
    at = np.arange(len(moved)) + np.repeat(starts[switch.exit_group[allowed]] - (np.cumsum(counts) - counts), counts)
    same = (problem.time[layer, later.strategy] < FAR) & (switch.own[later.strategy] < FAR)
    kept = later.strategy[same]
    strategy = np.concatenate([moved, kept])
    return _Labels(
        strategy=strategy,
        time=np.concatenate([time[at], later.time[same] + switch.own[kept]]) + problem.time[layer, strategy],
        memory=np.concatenate([memory[at], later.memory[same]]) + problem.memory[layer, strategy],
    )


def _read_plan(problem: LayerProblem, labels: list[_Labels]) -> NDArray[np.intp]:
    """Return the lexicographically smallest of the best plans: any label that completes to the optimum will do."""
    time, memory = int(labels[0].time.min()), problem.budget
    plan: list[int] = []
    for layer, here in enumerate(labels):
        moves = np.zeros(problem.time.shape[1], np.int64)  # into each strategy
        if plan:
            switch, before = problem.switches[layer], plan[-1]
            moves = switch.cost[switch.exit_group[before], switch.entry_group]
            moves = moves + _change(problem) * (np.arange(len(moves)) != before)
        rest = here.time + moves[here.strategy]
        choice = int(here.strategy[(rest == time) & (here.memory <= memory)].min())
        time -= int(moves[choice]) + int(problem.time[layer, choice])
        memory -= int(problem.memory[layer, choice])
        plan.append(choice)
    return np.array(plan)


def _frontier_points(problem: LayerProblem, transients: Ints, top: int, epsilon: float) -> tuple[Ints, Ints]:
    """Return the (time, memory) labels of the plans whose transients are at most `top`."""
    limited = _limited(problem, transients, top, top)
    num_layers = len(problem.time)
    bound = prefix_bounds(limited, np.zeros(1))
    labels = _kept(limited, bound, FAR, num_layers - 1, _last_labels(limited))
    for layer in range(num_layers - 2, -1, -1):
        labels = _thinned(labels, epsilon / num_layers)
        labels = _kept(limited, bound, FAR, layer, _candidates(limited, layer, labels))
    keep = pareto(np.zeros(len(labels.time), np.intp), labels.time, labels.memory)
    return labels.time[keep], labels.memory[keep] + top


def _thinned(labels: _Labels, step: float) -> _Labels:
    """Keep the least memory in every bucket of times within a factor 1 + step / 2."""
    if step <= 0 or not len(labels.time):
        return labels
    ratio = np.log1p(step / 2)  # (1 + step/2)**layers <= 1 + epsilon for epsilon <= 1
    bucket = np.floor(np.log(np.maximum(labels.time, 1)) / ratio).astype(np.int64)
    keep = np.ones(len(bucket), bool)
    keep[1:] = (bucket[1:] != bucket[:-1]) | (labels.strategy[1:] != labels.strategy[:-1])
    return _Labels(strategy=labels.strategy[keep], time=labels.time[keep], memory=labels.memory[keep])
