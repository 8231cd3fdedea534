"""Which ranges of layers a stage can hold at all, by sums over arrays: before anything is made of them.

With c and d the least forward + backward sums of a range and of all layers after it, a plan takes at
least (bound.py), in 1F1B with k forward passes ahead of the first backward one,

    sum of all before + max(m c, (m - k + 1) c + 2 d) when m > k,     .. + max(m c, c + d) otherwise;

in GPipe sum of all before + m c + d. A range whose least memory is above the stage's budget, or that no
sequence of such ranges completes, is none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.search.bound import Pipe
from meshwright.search.labels import FAR, Ints
from meshwright.search.problem import Exact

Spans = list[list[tuple[int, int]]]


def possible_spans(exact: Exact, pipe: Pipe, limit: int) -> Spans:
    """Return [stage]: the (first layer, end) that may be in a plan that fits and takes less than `limit`."""
    num_stages, num_layers = len(exact.budget), len(exact.forward)
    allowed = exact.forward < FAR
    if not allowed.any(axis=1).all():
        return [[] for _ in range(num_stages)]
    least = np.where(allowed, exact.forward + exact.backward, FAR).min(axis=1)
    possible = np.stack(
        [_within(least, pipe, stage, limit) & _fits(exact, allowed, stage) for stage in range(num_stages)]
    )
    starts, ends = _reached(possible, 0), _reached(possible[::-1].swapaxes(1, 2), num_layers)[::-1]
    kept = possible & starts[:-1, :, None] & ends[1:, None, :]
    return [[(int(start), int(end)) for start, end in zip(*np.nonzero(one), strict=True)] for one in kept]


def _sums(values: Ints) -> Ints:
    """Return the sum of the values before each layer, and of all."""
    return np.concatenate([[0], np.cumsum(values)])


def _within(least: Ints, pipe: Pipe, stage: int, limit: int) -> NDArray[np.bool_]:
    """Return [first layer, end] whether the range may be in a plan below `limit`."""
    before = _sums(least)
    c = before[None, :] - before[:, None]
    down = (before[-1] - before)[None, :]
    m, k = pipe.num_micro_batches, pipe.num_ahead[stage]
    ahead = (m - k + 1) * c + 2 * down if m > k else c + down
    detour = m * c + down if pipe.phased else ahead
    return (before[:, None] + np.maximum(m * c, detour) < limit) & _rising(len(before))


def _fits(exact: Exact, allowed: NDArray[np.bool_], stage: int) -> NDArray[np.bool_]:
    """Return [first layer, end] whether the least memory of the range is within the stage's budget."""
    memory = _sums(np.where(allowed, exact.memory[stage], FAR).min(axis=1))
    extra = int(exact.tied_extra.min(initial=0))
    return memory[None, :] - memory[:, None] <= exact.budget[stage] - extra


def _rising(size: int) -> NDArray[np.bool_]:
    at = np.arange(size)
    return at[:, None] < at[None, :]


def _reached(possible: NDArray[np.bool_], first: int) -> NDArray[np.bool_]:
    """Return [stage + 1, layer]: where the ranges of the stages before can end, starting at `first`."""
    at = np.zeros((len(possible) + 1, possible.shape[1]), bool)
    at[0, first] = True
    for stage, one in enumerate(possible):
        at[stage + 1] = (at[stage][:, None] & one).any(axis=0)
    return at
