"""Which ranks form which group, and who sends which samples to whom between two layouts.

A stage holds n ranks, numbered 0 .. n-1 inside it; stage i's are the global ranks i*n .. i*n+n-1.
A layout (tp, inner) gives every rank of the stage a dp index (which slice of the micro-batch it
holds) and a tp index (which slice of the weights). These are plain data: the cost model prices
them, the runtime executes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Literal

from meshwright.spec.base import divide
from meshwright.spec.strategy import Inner, Strategy

Axis = Literal["tp", "dp", "dp_shard", "dp_replicate"]
TransferKind = Literal["none", "slice", "all_gather", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The ranks of one stage under one strategy's degrees."""

    tp: int
    dp_replicate: int
    dp_shard: int
    inner: Inner

    @staticmethod
    @lru_cache(maxsize=65536)
    def of(strategy: Strategy) -> MeshShape:
        return MeshShape(
            tp=strategy.tp,
            dp_replicate=strategy.dp_replicate,
            dp_shard=strategy.dp_shard,
            inner=strategy.inner,
        )

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Axis names and sizes, slowest first; dp_shard lies inside dp_replicate."""
        dp_axes = (("dp_replicate", self.dp_replicate), ("dp_shard", self.dp_shard))
        return (*dp_axes, ("tp", self.tp)) if self.inner == "tp" else (("tp", self.tp), *dp_axes)

    def dp_index(self, rank: int) -> int:
        """Return which slice of the micro-batch stage rank `rank` holds."""
        return rank // self.tp if self.inner == "tp" else rank % self.dp

    def tp_index(self, rank: int) -> int:
        """Return which slice of the weights stage rank `rank` holds."""
        return rank % self.tp if self.inner == "tp" else rank // self.dp

    def rank(self, dp_index: int, tp_index: int) -> int:
        """Return the stage rank at these coordinates."""
        return dp_index * self.tp + tp_index if self.inner == "tp" else tp_index * self.dp + dp_index

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the stage ranks, in axis order, that share a group of `axis` with `rank`."""
        dp_index, tp_index = self.dp_index(rank), self.tp_index(rank)
        replica, shard = divmod(dp_index, self.dp_shard)
        if axis == "tp":
            return tuple(self.rank(dp_index, t) for t in range(self.tp))
        if axis == "dp":
            return tuple(self.rank(d, tp_index) for d in range(self.dp))
        if axis == "dp_shard":
            return tuple(self.rank(replica * self.dp_shard + s, tp_index) for s in range(self.dp_shard))
        return tuple(self.rank(r * self.dp_shard + shard, tp_index) for r in range(self.dp_replicate))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups of `axis`: a partition of the stage's ranks."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.num_ranks)))


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How a micro-batch lies on the ranks of a stage: dp slices, each held by tp ranks."""

    tp: int
    dp: int
    inner: Inner

    @staticmethod
    def of(strategy: Strategy) -> Layout:
        return Layout(strategy.tp, strategy.dp, strategy.inner)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    def dp_index(self, rank: int) -> int:
        return rank // self.tp if self.inner == "tp" else rank % self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTransfer:
    """What one rank does in a transfer, in units of micro-batch / `Transfer.num_units` samples.

    `send_units` are positions in the slice that the rank holds, concatenated by receiver in group
    order; `send_splits` and `receive_splits` count units per member of the group; `order` puts the
    received units into sample order.
    """

    group: tuple[int, ...]
    send_units: tuple[int, ...]
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        return len(self.group) == 1 and self.send_units == tuple(range(len(self.send_units)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How a tensor moves from layout `source` to layout `target`.

    none: every rank already holds what it needs. slice: every rank keeps a part of what it holds.
    all_gather: groups exchange all they hold. all_to_all: each rank receives just what it lacks.
    The gradient takes the way back, `transfer(target, source)`: slices are replicated over tp
    ranks in both directions, so nothing is summed.
    """

    kind: TransferKind
    num_units: int
    ranks: tuple[RankTransfer, ...]
    largest_received_units: int

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups that communicate, each in the order of its collective."""
        return tuple(dict.fromkeys(rank.group for rank in self.ranks if len(rank.group) > 1))


@lru_cache(maxsize=4096)
def transfer(source: Layout, target: Layout) -> Transfer:
    """Return who sends which samples to whom to turn `source` into `target`, for any two layouts of a stage."""
    num_ranks = source.num_ranks
    if target.num_ranks != num_ranks:
        raise ValueError(f"layouts of {num_ranks} and {target.num_ranks} ranks cannot be of one stage")
    num_units = lcm(source.dp, target.dp)
    held = [_units(source, rank, num_units) for rank in range(num_ranks)]
    wanted = [_units(target, rank, num_units) for rank in range(num_ranks)]
    if held == wanted:
        ranks = tuple(_local(rank, held[rank], wanted[rank]) for rank in range(num_ranks))
        return Transfer(kind="none", num_units=num_units, ranks=ranks, largest_received_units=0)
    if all(_covers(held[rank], wanted[rank]) for rank in range(num_ranks)):
        ranks = tuple(_local(rank, held[rank], wanted[rank]) for rank in range(num_ranks))
        return Transfer(kind="slice", num_units=num_units, ranks=ranks, largest_received_units=0)
    if gathers := _gather_groups(held, wanted):
        ranks = tuple(_gather(gathers[rank], held) for rank in range(num_ranks))
        largest = max(len(wanted[rank]) - len(held[rank]) for rank in range(num_ranks))
        return Transfer(kind="all_gather", num_units=num_units, ranks=ranks, largest_received_units=largest)
    return _all_to_all(held, wanted, num_units)


def _units(layout: Layout, rank: int, num_units: int) -> range:
    size = divide(num_units, layout.dp, "units over dp")
    start = layout.dp_index(rank) * size
    return range(start, start + size)


def _covers(held: range, wanted: range) -> bool:
    return held.start <= wanted.start and wanted.stop <= held.stop


def _local(rank: int, held: range, wanted: range) -> RankTransfer:
    units = tuple(unit - held.start for unit in wanted)
    count = (len(units),)
    return RankTransfer(
        group=(rank,), send_units=units, send_splits=count, receive_splits=count, order=tuple(range(len(units)))
    )


def _gather_groups(held: list[range], wanted: list[range]) -> dict[int, tuple[int, ...]] | None:
    """Return for each rank the ranks, in sample order, whose slices make up exactly what all of them want.

    None when there is no such grouping. Ranks that want the same slice and hold the same slice are
    replicas; the j-th replica of every held slice form a group.
    """
    groups: dict[int, tuple[int, ...]] = {}
    for want in dict.fromkeys(wanted):
        replicas: dict[range, list[int]] = {}
        for rank in (rank for rank, other in enumerate(wanted) if other == want):
            replicas.setdefault(held[rank], []).append(rank)
        slices = sorted(replicas, key=lambda units: units.start)
        covered = [unit for units in slices for unit in units]
        if covered != list(want) or len({len(ranks) for ranks in replicas.values()}) > 1:
            return None
        for group in zip(*(replicas[units] for units in slices), strict=True):
            groups.update(dict.fromkeys(group, group))
    return groups


def _gather(group: tuple[int, ...], held: list[range]) -> RankTransfer:
    size = len(held[group[0]])
    # A process group numbers its members by rank, so what arrives may need sorting into sample order.
    members = tuple(sorted(group))
    place = {rank: position for position, rank in enumerate(members)}
    order = tuple(place[rank] * size + unit for rank in group for unit in range(size))
    return RankTransfer(
        group=members,
        send_units=tuple(range(size)),
        send_splits=(size,) * len(group),
        receive_splits=(size,) * len(group),
        order=order,
    )


def _all_to_all(held: list[range], wanted: list[range], num_units: int) -> Transfer:
    sources = _choose_sources(held, wanted, num_units)
    components = _components(sources)
    ranks: list[RankTransfer] = []
    for rank, want in enumerate(wanted):
        group = components[rank]
        sends = [[unit for unit in wanted[peer] if sources[peer][unit] == rank] for peer in group]
        received = [[unit for unit in want if sources[rank][unit] == peer] for peer in group]
        arrived = [unit for units in received for unit in units]
        ranks.append(
            RankTransfer(
                group=group,
                send_units=tuple(unit - held[rank].start for units in sends for unit in units),
                send_splits=tuple(len(units) for units in sends),
                receive_splits=tuple(len(units) for units in received),
                order=tuple(arrived.index(unit) for unit in want),
            )
        )
    largest = max(sum(source != rank for source in sources[rank].values()) for rank in range(len(held)))
    return Transfer(kind="all_to_all", num_units=num_units, ranks=tuple(ranks), largest_received_units=largest)


def _choose_sources(held: list[range], wanted: list[range], num_units: int) -> list[dict[int, int]]:
    """Return for each rank {unit: the rank it comes from}: itself where it can, else holders in turn."""
    holders: list[list[int]] = [[] for _ in range(num_units)]
    for rank, units in enumerate(held):
        for unit in units:
            holders[unit].append(rank)
    turn = [0] * num_units
    sources: list[dict[int, int]] = []
    for rank, units in enumerate(wanted):
        chosen: dict[int, int] = {}
        for unit in units:
            if unit in held[rank]:
                chosen[unit] = rank
            else:
                chosen[unit] = holders[unit][turn[unit] % len(holders[unit])]
                turn[unit] += 1
        sources.append(chosen)
    return sources


def _components(sources: list[dict[int, int]]) -> list[tuple[int, ...]]:
    """Return for each rank the sorted ranks that it must share a collective with."""
    parent = list(range(len(sources)))

    def find(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for rank, chosen in enumerate(sources):
        for source in chosen.values():
            parent[find(rank)] = find(source)
    members: dict[int, list[int]] = {}
    for rank in range(len(sources)):
        members.setdefault(find(rank), []).append(rank)
    return [tuple(members[find(rank)]) for rank in range(len(sources))]
