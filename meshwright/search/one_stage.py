"""One stage: its step is m (F + B) + g, one number a plan, so layers.py solves it exactly.

The plans are cut into bands by the largest transient of the layers between first and last, and where these are tied by
the strategy that they share. A bound of every such part, by Lagrangian relaxation, comes first: the promising are
solved, the rest is dropped. Where layers free what they hold, the largest transient says little: then there is one
band, whose bound counts the transient of the last layer alone, with its memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import FAR, SLACK, Floats, Ints, Switch, group_switch
from meshwright.search.layers import (
    Hint,
    OutOfTime,
    least_multiplier,
    relaxed_bound,
    solve_fitting,
    with_last,
)
from meshwright.search.near import good_fitting
from meshwright.search.problem import Exact
from meshwright.search.relaxation import LayerProblem, plan_sums

Plan = tuple[tuple[int, ...], tuple[int, ...]]  # boundaries, strategies
_FACTORS = (0.0, 0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.35, 1.8, 3.0)  # around the multiplier of the ends left free
_BANDS = 100


@dataclass(kw_only=True)
class Best:
    """The incumbent; `ticks` are seconds x the time scale of the problem."""

    ticks: int = FAR
    plan: Plan | None = None  # None while `ticks` is only what is to be beaten

    @property
    def is_known(self) -> bool:
        """Return whether there is a time to beat."""
        return self.ticks < FAR


def solve_one_stage(exact: Exact, best: Best, deadline: float, proved: dict[Part, int]) -> int:
    """Solve P = 1 exactly; return the optimum, FAR when nothing fits, or a bound when `deadline` came first.

    `proved`: what plans of a part take at least, FAR where none is better than `best`; it grows.
    """
    free = _free_problem(exact, deadline)
    parts = sorted(_parts(exact, free), key=lambda part: (part.bound, part.tied, part.low))
    lower, hint = best.ticks, Hint()
    for number, part in enumerate(parts):
        if part.bound > best.ticks:
            break
        if time.perf_counter() > deadline:
            rest = [max(part.bound, proved.get(part, 0)) for part in parts[number:]]
            return min(lower, *rest, best.ticks)
        if proved.get(part, 0) >= FAR:
            continue
        found = _solve(exact, _restricted(exact, free, part), part, best, hint, proved.get(part, 0))
        proved[part] = found if found < best.ticks else FAR
        lower = min(lower, max(found, part.bound) if found < best.ticks else best.ticks)
    return min(lower, best.ticks)


def good_one_stage(exact: Exact, tied: int) -> Plan | None:
    """Return a fast plan with `tied` at both ends (-1: free), by little work and without a proof; None: none found."""
    problem = _restricted(exact, _free_problem(exact, math.inf), Part(tied=tied, low=0, high=FAR, bound=0))
    plan = good_fitting(problem, np.where(problem.time < FAR, exact.transient, FAR), exact.freed)
    return None if plan is None else ((0, len(plan)), tuple(int(s) for s in plan))


@dataclass(frozen=True, kw_only=True)
class Part:
    """The plans with `tied` at both ends (-1: any) and, where nothing is freed, a largest transient between them of
    `low` to `high`."""

    tied: int
    low: int
    high: int
    bound: int


def _solve(exact: Exact, problem: LayerProblem, part: Part, best: Best, hint: Hint, least: int) -> int:
    """Improve `best`; return the optimum or what is to be beaten, whichever is less, or a bound at the deadline."""
    transients = np.where(problem.time < FAR, np.maximum(exact.transient, part.low), FAR)
    try:
        plan = solve_fitting(problem, transients, exact.freed, best.ticks, least, hint)
    except OutOfTime as late:
        if late.known is not None:
            _offer(problem, late.known[1], best)
        return min(max(relaxed_bound(problem, transients, exact.freed), late.proved, least), best.ticks)
    if plan is not None:
        _offer(problem, plan, best)
    return best.ticks


def _offer(problem: LayerProblem, plan: NDArray[np.intp], best: Best) -> None:
    """Let a plan be `best` where it is better, or comes first of equal ones."""
    found, strategies = plan_sums(problem, plan)[0], tuple(int(s) for s in plan)
    if found < best.ticks or (best.plan is not None and (found, strategies) < (best.ticks, best.plan[1])):
        best.ticks, best.plan = found, ((0, len(plan)), strategies)


def _free_problem(exact: Exact, deadline: float) -> LayerProblem:
    m, base = exact.source.num_micro_batches, exact.source.num_layers
    allowed = exact.forward < FAR
    forward, backward, step = (np.where(allowed, part, 0) for part in (exact.forward, exact.backward, exact.step))
    made: dict[bytes, Switch] = {}
    switches: list[Switch] = []
    for layer in range(base):
        moves = base * m * exact.switch[:, layer].sum(axis=0)
        key = moves.tobytes()
        if key not in made:
            made[key] = group_switch(moves[np.ix_(exact.layout, exact.layout)])
        switches.append(made[key])
    return LayerProblem(
        time=np.where(allowed, base * (m * (forward + backward) + step), FAR),
        memory=np.where(allowed, exact.memory[0], FAR),
        switches=tuple(switches),
        changes_base=base,
        budget=exact.budget[0],
        deadline=deadline,
    )


def _restricted(exact: Exact, free: LayerProblem, part: Part) -> LayerProblem:
    """Return the problem of a part."""
    allowed = (free.time < FAR) & (exact.transient <= part.high)
    for end in (0, -1):
        allowed[end] = free.time[end] < FAR
        if part.tied >= 0:
            allowed[end] = False
            allowed[end, part.tied] = True
    return replace(
        free,
        time=np.where(allowed, free.time, FAR),
        memory=np.where(allowed, free.memory, FAR),
        budget=free.budget - (int(exact.tied_extra[part.tied]) if part.tied >= 0 else 0),
    )


def _ties(exact: Exact, free: LayerProblem) -> NDArray[np.intp]:
    """Return the strategies that both ends may use, less those that another of the same layout is better than.

    Strictly faster, so that it wins whatever changes of strategy are counted, and in need of no more memory.
    """
    both = np.flatnonzero((free.time[0] < FAR) & (free.time[-1] < FAR))
    time = free.time[0, both] + free.time[-1, both]
    memory = free.memory[0, both] + free.memory[-1, both] + exact.tied_extra[both]
    first, last, freed = exact.transient[0, both], exact.transient[-1, both], exact.freed[-1, both]
    if not exact.frees:
        first = last = np.maximum(first, last)
    layout = exact.layout[both]
    keep: list[bool] = []
    for at in range(len(both)):
        better = (layout == layout[at]) & (time < time[at]) & (memory <= memory[at])
        better &= (first <= first[at]) & (last <= last[at]) & (freed >= freed[at])
        keep.append(not better.any())
    return both[np.array(keep, bool)]


def _parts(exact: Exact, free: LayerProblem) -> Iterator[Part]:
    """Yield the parts in which something may fit, with their bounds."""
    is_tied = exact.source.tied
    ties = _ties(exact, free) if is_tied else np.array([-1])
    if not len(ties):
        return
    transient = np.where(free.time < FAR, exact.transient, FAR)
    extra = exact.tied_extra[ties] if is_tied else np.zeros(1, np.int64)
    if exact.frees:
        free, transient, bands, ends = with_last(free, transient), np.zeros_like(transient), [(0, FAR)], 0 * extra
    else:
        bands = _bands(transient[1:-1])
        first, last = (transient[at, ties] if is_tied else transient[at].min(keepdims=True) for at in (0, -1))
        ends = np.maximum(first, last)
    multiplier = least_multiplier(free, transient)
    for low, high in bands:
        links = [_Links(exact, free, high, weights) for weights in _weights(multiplier)]
        room = (free.budget - extra - np.maximum(ends, low)).astype(float)
        bounds = np.full(len(ties), -np.inf)
        fits = links[0].through(ties) <= room + np.abs(room) * SLACK + 1
        for link in links[1:]:
            value = np.where(fits, link.through(ties), 0.0) - link.weights[1] * room
            bounds = np.maximum(bounds, value - (np.abs(value) + link.weights[1] * np.abs(room)) * SLACK - 1)
        for tied, bound in zip(ties[fits].tolist(), np.floor(bounds[fits]).astype(np.int64).tolist(), strict=True):
            yield Part(tied=tied, low=low, high=high, bound=bound)


def _weights(multiplier: float) -> list[tuple[float, float]]:
    """Return weights of time and memory: memory alone first."""
    return [(0.0, 1.0), *((1.0, factor * multiplier) for factor in _FACTORS)]


def _bands(inner: Ints) -> list[tuple[int, int]]:
    """Return bands (low, high) of what the largest transient between the ends may be."""
    if not len(inner):
        return [(0, FAR)]
    values = np.unique(inner[inner < FAR])
    values = values[values >= inner.min(axis=1).max()]
    if not len(values):  # some layer can use no strategy
        return []
    return [(int(band[0]), int(band[-1])) for band in np.array_split(values, min(len(values), _BANDS))]


class _Links:
    """Least weighted sums of time and memory over the layers between the ends, by the layouts of the ends.

    Equal layers in a row are one min-plus power, by repeated squaring.
    """

    def __init__(self, exact: Exact, free: LayerProblem, highest: int, weights: tuple[float, float]) -> None:
        self.exact, self.weights = exact, weights
        allowed = (free.time < FAR) & (exact.transient <= highest)
        allowed[[0, -1]] = free.time[[0, -1]] < FAR
        time, memory = (np.where(allowed, part, 0).astype(float) for part in (free.time, free.memory))
        self.node = np.where(allowed, weights[0] * time + weights[1] * memory, np.inf)
        scale = weights[0] * exact.source.num_micro_batches * exact.source.num_layers
        self.moves = scale * exact.switch.sum(axis=0).astype(float)  # [layer, layout, layout]
        self.between = self._between()

    def through(self, ties: NDArray[np.intp]) -> Floats:
        """Return the least sums with each tie at both ends; [-1]: with any strategies there."""
        layout = self.exact.layout
        if ties[0] < 0:
            if len(self.node) == 1:
                return self.node[0].min(keepdims=True)
            ends = [np.full(self.exact.num_layouts, np.inf) for _ in range(2)]
            for end, node in zip(ends, (self.node[0], self.node[-1]), strict=True):
                np.minimum.at(end, layout, node)
            return (ends[0][:, None] + self.between + ends[1][None, :]).min(keepdims=True).reshape(1)
        at = layout[ties]
        sums: Floats = self.node[0, ties] + self.between[at, at] + self.node[-1, ties]
        return sums

    def _between(self) -> Floats:
        """Return [layout of the first, layout of the last layer]: switches and all that lies between them."""
        count, classes = self.exact.num_layouts, self.exact.layer_class
        chain = np.where(np.eye(count, dtype=bool), 0.0, np.inf)
        layer = 1
        while layer < len(classes) - 1:
            length = 1
            while layer + length < len(classes) - 1 and classes[layer + length] == classes[layer]:
                length += 1
            by_layout = [self.node[layer, self.exact.layout == one].min(initial=np.inf) for one in range(count)]
            chain = _min_plus(chain, _power(self.moves[layer] + np.array(by_layout), length))
            layer += length
        return _min_plus(chain, self.moves[-1])


def _min_plus(one: Floats, two: Floats) -> Floats:
    product: Floats = (one[:, :, None] + two[None]).min(axis=1)
    return product


def _power(step: Floats, times: int) -> Floats:
    """Return the min-plus product of `times` >= 1 equal steps."""
    result: Floats | None = None
    while True:
        if times % 2:
            result = step if result is None else _min_plus(result, step)
        times //= 2
        if not times:
            assert result is not None  # noqa: S101 times was at least 1
            return result
        step = _min_plus(step, step)
