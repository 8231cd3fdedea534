"""The least bound over all plans: the recursion of bound.py as dynamic programming over cuts and layouts handed in.

Labels (A, E, L, Lg, D) of the stages i..P-1 stand at (layer where stage i starts, layout handed in); -1 is "any
layout, the cheapest to receive", for what comes before a tail. A label that another one of the same place beats in
all five is dropped; so is one that cannot be completed below the time of a plan in hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.bound import B, C, F, Pipe, first_labels, next_labels
from meshwright.search.labels import FAR, Ints, joined, pareto_rows
from meshwright.search.rows import Cell, Table, options

Cells = list[dict[int, dict[int, Cell]]]  # [stage][start][end]
ANY = -1


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage of a way through the recursion: a row of a cell, or its tail (-1)."""

    cell: Cell
    end: int
    row: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """The plan, or bundle of plans behind tails, with the least bound."""

    value: int
    steps: tuple[Step, ...]  # [stage]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Labels at (stage, start, layout handed in) and how each was made."""

    labels: Ints  # [label, 5]
    end: NDArray[np.intp]
    row: NDArray[np.intp]
    exit: NDArray[np.intp]
    later: NDArray[np.intp]  # the label of the next stage at (end, exit)


Places = dict[tuple[int, int], _Place]  # of one stage, at (start, layout handed in)


def floor(cell: Cell, column: int) -> int:
    """Return the least F, B or C (bound.py's column) of a cell, whatever it receives or not less than that."""
    values = cell.rows.values
    least = FAR if cell.tail is None else int(cell.tail[column])
    if len(values):
        known = values[:, 0] + values[:, 1] if column == C else values[:, column]
        least = min(least, int(known.min()))
    return least


def upstream(cells: Cells, column: int) -> list[dict[int, int]]:
    """Return [stage][start]: the least sum over the stages before."""
    sums: list[dict[int, int]] = [{0: 0}]
    for stage, starts in enumerate(cells[:-1]):
        here: dict[int, int] = {}
        for start, ends in starts.items():
            if start in sums[stage]:
                for end, cell in ends.items():
                    here[end] = min(here.get(end, FAR), sums[stage][start] + floor(cell, column))
        sums.append(here)
    return sums


def downstream(cells: Cells, column: int) -> list[dict[int, int]]:
    """Return [stage][start]: the least sum over this stage and those after; [P] for none."""
    num_layers = max((end for ends in cells[-1].values() for end in ends), default=0)
    sums: list[dict[int, int]] = [{num_layers: 0}]
    for starts in reversed(cells):
        here: dict[int, int] = {}
        for start, ends in starts.items():
            rest = [floor(cell, column) + sums[0][end] for end, cell in ends.items() if end in sums[0]]
            if rest:
                here[start] = min(rest)
        sums.insert(0, here)
    return sums


def viable(pipe: Pipe, cells: Cells, limit: int) -> Cells:
    """Drop the cells that no plan below `limit` can hold, and those that no whole plan holds."""
    before, after = upstream(cells, C), downstream(cells, C)
    m = pipe.num_micro_batches
    kept: Cells = []
    for stage, starts in enumerate(cells):
        k = pipe.num_ahead[stage]
        here: dict[int, dict[int, Cell]] = {}
        for start, ends in starts.items():
            if start not in before[stage]:
                continue
            good: dict[int, Cell] = {}
            for end, cell in ends.items():
                if end in after[stage + 1]:
                    c, down = floor(cell, C), after[stage + 1][end]
                    detour = m * c + down if pipe.phased else (m - k + 1) * c + 2 * down if m > k else c + down
                    if before[stage][start] + max(m * c, detour) < limit:
                        good[end] = cell
            if good:
                here[start] = good
        kept.append(here)
    return kept


def least_bound(table: Table, cells: Cells, limit: int, *, tails: bool = True) -> Way | None:
    """Return the way with the least bound below `limit`, or None: every plan of these cells reaches the limit.

    Without `tails` only the rows in hand are combined.
    """
    up_f, up_c = upstream(cells, F), upstream(cells, C)
    places: list[Places] = [{} for _ in range(len(cells) + 1)]
    for stage in range(len(cells) - 1, -1, -1):
        for start, ends in cells[stage].items():
            if start not in up_f[stage]:
                continue
            table.check_time()
            for layout in _handed_in(cells, stage, start):
                place = _place(table, stage, start, ends, layout, places[stage + 1], tails)
                if place is None:
                    continue
                ended = place.labels[:, 3] + up_f[stage][start]
                below = np.flatnonzero(np.maximum(ended, place.labels[:, 2] + up_c[stage][start]) < limit)
                if len(below):
                    places[stage][start, layout] = _select(place, below)
    return _trace(cells, places)


def _handed_in(cells: Cells, stage: int, start: int) -> list[int]:
    """Return the layouts that cells of the stage before hand to `start`."""
    if stage == 0:
        return [ANY]
    layouts: set[int] = set()
    for ends in cells[stage - 1].values():
        if start in ends:
            layouts.update(ends[start].rows.exit.tolist())
            if ends[start].tail is not None:
                layouts.add(ANY)
    return sorted(layouts)


def received_by(table: Table, start: int, layout: int) -> Ints | None:
    """Return [2, layout of layer `start`] of what is received from `layout`, the least of all for ANY."""
    if start == 0:
        return None
    received = table.received(start)
    return received.min(axis=1) if layout == ANY else received[:, layout]


def _place(
    table: Table, stage: int, start: int, ends: dict[int, Cell], layout: int, later: Places, tails: bool
) -> _Place | None:
    """Return all labels of a place, before dominance."""
    received = received_by(table, start, layout)
    parts: list[_Place] = []
    for end, cell in ends.items():
        known = options(table.pipe, cell, received)
        for exit_layout in sorted(set(cell.rows.exit.tolist())) + [ANY] * (tails and cell.tail is not None):
            if exit_layout == ANY:
                rows, these = np.full(len(cell.facets), -1), cell.facets
            else:
                rows = np.flatnonzero(cell.rows.exit == exit_layout)
                these = known[rows]
            if stage == table.last_stage:
                labels, after = first_labels(table.pipe, stage, these), np.zeros(len(rows), np.intp)
            elif (end, exit_layout) in later:
                next_ones = later[end, exit_layout].labels
                after = np.tile(np.arange(len(next_ones)), len(rows))
                rows, these = np.repeat(rows, len(next_ones)), np.repeat(these, len(next_ones), axis=0)
                labels = next_labels(table.pipe, stage, these, next_ones[after])
            else:
                continue
            fill = np.full(len(rows), 0)
            parts.append(_Place(labels=labels, end=fill + end, row=rows, exit=fill + exit_layout, later=after))
    if not parts:
        return None
    return joined(*parts)


def _select(place: _Place, keep: NDArray[np.intp]) -> _Place:
    """Keep some labels, less the dominated ones."""
    keep = keep[pareto_rows(place.labels[keep])]
    return _Place(
        labels=place.labels[keep],
        end=place.end[keep],
        row=place.row[keep],
        exit=place.exit[keep],
        later=place.later[keep],
    )


def _trace(cells: Cells, places: list[Places]) -> Way | None:
    """Follow the best label of stage 0."""
    if (0, ANY) not in places[0]:
        return None
    start, layout = 0, ANY
    label = int(places[0][0, ANY].labels[:, 3].argmin())
    value = int(places[0][0, ANY].labels[label, 3])
    steps: list[Step] = []
    for stage in range(len(cells)):
        place = places[stage][start, layout]
        end = int(place.end[label])
        steps.append(Step(cell=cells[stage][start][end], end=end, row=int(place.row[label])))
        start, layout, label = end, int(place.exit[label]), int(place.later[label])
    return Way(value=value, steps=tuple(steps))


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """All ways below a limit: the stage times of plans, and the cells whose tails other ways need."""

    values: Ints  # [plan, 3, stage] F, B, g
    boundaries: NDArray[np.intp]  # [plan, stage + 1]
    rows: NDArray[np.intp]  # [plan, stage]
    tails: list[Cell]


def all_below(table: Table, cells: Cells, limit: int, cap: int) -> Leaves | None:
    """Return every way with a bound below `limit`, without dominance between ways; None beyond `cap` of them.

    For what the bound cannot decide: rows are not comparable by labels when the simulation decides.
    """
    up_f, up_c = upstream(cells, F), upstream(cells, C)
    num_stages = len(cells)
    later: dict[tuple[int, int], _Ways] = {}
    for stage in range(num_stages - 1, -1, -1):
        here: dict[tuple[int, int], _Ways] = {}
        total = 0
        for start, ends in cells[stage].items():
            if start not in up_f[stage]:
                continue
            table.check_time()
            for layout in _handed_in(cells, stage, start):
                parts = list(_ways(table, stage, start, ends, layout, later))
                if not parts:
                    continue
                ways = joined(*parts)
                ended = ways.labels[:, 3] + up_f[stage][start]
                below = np.maximum(ended, ways.labels[:, 2] + up_c[stage][start]) < limit
                here[start, layout] = _less_tails(ways.take(np.flatnonzero(below)))
                total += len(here[start, layout].labels)
                if total > cap:
                    return None
        later = here
    none = np.zeros((0, num_stages), np.intp)
    nothing = Leaves(values=np.zeros((0, 3, num_stages), np.int64), boundaries=none, rows=none, tails=[])
    whole = later.get((0, ANY))
    return nothing if whole is None else _leaves(cells, whole)


@dataclass(frozen=True, kw_only=True)
class _Ways:
    labels: Ints  # [way, 5]
    values: Ints  # [way, 3, stages so far]
    cuts: NDArray[np.intp]  # [way, stages so far + 1]
    rows: NDArray[np.intp]  # [way, stages so far]

    def take(self, at: NDArray[np.intp]) -> _Ways:
        return _Ways(labels=self.labels[at], values=self.values[at], cuts=self.cuts[at], rows=self.rows[at])


def _less_tails(ways: _Ways) -> _Ways:
    """Drop the ways with tails that another such way of the same place beats: where it cannot be, they cannot.

    A way without tails stands for one plan, and the simulation decides: those all stay.
    """
    has_tail = (ways.rows < 0).any(axis=1)
    open_ways = np.flatnonzero(has_tail)
    kept = [np.flatnonzero(~has_tail), open_ways[pareto_rows(ways.labels[open_ways])]]
    return ways.take(np.concatenate(kept))


def _ways(
    table: Table, stage: int, start: int, ends: dict[int, Cell], layout: int, later: dict[tuple[int, int], _Ways]
) -> Iterator[_Ways]:
    """Put every row and tail of the cells at (stage, start) before the ways of what it hands on."""
    received = received_by(table, start, layout)
    for end, cell in ends.items():
        groups: list[tuple[int, NDArray[np.intp], Ints]] = []
        if len(cell.rows.exit):
            known = options(table.pipe, cell, received)
            for exit_layout in sorted(set(cell.rows.exit.tolist())):
                rows = np.flatnonzero(cell.rows.exit == exit_layout)
                groups.append((exit_layout, rows, known[rows]))
        if cell.tail is not None:
            groups.append((ANY, np.full(len(cell.facets), -1), cell.facets))
        for exit_layout, rows, these in groups:
            if stage == table.last_stage:
                labels = first_labels(table.pipe, stage, these)
                ways = _Ways(
                    labels=labels,
                    values=these[:, [F, B, 3], None],
                    cuts=np.tile([start, end], (len(rows), 1)),
                    rows=rows[:, None],
                )
                yield ways
            elif (end, exit_layout) in later and len(later[end, exit_layout].labels):
                after = later[end, exit_layout]
                count = len(after.labels)
                at = np.tile(np.arange(count), len(rows))
                these = np.repeat(these, count, axis=0)
                rows = np.repeat(rows, count)
                yield _Ways(
                    labels=next_labels(table.pipe, stage, these, after.labels[at]),
                    values=np.concatenate([these[:, [F, B, 3], None], after.values[at]], axis=2),
                    cuts=np.concatenate([np.full((len(rows), 1), start), after.cuts[at]], axis=1),
                    rows=np.concatenate([rows[:, None], after.rows[at]], axis=1),
                )


def _leaves(cells: Cells, whole: _Ways) -> Leaves:
    open_ways = (whole.rows < 0).any(axis=1)
    tails: dict[int, Cell] = {}
    for cuts, rows in zip(whole.cuts[open_ways].tolist(), whole.rows[open_ways].tolist(), strict=True):
        for stage, row in enumerate(rows):
            if row < 0:
                cell = cells[stage][cuts[stage]][cuts[stage + 1]]
                tails[id(cell)] = cell
    done = np.flatnonzero(~open_ways)
    return Leaves(
        values=whole.values[done], boundaries=whole.cuts[done], rows=whole.rows[done], tails=list(tails.values())
    )
