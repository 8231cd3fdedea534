"""Reference to beat: the label program that found the optima of the shared instances, written again in numpy.

It is written from its description beside the instances, not from its text, so that it can be timed on the same machine:
labels (time, memory) that nothing beats, by layer and last strategy, in integers (1e-15 s, 1e-9 MB) so that equal sums
tie; labels that Lagrangian bounds keep from ending below a threshold are dropped. The bounds come from two passes over
the layers, each for several multipliers of memory at once. The threshold is 0.03 % above the bound and its distance
grows fourfold until a plan is found, or comes near the best plan in hand: begun as one plan of those passes, ended as
another.
Whole pipelines: the least time of every range of layers on every stage by the same labels, without bounds, and the cut
by labels (sum, largest) of the stages' times. Nothing of the package is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_TICKS_PER_S, _TICKS_PER_MB = 1e15, 1e9
_FAR = 1 << 60
_COARSE = 4.0 ** np.arange(-5.0, 6.0)
_FINE = 8  # multipliers between the two coarse ones around the best
_SLACK = 1e-9  # relative; bounds are floats
_FIRST_GAP, _WIDER = 3e-4, 4.0  # the threshold above the bound, and how it grows until a plan lies below


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """Labels of one layer, by strategy and rising memory; `before` is the label of the layer before."""

    strategy: NDArray[np.intp]
    time: Ints
    memory: Ints
    before: NDArray[np.intp]


def solve(layer_s: Floats, layer_mb: Floats, switch_s: Floats, budget_mb: float) -> tuple[float, list[int] | None]:
    """Return (seconds, strategies) of the best plan within the budget, or (inf, None)."""
    budget = int(np.rint(budget_mb * _TICKS_PER_MB))
    time, memory, switch = (
        _ticks(layer_s, _TICKS_PER_S),
        _ticks(layer_mb, _TICKS_PER_MB),
        _ticks(switch_s, _TICKS_PER_S),
    )
    if memory.min(axis=1).sum() > budget:
        return np.inf, None
    bounds = _Bounds(time, memory, switch, budget)
    gap = _FIRST_GAP
    while True:
        threshold = bounds.lower * (1 + gap)
        if bounds.upper < bounds.lower * (1 + 2 * gap):  # the plan in hand: no further pass
            threshold = bounds.upper
        layers = _all_labels(time, memory, switch, bounds, threshold)
        if layers[-1].time.min(initial=_FAR) <= threshold:
            return _read(layers)
        if threshold == bounds.upper:
            return np.inf, None
        gap *= _WIDER


def _all_labels(time: Ints, memory: Ints, switch: Ints, bounds: _Bounds, threshold: float) -> list[_Labels]:
    """Return the labels of every layer that a plan within budget and threshold may begin with."""
    most = bounds.most(threshold)
    layers = [_unbeaten(_kept(_first(time[0], memory[0]), bounds, most, 0))]
    for layer in range(1, len(time)):
        reached = _reached(layers[-1], time[layer], memory[layer], switch[layer])
        layers.append(_unbeaten(_kept(reached, bounds, most, layer)))
    return layers


def _read(layers: list[_Labels]) -> tuple[float, list[int]]:
    at = int(layers[-1].time.argmin())
    seconds, plan = float(layers[-1].time[at]) / _TICKS_PER_S, list[int]()
    for labels in reversed(layers):
        plan.append(int(labels.strategy[at]))
        at = int(labels.before[at])
    return seconds, plan[::-1]


def solve_pipeline(data: dict[str, Any]) -> float:
    """Return the least sum C + (m - 1) max C over all cuts and strategies, or inf; `data` is a whole-pipeline file."""
    time, switch = _ticks(data["time_s"], _TICKS_PER_S), _ticks(data["switch_s"], _TICKS_PER_S)
    num_layers, micro_batches = len(time), int(data["n_microbatches"])
    ways: dict[int, list[tuple[int, int]]] = {0: [(0, 0)]}  # [layers so far] (sum, largest) of the stages' times
    for held, budget_mb in zip(data["inflight"].tolist(), data["budget_mb"].tolist(), strict=True):
        memory = _ticks(data["state_mb"] + held * data["act_mb"], _TICKS_PER_MB)
        budget, longer = int(np.rint(budget_mb * _TICKS_PER_MB)), dict[int, list[tuple[int, int]]]()
        for start, known in ways.items():
            for end, least in _ranges(time, memory, switch, budget, start):
                longer.setdefault(end, []).extend((total + least, max(largest, least)) for total, largest in known)
        ways = {end: _staircase(found) for end, found in longer.items()}
    totals = [total + (micro_batches - 1) * largest for total, largest in ways.get(num_layers, [])]
    return min(totals) / _TICKS_PER_S if totals else np.inf


def _ranges(time: Ints, memory: Ints, switch: Ints, budget: int, start: int) -> list[tuple[int, int]]:
    """Return (end, least time) of the ranges from layer `start` on in which something fits."""
    found: list[tuple[int, int]] = []
    labels: _Labels | None = None
    for layer in range(start, len(time)):
        here = time[layer], memory[layer]
        labels = _first(*here) if labels is None else _reached(labels, *here, switch[layer])
        labels = _unbeaten(_taken(labels, np.flatnonzero(labels.memory <= budget)))
        if not len(labels.time):
            break
        found.append((layer + 1, int(labels.time.min())))
    return found


def _staircase(ways: list[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for total, largest in sorted(ways):
        if not kept or largest < kept[-1][1]:
            kept.append((total, largest))
    return kept


def _ticks(values: Floats, scale: float) -> Ints:
    return np.where(np.isfinite(values), np.rint(np.where(np.isfinite(values), values, 0) * scale), _FAR).astype(
        np.int64
    )


def _first(time: Ints, memory: Ints) -> _Labels:
    strategy = np.flatnonzero((time < _FAR) & (memory < _FAR))
    none = np.full(len(strategy), -1, np.intp)
    return _Labels(strategy=strategy, time=time[strategy], memory=memory[strategy], before=none)


def _reached(labels: _Labels, time: Ints, memory: Ints, switch: Ints) -> _Labels:
    """Put every strategy of the next layer behind every label."""
    here = np.flatnonzero((time < _FAR) & (memory < _FAR))
    count = len(labels.time)
    total = labels.time + switch.T[here[:, None], labels.strategy] + time[here, None]
    used = labels.memory + memory[here, None]
    return _Labels(
        strategy=np.repeat(here, count),
        time=total.ravel(),
        memory=used.ravel(),
        before=np.tile(np.arange(count), len(here)),
    )


def _kept(labels: _Labels, bounds: _Bounds, most: Floats, layer: int) -> _Labels:
    """Drop what cannot be completed within the budget and the threshold."""
    keep = labels.memory + bounds.least_memory[layer][labels.strategy] <= bounds.budget
    for number, multiplier in enumerate(bounds.multipliers):
        keep &= labels.time + multiplier * labels.memory <= most[number, layer][labels.strategy]
    return _taken(labels, np.flatnonzero(keep))


def _unbeaten(labels: _Labels) -> _Labels:
    """Keep the labels that no other with their last strategy beats in time and memory."""
    order = np.lexsort((labels.time, labels.memory, labels.strategy))
    strategy, time = labels.strategy[order], labels.time[order]
    if not len(order):
        return labels
    # Later strategies count less, so that the running minimum starts afresh with each.
    key = (strategy[-1] - strategy) * (int(time.max()) + 1) + time
    keep = np.ones(len(order), bool)
    keep[1:] = key[1:] < np.minimum.accumulate(key)[:-1]
    return _taken(labels, order[keep])


def _taken(labels: _Labels, at: NDArray[np.intp]) -> _Labels:
    return _Labels(
        strategy=labels.strategy[at], time=labels.time[at], memory=labels.memory[at], before=labels.before[at]
    )


def _around(multipliers: Floats, best: int) -> Floats:
    """Return multipliers between the neighbours of the best one."""
    low, high = multipliers[max(0, best - 1)], multipliers[min(best + 1, len(multipliers) - 1)]
    return np.unique(np.append(np.linspace(low, high, _FINE), multipliers[best]))


class _Bounds:
    """What a label may need at most, by Lagrangian relaxation, and the plan in hand."""

    def __init__(self, time: Ints, memory: Ints, switch: Ints, budget: int) -> None:
        self.budget, self.upper = budget, float(_FAR)
        self._parts = (time.astype(float), memory.astype(float), switch.astype(float))
        coarse = np.concatenate([[0.0], self._scale() * _COARSE])
        value, _ = self._after(coarse)
        best = int((value - coarse * budget).argmax())
        fine = _around(coarse, best)
        value, rest = self._after(fine)
        best = int((value - fine * budget).argmax())
        fine = _around(fine, best)
        value, rest = self._after(fine)
        best = int((value - fine * budget).argmax())
        kept = sorted({max(0, best - 1), best, min(best + 1, len(fine) - 1)})
        self.multipliers = fine[kept]
        self.lower, self._rest = float((value - fine * budget).max()), rest[kept]
        least = memory.min(axis=1)
        self.least_memory = np.repeat((least[::-1].cumsum()[::-1] - least)[:, None], memory.shape[1], axis=1)

    def most(self, threshold: float) -> Floats:
        """Return [multiplier, layer, strategy]: what time + multiplier * memory of a label may be at most."""
        room = threshold * (1 + _SLACK) + 1 + self.multipliers * self.budget * (1 + _SLACK)
        most: Floats = room[:, None, None] - self._rest
        return most

    def _scale(self) -> float:
        """Return the time for memory that the layers trade on the whole."""
        time, memory, _ = self._parts
        rows = np.arange(len(time))
        fast, lean = time.argmin(axis=1), memory.argmin(axis=1)
        slower, less = (time[rows, lean] - time[rows, fast]).sum(), (memory[rows, fast] - memory[rows, lean]).sum()
        return float(slower / less) if slower > 0 and less > 0 else 1.0

    def _after(self, multipliers: Floats) -> tuple[Floats, Floats]:
        """Return the least time + multiplier * memory, and of the layers after each choice: [multiplier, layer, ..]."""
        time, memory, switch = self._parts
        cost = time + multipliers[:, None, None] * memory
        rest = np.zeros_like(cost)
        numbers, strategies = np.arange(len(multipliers))[:, None], np.arange(len(time[0]))
        sources: list[NDArray[np.intp]] = []
        for layer in range(len(time) - 2, -1, -1):
            total = (rest[:, layer + 1] + cost[:, layer + 1])[:, None, :] + switch[layer + 1]
            source = total.argmin(axis=2)  # and a look-up: several times faster than another reduction
            sources.append(source)
            rest[:, layer] = total[numbers, strategies, source]
        whole = rest[:, 0] + cost[:, 0]
        # The plans with the least sums: the fastest that fits is the one to beat.
        rows, first = numbers[:, 0], whole.argmin(axis=1)
        plans = [first]
        for source in reversed(sources):
            plans.append(source[rows, plans[-1]])
        self._try_joined(np.stack(plans))
        return whole[rows, first], rest

    def _try_joined(self, plans: NDArray[np.intp]) -> None:
        """Take over the fastest plan that fits of those that begin as one of `plans` [layer, plan] and end as one."""
        time, memory, switch = self._parts
        layers = np.arange(len(time))[:, None]
        none = np.zeros((1, plans.shape[1]))
        inner = np.concatenate([none, switch[layers[1:], plans[:-1], plans[1:]]])
        spent, used = (time[layers, plans] + inner).cumsum(axis=0), memory[layers, plans].cumsum(axis=0)
        turn = switch[layers[1:, :, None], plans[:-1, :, None], plans[1:, None, :]] - inner[1:, None, :]
        total = spent[:-1, :, None] + turn + (spent[-1] - spent[:-1])[:, None, :]
        fits = used[:-1, :, None] + (used[-1] - used[:-1])[:, None, :] <= self.budget
        self.upper = min(self.upper, float(total.min(initial=np.inf, where=fits)))
