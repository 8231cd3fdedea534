"""When nothing fits: the plan whose most overfull stage is least over its budget.

Memory does not depend on neighbours. The least peak of every range of layers is exact, by labels (P, b) from its last
layer to its first (peaks.py): one that another beats in both is dropped. Ranges that end alike share their labels. The
cut with the least largest overflow follows by dynamic programming. Tied layers are tried strategy by strategy, those
with the least bound first: no peak is below the sum of the layers' least memories and the last one's least transient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import Floats, pareto_rows
from meshwright.search.problem import StageProblem, freed_bytes, stage_bytes

_ROUNDING = 1e-12  # relative


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The least overfull plan: what each stage needs and by how much it is over its budget (negative: room left)."""

    boundaries: tuple[int, ...]
    strategies: tuple[int, ...]
    stage_bytes: tuple[float, ...]
    over_bytes: tuple[float, ...]

    @property
    def worst_stage(self) -> int:
        """Return the stage that is most over its budget."""
        return int(np.argmax(self.over_bytes))


@dataclass(frozen=True, kw_only=True)
class _Choices:
    """What one layer can use, none of which another beats in all."""

    strategy: NDArray[np.intp]
    memory: Floats
    transient: Floats
    freed: Floats


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Labels of the choices for some layers that nothing beats, by rising P, and what was put before which label."""

    peak: Floats
    base: Floats
    chosen: NDArray[np.intp]  # strategies of the first layer
    behind: NDArray[np.intp]  # labels of the layers after it
    later: _Labels | None  # None: no layers at all
    least: float = 0.0  # the first P
    longer: dict[int, _Labels] = field(default_factory=dict[int, "_Labels"])  # by the kind of the layer put before


def shortfall(problem: StageProblem, *, partitions: tuple[tuple[int, ...], ...] | None = None) -> Shortfall | None:
    """Return the plan with the least largest overflow, or None when some layer has no strategy (or too few layers)."""
    if problem.num_layers < problem.num_stages:
        return None
    cases = [(_bound(problem, allowed, partitions), tied) for tied, allowed in _allowed(problem)]
    best: Shortfall | None = None
    for bound, tied in sorted(cases):
        if best is not None and bound > max(best.over_bytes):
            break
        found = _least_overfull(problem, _restricted(_usable(problem), tied), partitions)
        if found is not None and (best is None or max(found.over_bytes) < max(best.over_bytes)):
            best = found
    return best


def least_overflow(problem: StageProblem, *, partitions: tuple[tuple[int, ...], ...] | None = None) -> float:
    """Return a bound on what `shortfall` finds as the largest overflow, much faster; inf where it finds no plan.

    Ends that are tied are left free.
    """
    return np.inf if problem.num_layers < problem.num_stages else _bound(problem, _usable(problem), partitions)


def _allowed(problem: StageProblem) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Yield the strategies that tied ends may share (-1: free), and what every layer may then use."""
    usable = _usable(problem)
    for tied in np.flatnonzero(usable[0] & usable[-1]).tolist() if problem.tied else [-1]:
        yield tied, _restricted(usable, tied)


def _usable(problem: StageProblem) -> NDArray[np.bool_]:
    sums = problem.forward_s + problem.states_bytes + problem.act_bytes + problem.transient_bytes + freed_bytes(problem)
    usable: NDArray[np.bool_] = np.isfinite(sums)
    return usable


def _bound(problem: StageProblem, allowed: NDArray[np.bool_], partitions: tuple[tuple[int, ...], ...] | None) -> float:
    """Return the bound at the top on the largest overflow, less what summing in another order may change."""
    if not allowed.any(axis=1).all():
        return np.inf
    extra = 0.0
    if problem.tied and problem.num_stages == 1 and problem.tied_extra_bytes is not None:
        extra = float(problem.tied_extra_bytes.min())
    tables: dict[int, Floats] = {}
    for held in set(problem.in_flight.tolist()):
        memory = np.where(allowed, problem.states_bytes + held * problem.act_bytes, np.inf)
        least, last = memory.min(axis=1), (memory + np.where(allowed, problem.transient_bytes, np.inf)).min(axis=1)
        before = np.append(0.0, np.cumsum(least))
        tables[held] = (before[:-1] + last)[None, :] - before[:-1, None]  # [first layer, last layer]
    over = [
        tables[held] - budget + extra - _ROUNDING * (float(tables[held].max()) + budget)
        for held, budget in zip(problem.in_flight.tolist(), problem.budget_bytes.tolist(), strict=True)
    ]
    if partitions is not None:
        return min(
            (
                max(float(one[low, high - 1]) for one, (low, high) in zip(over, pairwise(cut), strict=True))
                for cut in partitions
            ),
            default=np.inf,
        )
    worst = np.full(problem.num_layers + 1, np.inf)
    worst[-1] = -np.inf
    late = np.tril(np.ones((problem.num_layers, problem.num_layers), bool), -1)
    for one in reversed(over):
        total = np.where(late, np.inf, np.maximum(one, worst[None, 1:]))
        worst = np.append(total.min(axis=1), np.inf)
    return float(worst[0])


def _restricted(allowed: NDArray[np.bool_], tied: int) -> NDArray[np.bool_]:
    if tied < 0:
        return allowed
    here = allowed.copy()
    for layer in (0, -1):
        here[layer] &= np.arange(allowed.shape[1]) == tied
    return here


def _least_overfull(
    problem: StageProblem, allowed: NDArray[np.bool_], partitions: tuple[tuple[int, ...], ...] | None
) -> Shortfall | None:
    if not allowed.any(axis=1).all():
        return None
    least = {held: _least(problem, allowed, held) for held in set(problem.in_flight.tolist())}
    over = np.stack([least[held].peaks for held in problem.in_flight.tolist()])
    over -= problem.budget_bytes[:, None, None]
    if partitions is None:
        cuts = best_cut(over)
    else:
        cuts = min(partitions, key=lambda cut: max(over[i, cut[i], cut[i + 1]] for i in range(problem.num_stages)))
    strategies: list[int] = []
    for held, span in zip(problem.in_flight.tolist(), pairwise(cuts), strict=True):
        strategies.extend(least[held].leanest(*span))
    used = stage_bytes(problem, cuts, tuple(strategies))
    return Shortfall(
        boundaries=cuts,
        strategies=tuple(strategies),
        stage_bytes=tuple(used),
        over_bytes=tuple(float(u - b) for u, b in zip(used, problem.budget_bytes, strict=True)),
    )


@dataclass(frozen=True, kw_only=True)
class _Least:
    """The least peak of every range of layers with one count of micro-batches in flight."""

    peaks: Floats  # [first layer, end], infinite where there is no such range
    kinds: list[int]  # [layer] equal ones have equal choices
    nothing: _Labels  # of no layers: what all labels grow from

    def leanest(self, start: int, end: int) -> list[int]:
        """Return the strategies of the least peak of a range."""
        labels = self.nothing
        for layer in range(end - 1, start - 1, -1):
            labels = labels.longer[self.kinds[layer]]
        at, chosen = 0, list[int]()
        while labels.later is not None:
            chosen.append(int(labels.chosen[at]))
            at, labels = int(labels.behind[at]), labels.later
        return chosen


def _least(problem: StageProblem, allowed: NDArray[np.bool_], held: int) -> _Least:
    """Tabulate the least peaks with so many micro-batches in flight."""
    rows = [
        np.where(allowed, part, 0.0)
        for part in (problem.states_bytes, problem.act_bytes, problem.transient_bytes, freed_bytes(problem))
    ]
    memory, transient, freed = rows[0] + held * rows[1], rows[2], rows[3]
    known: dict[bytes, int] = {}
    kinds: list[int] = []
    choices: list[_Choices] = []
    for here in zip(allowed, memory, transient, freed, strict=True):
        key = b"".join(part.tobytes() for part in here)
        if key not in known:
            known[key] = len(choices)
            choices.append(_unbeaten(*here))
        kinds.append(known[key])
    none, zero = np.zeros(0, np.intp), np.zeros(1)
    nothing = _Labels(peak=zero, base=zero, chosen=none, behind=none, later=None)
    left_behind = float(np.maximum(0.0, -freed.min(axis=1)).sum())  # by layers that free less than nothing
    highest, size = float(transient.max()) + left_behind, problem.num_layers + 1
    peaks = np.full((size, size), np.inf)
    # Only ranges that a stage can have while each of the others has a layer.
    holders, last_stage = np.flatnonzero(problem.in_flight == held).tolist(), problem.num_stages - 1
    longest, earliest = problem.num_layers - last_stage, holders[0]
    first_end = problem.num_layers if earliest == last_stage else earliest + 1
    for end in range(first_end, problem.num_layers - (last_stage - holders[-1]) + 1):
        first = max(earliest, end - longest)
        labels, least = nothing, list[float]()
        for kind in reversed(kinds[first:end]):
            longer = labels.longer.get(kind)
            if longer is None:
                longer = labels.longer[kind] = _put_before(choices[kind], labels, highest)
            labels = longer
            least.append(labels.least)
        peaks[first:end, end] = least[::-1]
    return _Least(peaks=peaks, kinds=kinds, nothing=nothing)


def _unbeaten(allowed: NDArray[np.bool_], memory: Floats, transient: Floats, freed: Floats) -> _Choices:
    """Return the choices of a layer that no other beats in all."""
    at = np.flatnonzero(allowed)
    at = at[pareto_rows(np.stack([memory[at], transient[at], -freed[at]], axis=1))]
    return _Choices(strategy=at, memory=memory[at], transient=transient[at], freed=freed[at])


def _put_before(layer: _Choices, later: _Labels, highest: float) -> _Labels:
    """Return the labels with a layer before them; what is before it adds up to `highest` for a moment."""
    peak = layer.memory[:, None] + np.maximum(later.peak, later.base + layer.transient[:, None])
    base = np.maximum((layer.memory - layer.freed)[:, None] + later.base, peak - highest)
    order = np.lexsort((base.ravel(), peak.ravel()))
    sorted_base = base.ravel()[order]
    keep = np.ones(len(order), bool)
    keep[1:] = sorted_base[1:] < np.minimum.accumulate(sorted_base)[:-1]
    chosen, behind = np.divmod(order[keep], len(later.peak))
    return _Labels(
        peak=peak[chosen, behind],
        base=base[chosen, behind],
        chosen=layer.strategy[chosen],
        behind=behind,
        later=later,
        least=float(peak.ravel()[order[0]]),
    )


def best_cut(over: Floats) -> tuple[int, ...]:
    """Return the boundaries with the least largest overflow."""
    num_stages, size = over.shape[:2]
    worst = np.full((num_stages + 1, size), np.inf)
    worst[num_stages, size - 1] = -np.inf
    following = np.zeros((num_stages, size), np.intp)
    for stage in range(num_stages - 1, -1, -1):
        total = np.maximum(over[stage], worst[stage + 1][None, :])
        following[stage] = total.argmin(axis=1)
        worst[stage] = total.min(axis=1)
    cuts = [0]
    for stage in range(num_stages):
        cuts.append(int(following[stage, cuts[-1]]))
    return tuple(cuts)
