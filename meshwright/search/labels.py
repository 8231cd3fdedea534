"""Exact label arithmetic shared by the solvers: integer scaling, Pareto filters, grouped switch costs.

Floats do not tie: t1 + t2 + t1 != t1 + t1 + t2 leaves duplicates that no dominance removes. Times and bytes become
int64 in the finest decimal unit (femtoseconds where it fits) in which no sum of a plan overflows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_T = TypeVar("_T")

FAR = 1 << 60  # "not allowed"; every real sum stays below LIMIT, so FAR + FAR does not overflow
LIMIT = float(1 << 59)
LARGEST_KEY = 1 << 62
SLACK = 1e-12  # relative; floats bound, integers decide
_FEW = 32
_FEW_STRATEGIES = 32
_MANY_GROUPS, _NEAR = 128, 10_000


def present(value: _T | None) -> _T:
    """Return a value that must be there; its absence is our bug."""
    if value is None:
        raise AssertionError("search: a value that must be there is missing")
    return value


def joined(*parts: _T) -> _T:
    """Return one dataclass of arrays with the rows of several, at least one."""
    names = [one.name for one in fields(cast(Any, parts[0]))]
    return type(parts[0])(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def decimal_scale(largest_sum: float, most_digits: int) -> float:
    """Return the power of ten, at most 10**most_digits, that keeps `largest_sum` below LIMIT."""
    if largest_sum <= 0:
        return 10.0**most_digits
    return 10.0 ** min(most_digits, int(np.floor(np.log10(LIMIT / largest_sum))))


def to_ints(values: NDArray[Any], scale: float) -> Ints:
    """Return round(values * scale), with FAR for infinite ones."""
    finite = np.isfinite(values)
    return np.where(finite, np.rint(np.where(finite, values, 0) * scale), FAR).astype(np.int64)


def pareto(group: NDArray[np.intp], time: Ints, memory: Ints) -> NDArray[np.intp]:
    """Return the labels that no other of their group beats in time and memory, by (group, memory); one of equals."""
    if not len(time):
        return np.zeros(0, np.intp)
    order = np.lexsort((time, memory, group))
    group, rank = group[order], time[order] - time.min()
    keep = _lowest_so_far(group, rank, -1)
    if keep is None:
        keep = present(_lowest_so_far(group, np.unique(rank, return_inverse=True)[1].reshape(-1), -1))
    return order[keep]


def near_best(group: NDArray[np.intp], time: Ints, memory: Ints, slack: int) -> NDArray[np.intp]:
    """Return the labels that no other of their group with no more memory beats by more than `slack`, in their order."""
    if len(time) <= 1:
        return np.arange(len(time))
    order = np.lexsort((time, memory, group))
    group, rank = group[order], time[order] - time.min()
    keep = _lowest_so_far(group, rank, slack)
    if keep is None:
        keep = _lowest_so_far(np.unique(group, return_inverse=True)[1].reshape(-1), rank, slack)
    return np.arange(len(time)) if keep is None else np.sort(order[keep])


def _lowest_so_far(group: NDArray[np.intp], rank: Ints, slack: int) -> NDArray[np.bool_] | None:
    """Return, of labels by rising group, which are within `slack` (-1: below) of the least before them in theirs.

    None: their numbers are too large to tell.
    """
    size, last = int(rank.max()) + 1 + max(0, slack), int(group[-1])
    if size * (last + 1) > LARGEST_KEY:
        return None
    # Later groups get smaller keys, so that the running minimum starts afresh with each group.
    key = (last - group) * size + rank
    keep = np.ones(len(key), bool)
    keep[1:] = key[1:] <= np.minimum.accumulate(key)[:-1] + slack
    return keep


def pareto_rows(values: NDArray[Any], group: NDArray[np.intp] | None = None) -> NDArray[np.intp]:
    """Return the rows of `values` [label, dimension] that no other row of the same group beats or equals."""
    count = len(values)
    groups = np.zeros(count, np.intp) if group is None else group
    keys = tuple(values[:, column] for column in range(values.shape[1] - 1, -1, -1))
    order = np.lexsort((*keys, groups))
    kept: list[NDArray[np.intp]] = []
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, bounds):
        kept.append(members[_staircase(values[members])])
    return np.concatenate(kept) if kept else np.zeros(0, np.intp)


def _staircase(rows: NDArray[Any], block: int = 256) -> NDArray[np.intp]:
    """Return the non-dominated of lexicographically sorted rows; a row can only be beaten by an earlier one.

    Column by column, and not the first: of an earlier row it is never larger.
    """
    columns = np.ascontiguousarray(rows.T[1:] if rows.shape[1] > 1 else rows.T)
    rest = np.arange(len(rows))
    kept: list[NDArray[np.intp]] = []
    while len(rest):
        head, rest = rest[:block], rest[block:]
        head = head[~np.triu(_beats(columns, head, head), 1).any(axis=0)]
        kept.append(head)
        for at in range(0, len(head), _FEW):
            if not len(rest):
                break
            rest = rest[~_beats(columns, head[at : at + _FEW], rest).any(axis=0)]
    return np.concatenate(kept) if kept else np.zeros(0, np.intp)


def _beats(columns: NDArray[Any], one: NDArray[np.intp], two: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return [one, two]: whether the first is not larger in any column."""
    first, *others = columns
    found: NDArray[np.bool_] = first[one][:, None] <= first[two][None, :]
    for column in others:
        found &= column[one][:, None] <= column[two][None, :]
    return found


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch cost [a, b] as a table over groups: equal rows share an exit group, equal columns an entry group.

    A plain one has every strategy as a group of its own, in their order: where there are few, groups save nothing.
    """

    exit_group: NDArray[np.intp]  # [a]
    entry_group: NDArray[np.intp]  # [b]
    cost: Ints  # [exit group, entry group]
    own: Ints  # [a] cost[a, a]

    def leaving(self, values: Floats) -> tuple[Floats, NDArray[np.intp]]:
        """Return the least of `values` [.., a] by exit group, and which strategy has it: [(..,) exit group]."""
        if self.is_plain:
            return values, self.exit_group
        return _least_by(values, self.exit_group, *self._by_exit)

    def entering(self, values: Floats) -> tuple[Floats, NDArray[np.intp]]:
        """Return the least of `values` [.., b] by entry group, and which strategy has it: [(..,) entry group]."""
        if self.is_plain:
            return values, self.entry_group
        return _least_by(values, self.entry_group, *self._by_entry)

    @cached_property
    def is_plain(self) -> bool:
        """Return whether every strategy is a group of its own, numbered alike."""
        at = np.arange(len(self.exit_group))
        return np.array_equal(self.exit_group, at) and np.array_equal(self.entry_group, at)

    def by_exit(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return `values` [.., exit group] by strategy."""
        return values if self.is_plain else values[..., self.exit_group]

    def by_entry(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return `values` [.., entry group] by strategy."""
        return values if self.is_plain else values[..., self.entry_group]

    @cached_property
    def floats(self) -> Floats:
        """The costs, infinite where they are FAR."""
        return np.where(self.cost < FAR, self.cost.astype(float), np.inf)

    @cached_property
    def whole(self) -> Ints:
        """The costs [a, b]."""
        whole: Ints = self.cost[self.exit_group[:, None], self.entry_group]
        return whole

    @cached_property
    def counted(self) -> Ints:
        """The costs [a, b], and one for a change of strategy."""
        return self.whole + (1 - np.eye(*self.whole.shape, dtype=np.int64))

    @cached_property
    def entered_alike(self) -> tuple[NDArray[np.intp], int]:
        """Sets [b] of strategies into which the switch from any other costs about the same; the largest difference."""
        return _alike(self.cost, self.entry_group)

    @cached_property
    def left_alike(self) -> tuple[NDArray[np.intp], int]:
        """Sets [a] of strategies from which the switch to any other costs about the same; the largest difference."""
        return _alike(self.cost.T, self.exit_group)

    def of(self, columns: NDArray[np.intp]) -> Switch:
        """Return the switches between some strategies."""
        if len(columns) <= _FEW_STRATEGIES:
            return plain_switch(self.cost[self.exit_group[columns][:, None], self.entry_group[columns]])
        exits, exit_group = np.unique(self.exit_group[columns], return_inverse=True)
        entries, entry_group = np.unique(self.entry_group[columns], return_inverse=True)
        return Switch(
            exit_group=exit_group,
            entry_group=entry_group,
            cost=self.cost[exits[:, None], entries],
            own=self.own[columns],
        )

    @cached_property
    def _by_exit(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return _sorted_groups(self.exit_group, self.cost.shape[0])

    @cached_property
    def _by_entry(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return _sorted_groups(self.entry_group, self.cost.shape[1])


def _alike(costs: Ints, group: NDArray[np.intp]) -> tuple[NDArray[np.intp], int]:
    """Return a number for each strategy, equal where the columns of `costs` differ little, and twice by how much.

    A set is what lies near its first group; where there are many groups, every group is a set.
    """
    count = costs.shape[1]
    if count > _MANY_GROUPS:
        return group, 0
    near = int(costs[costs < FAR].max(initial=0)) // _NEAR
    of_group = np.full(count, -1, np.intp)
    more = 0
    for first in range(count):
        if of_group[first] < 0:
            apart = np.abs(costs - costs[:, first, None]).max(axis=0)
            members = (apart <= near) & (of_group < 0)
            of_group[members] = first
            more = max(more, 2 * int(apart[members].max()))
    return of_group[group], more


def _sorted_groups(group: NDArray[np.intp], count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return members by group, and where each group starts; an empty group is not allowed."""
    order = np.argsort(group, kind="stable")
    return order, np.searchsorted(group[order], np.arange(count))


def _least_by(
    values: Floats, group: NDArray[np.intp], order: NDArray[np.intp], starts: NDArray[np.intp]
) -> tuple[Floats, NDArray[np.intp]]:
    if len(starts) == len(order):  # every group is one strategy
        return values[..., order], order
    values = values[..., order]
    least: Floats = np.minimum.reduceat(values, starts, axis=-1)
    first = np.where(values == least[..., group[order]], np.arange(len(order)), len(order) - 1)
    return least, order[np.minimum.reduceat(first, starts, axis=-1)]


def plain_switch(cost: Ints) -> Switch:
    """Return `cost` [a, b] with every strategy as a group of its own."""
    at = np.arange(len(cost))
    return Switch(exit_group=at, entry_group=at, cost=cost, own=np.diagonal(cost).copy())


def group_switch(cost: Ints) -> Switch:
    """Group the equal rows and the equal columns of `cost` [a, b], where there are many."""
    if len(cost) <= _FEW_STRATEGIES:
        return plain_switch(cost)
    _, first_row, exit_group = np.unique(cost, axis=0, return_index=True, return_inverse=True)
    _, first_column, entry_group = np.unique(cost, axis=1, return_index=True, return_inverse=True)
    return Switch(
        exit_group=exit_group.reshape(-1),
        entry_group=entry_group.reshape(-1),
        cost=cost[np.ix_(first_row, first_column)],
        own=np.diagonal(cost).copy(),
    )
