"""What a re-layout moves, and over which ranks, without listing who sends what: `spec.mesh.transfer` for a price.

The same answer as `transfer`, on arrays over the ranks of a stage; a stage of thousands of ranks takes
milliseconds. A test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.mesh import Axis, Layout, MeshShape, TransferKind

Ranks = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Kind of a transfer, its units, the most that a rank receives, and the group that touches the most nodes."""

    kind: TransferKind
    num_units: int
    largest_received_units: int = 0
    widest_group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slices:
    """What every rank of a layout holds, in units: `size` of them from `start[rank]` on."""

    start: Ranks
    size: int

    @staticmethod
    def of(layout: Layout, num_units: int) -> _Slices:
        ranks = np.arange(layout.num_ranks)
        index = ranks // layout.tp if layout.inner == "tp" else ranks % layout.dp
        size = num_units // layout.dp
        return _Slices(start=index * size, size=size)


@lru_cache(maxsize=65536)
def movement(source: Layout, target: Layout, devices_per_node: int) -> Movement:
    """Return what turns `source` into `target`: as `transfer` says, for two layouts of as many ranks."""
    num_units = lcm(source.dp, target.dp)
    held, wanted = _Slices.of(source, num_units), _Slices.of(target, num_units)
    if held.size == wanted.size and bool((held.start == wanted.start).all()):
        return Movement(kind="none", num_units=num_units)
    if _lies_in(wanted, held):
        return Movement(kind="slice", num_units=num_units)
    gathers = _gather_groups(held, wanted)
    if gathers is not None:
        return Movement(
            kind="all_gather",
            num_units=num_units,
            largest_received_units=wanted.size - held.size,
            widest_group=widest(gathers, devices_per_node),
        )
    rank, source_rank = _received(held, wanted, num_units)
    return Movement(
        kind="all_to_all",
        num_units=num_units,
        largest_received_units=int(np.bincount(rank).max()),
        widest_group=_widest_component(rank, source_rank, source.num_ranks, devices_per_node),
    )


@lru_cache(maxsize=65536)
def worst_group(mesh: MeshShape, axis: Axis, devices_per_node: int) -> tuple[int, ...]:
    """Return a group of `axis` that touches the most nodes: the one that everybody waits for."""
    names, sizes = zip(*mesh.axes, strict=True)
    ranks = np.arange(mesh.num_ranks).reshape(sizes)
    wanted = [names.index(name) for name in (("dp_replicate", "dp_shard") if axis == "dp" else (axis,))]
    groups = np.moveaxis(ranks, wanted, range(-len(wanted), 0))
    return widest(groups.reshape(-1, np.prod([sizes[i] for i in wanted], dtype=int)), devices_per_node)


def widest(groups: Ranks, devices_per_node: int) -> tuple[int, ...]:
    """Return the row of [group, member] that touches the most nodes; of several the one with the lowest rank."""
    nodes = np.sort(groups // devices_per_node, axis=1)
    touched = 1 + (np.diff(nodes, axis=1) != 0).sum(axis=1)
    best = np.lexsort((groups.min(axis=1), -touched))[0]
    return tuple(groups[best].tolist())


def _lies_in(inner: _Slices, outer: _Slices) -> bool:
    ends_inside = inner.start + inner.size <= outer.start + outer.size
    return bool(((outer.start <= inner.start) & ends_inside).all())


def _gather_groups(held: _Slices, wanted: _Slices) -> Ranks | None:
    """Return [group, member]: the j-th replicas of the slices that make up what all of them want.

    None when the ranks that want a slice do not hold all of it between them, each part equally often.
    """
    num_ranks, parts = len(held.start), wanted.size // held.size
    if wanted.size % held.size or not _lies_in(held, wanted):
        return None
    num_wanted = len(np.unique(wanted.start))
    if num_ranks % (num_wanted * parts):
        return None
    order = np.lexsort((np.arange(num_ranks), held.start, wanted.start))
    by_slice = order.reshape(num_wanted, parts, -1)  # [wanted slice, part of it, replica], if all are there
    start = held.start[by_slice]
    first = wanted.start[by_slice[:, :1, :1]]
    if not (start == first + held.size * np.arange(parts)[None, :, None]).all():
        return None
    return np.sort(np.swapaxes(by_slice, 1, 2).reshape(-1, parts), axis=1)


def _received(held: _Slices, wanted: _Slices, num_units: int) -> tuple[Ranks, Ranks]:
    """Return who receives from whom, a pair a unit: holders of a unit serve those who lack it in turn."""
    num_ranks = len(held.start)
    rank = np.repeat(np.arange(num_ranks), wanted.size)
    unit = (wanted.start[:, None] + np.arange(wanted.size)).ravel()
    lacks = (unit < held.start[rank]) | (unit >= held.start[rank] + held.size)
    rank, unit = rank[lacks], unit[lacks]
    order = np.argsort(unit, kind="stable")
    rank, unit = rank[order], unit[order]
    first = np.searchsorted(unit, np.arange(num_units))
    turn = np.arange(len(unit)) - first[unit]
    holders = np.argsort(held.start, kind="stable").reshape(num_units // held.size, -1)  # [slice, replica]
    return rank, holders[unit // held.size, turn % holders.shape[1]]


def _widest_component(one: Ranks, other: Ranks, num_ranks: int, devices_per_node: int) -> tuple[int, ...]:
    """Return the connected ranks that touch the most nodes; of those the largest, with the lowest rank."""
    label: NDArray[Any] = np.arange(num_ranks)
    while True:
        lower = label.copy()
        np.minimum.at(lower, one, label[other])
        np.minimum.at(lower, other, label[one])
        lower = lower[lower]
        if (lower == label).all():
            break
        label = lower
    ranks = np.arange(num_ranks)
    nodes = np.unique(np.stack([label, ranks // devices_per_node]), axis=1)[0]
    touched, members = np.bincount(nodes, minlength=num_ranks), np.bincount(label, minlength=num_ranks)
    best = np.lexsort((ranks, -members, -touched))[0]
    return tuple(np.flatnonzero(label == best).tolist())
