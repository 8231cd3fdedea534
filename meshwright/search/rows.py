"""What one stage can cost over one range of layers: floors, the exact cheapest choice, and all choices up to a key.

A cell is (stage, first layer, end). Its *rows* are the (F, B, g) of choices that fit the stage's budget, with the
layouts of the first and the last layer; a row that another of the same layouts beats in all three is dropped. F and B
hold what the stage pays whatever comes before it (inner switches, the send to the next stage); what it receives
depends on the layout handed in and is added by the recursion. Rows are made in the order of a *key*, a weighted sum of
F + B and g: first none, then all up to some key, in the end all. What is missing stands as one *tail* of floors:

    floor(w) = max over lam of (min over choices of w . (F, B, g) + lam * memory) - lam * budget

with the budget less the least that transients can add (peaks.py).

Keys and floors include the cheapest that can be received, so that they hold for any layout handed in.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.search.bound import H0, H1, H2, B, C, F, G, Pipe, exact_values, slopes
from meshwright.search.enumeration import Rows, Span, TooManyLabels, empty_rows, rows_below
from meshwright.search.labels import FAR, SLACK, Floats, Ints, Switch, joined, present
from meshwright.search.layers import Hint, OutOfTime, solve_fitting
from meshwright.search.problem import Exact
from meshwright.search.relaxation import LayerProblem, peaks_of, plan_sums, seen

_FACETS = 8
_FEW_PLANS = 20_000  # so many choices are enumerated at once
_WIDER, _WIDEST = 8, 8  # times the caps: the next ones, and the last
_GROWTH, _SHRUNK = 4, 1 / 8  # of the steps by which a tail is raised: the next one, and instead of one that is too far
_GRID = np.concatenate([[0.0], 2.0 ** np.arange(-6, 5.0)])  # multipliers, in units of time spread / memory spread


@dataclass(kw_only=True)
class Cell:
    """What is known of one (stage, range); changes as the search asks for more."""

    stage: int
    start: int
    end: int
    key: int  # C, H1 or H2: the column by which rows are made
    key_weights: tuple[int, int]  # its weights of F + B and of g
    tail: Ints | None  # [7] floors of what is not in rows (bound.py's columns); None: nothing is missing
    facets: Ints  # [facet, 7] the tail in slices of C
    supports: dict[int, int] = field(default_factory=dict[int, int])  # weight: exact least weight * C + g
    rows: Rows
    extra: Rows  # choices found on the way, whatever their key
    solved: bool = False  # the floor of the key is exact
    stuck: bool = False  # deepening hit the cap
    reach: int = 0  # rows hold every choice with a key up to this
    plan: NDArray[np.intp] | None = None  # the choice with the least key
    problem: LayerProblem | None = None
    cheapest: dict[tuple[int, ...], NDArray[np.intp] | None] = field(default_factory=dict[tuple[int, ...], Any])
    step_factor: float = field(default=5e-4)
    step_growth: int = field(default=_GROWTH)


class Table:
    """The cells of one problem, made when asked for; equal ranges share a cell."""

    def __init__(self, exact: Exact, pipe: Pipe, deadline: float, last_moment: float = math.inf) -> None:
        """Start without cells; no rows are made after `deadline`.

        OutOfTime is raised when a cell is to be made or settled after the `last_moment`.
        """
        self.exact, self.pipe, self.deadline, self.last_moment = exact, pipe, deadline, last_moment
        self.room, self.is_capped = 1, False  # times the caps; whether one of them has ended something
        self._cells: dict[tuple[int, ...], Cell | None] = {}
        self._chains: dict[tuple[int, ...], Floats] = {}
        self._links: dict[tuple[int, int, int, bool], Floats] = {}
        self._weighted_moves: dict[tuple[int, int], Floats] = {}
        self._moments: dict[tuple[int, int], tuple[int, int]] = {}
        self._grids: dict[int, Floats] = {}
        self._hints: dict[tuple[int, int], Hint] = {}  # [stage, number of layers]
        problem = exact.source
        self.last_layer, self.last_stage = problem.num_layers - 1, problem.num_stages - 1
        self.switches = tuple(self._switch_tables())

    def cell(self, stage: int, start: int, end: int, tied: int) -> Cell | None:
        """Return the cell, or None when nothing fits; `tied` is the strategy of first and last layer (-1: free)."""
        touches = start == 0 or end == self.last_layer + 1
        classes, tied = self.exact.layer_class, tied if touches else -1
        # What is received and sent depends on the neighbouring layers too.
        around = (classes[start - 1] if start else -1, classes[end] if end <= self.last_layer else -1)
        key = (stage, tied, *around, *classes[start:end])
        if key not in self._cells:
            self._cells[key] = self._make(stage, start, end, tied, (stage, tied, *classes[start:end]))
        return self._cells[key]

    def allowed(self, layer: int, tied: int) -> NDArray[np.bool_]:
        """Return the strategies of a layer; first and last follow `tied`."""
        allowed = self.exact.forward[layer] < FAR
        if tied >= 0 and layer in (0, self.last_layer):
            allowed = allowed & (np.arange(len(allowed)) == tied)
        return allowed

    def _least_moment(self, start: int, end: int, tied: int) -> int:
        """Return what the largest transient of a range, less what is freed, is at least; FAR when nothing can run."""
        least = -FAR
        for layer in range(start, end):
            key = layer, tied if layer in (0, self.last_layer) else -1
            if key not in self._moments:
                allowed = self.allowed(*key)
                transient, freed = self.exact.transient[layer, allowed], self.exact.freed[layer, allowed]
                self._moments[key] = int(transient.min(initial=FAR)), int(freed.max(initial=0))
            transient, freed = self._moments[key]
            if transient >= FAR:
                return FAR
            least = max(least - freed, transient)
        return least

    def once(self, stage: int, tied: int) -> int:
        """Return the stage's constant once-a-step time."""
        extra = 0
        if stage in (0, self.last_stage):
            extra = int(self.exact.tied_step[tied]) if tied >= 0 else int(self.exact.tied_step.min())
        return self.exact.stage_step[stage] + extra

    def budget(self, stage: int, tied: int) -> int:
        """Return the stage's budget, less what a weight tied on one stage adds."""
        extra = self.exact.tied_extra
        return self.exact.budget[stage] - int(extra[tied] if tied >= 0 else extra.min())

    def received(self, start: int) -> Ints:
        """Return [2, layout handed in, layout of layer `start`]: what the receiver pays."""
        exact = self.exact
        return exact.border[:, start - 1][:, :, None] + exact.enter[:, start]

    def _cheapest_received(self, start: int) -> Ints:
        """Return [layout of layer `start`] what the receiver pays at least, forward and backward."""
        return self.received(start).sum(axis=0).min(axis=0) if start else np.zeros(self.exact.num_layouts, np.int64)

    @property
    def can_widen(self) -> bool:
        """Return whether larger caps may be tried."""
        return self.room < _WIDEST

    def resume(self, deadline: float, last_moment: float) -> None:
        """Go on later, with larger caps where one of them was in the way."""
        self.deadline, self.last_moment = deadline, last_moment
        if self.is_capped and self.can_widen:
            self.room *= _WIDER
        self.is_capped = False
        for cell in self._cells.values():
            if cell is not None and cell.stuck:
                cell.stuck, cell.step_growth = False, _GROWTH

    def drop(self, cell: Cell) -> None:
        """Forget a cell of which nothing fits after all."""
        for key, known in self._cells.items():
            if known is cell:
                self._cells[key] = None

    def _switch_tables(self) -> list[tuple[Switch, Switch]]:
        """Return per layer the forward and backward switch as grouped tables."""
        exact, layout = self.exact, self.exact.layout
        made: dict[bytes, tuple[Switch, Switch]] = {}
        tables: list[tuple[Switch, Switch]] = []
        for layer in range(exact.switch.shape[1]):
            key = exact.switch[:, layer].tobytes()
            if key not in made:
                forward, backward = (
                    Switch(exit_group=layout, entry_group=layout, cost=cost, own=np.diagonal(cost)[layout])
                    for cost in exact.switch[:, layer]
                )
                made[key] = (forward, backward)
            tables.append(made[key])
        return tables

    # Floors: chains of layers from the end of a range, for all weights, multipliers and layouts at once.

    def _weights(self, stage: int) -> Ints:
        """Return [7, 3]: the weights of (F, B, g) of bound.py's columns."""
        sums = [[weight, weight, 1] for weight in slopes(self.pipe, stage)]
        return np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], *sums], np.int64)

    def _grid(self, stage: int) -> Floats:
        """Return multipliers [7, lam] in time per byte, around what a layer's choices trade."""
        if stage not in self._grids:
            exact = self.exact
            parts = np.stack([exact.forward, exact.backward, exact.step]).astype(float)
            allowed = exact.forward < FAR
            spread_time = np.zeros(7)
            spread_memory = 0.0
            counts = Counter(exact.layer_class)
            for layer in map(exact.layer_class.index, counts):
                chosen = self._weights(stage).astype(float) @ parts[:, layer, allowed[layer]]
                memory = exact.memory[stage][layer, allowed[layer]].astype(float)
                if memory.size:
                    count = counts[exact.layer_class[layer]]
                    spread_time += count * (np.median(chosen, axis=1) - chosen.min(axis=1))
                    spread_memory += count * float(np.median(memory) - memory.min())
            self._grids[stage] = spread_time[:, None] / max(spread_memory, 1.0) * _GRID[None, :]
        return self._grids[stage]

    def _chain(self, stage: int, start: int, end: int, tied: int, key: tuple[int, ...]) -> Floats:
        """Return [7, lam + 1, layout of layer start]: least weighted sums of layers start..end-1.

        The last column along lam is the least memory. Shorter chains are made first and shared.
        """
        classes = key[2:]
        last_tied = tied if end == self.last_layer + 1 else -1
        first = start
        keys = {start: key}
        while keys[first] not in self._chains and first < end - 1:
            first += 1
            keys[first] = (stage, last_tied, *classes[first - start :])
        if keys[first] not in self._chains:
            self._chains[keys[first]] = self._link(stage, first, tied if first == start else last_tied, is_last=True)
        for layer in range(first - 1, start - 1, -1):
            link = self._link(stage, layer, tied if layer == start else last_tied, is_last=False)
            moved = self._moves(stage, layer + 1) + self._chains[keys[layer + 1]][:, :, None, :]
            self._chains[keys[layer]] = link + moved.min(axis=3)
        return self._chains[key]

    def _link(self, stage: int, layer: int, tied: int, *, is_last: bool) -> Floats:
        """Return a chain of one layer; the last one of a stage also sends."""
        exact = self.exact
        key = (stage, exact.layer_class[layer], tied if layer in (0, self.last_layer) else -1, is_last)
        if key not in self._links:
            weights, allowed = self._weights(stage).astype(float), self.allowed(layer, tied)
            parts = np.stack([exact.forward[layer], exact.backward[layer], exact.step[layer]]).astype(float)
            memory = exact.memory[stage][layer].astype(float)
            cost = (weights @ parts)[:, None, :] + self._grid(stage)[:, :, None] * memory
            if is_last and stage < self.last_stage:
                cost += (weights[:, :2] @ exact.border[:, layer].astype(float))[:, None, exact.layout]
            cost = np.concatenate([cost, np.broadcast_to(memory, (7, 1, len(memory)))], axis=1)
            cost[:, :, ~allowed] = np.inf
            chain = np.full((len(cost), cost.shape[1], exact.num_layouts), np.inf)
            for layout in np.unique(exact.layout[allowed]):
                chain[:, :, layout] = cost[:, :, allowed & (exact.layout == layout)].min(axis=2)
            self._links[key] = chain
        return self._links[key]

    def _moves(self, stage: int, layer: int) -> Floats:
        """Return [7, lam + 1, layout before, layout of `layer`]: weighted switches; none of memory."""
        key = (stage, self.exact.layer_class[layer])
        if key not in self._weighted_moves:
            weights = self._weights(stage).astype(float)
            moves = np.tensordot(weights[:, :2], self.exact.switch[:, layer].astype(float), 1)[:, None]
            moves = np.concatenate([np.repeat(moves, len(_GRID), axis=1), np.zeros_like(moves)], axis=1)
            self._weighted_moves[key] = moves
        return self._weighted_moves[key]

    def check_time(self) -> None:
        """Raise OutOfTime after the last moment."""
        if time.perf_counter() > self.last_moment:
            raise OutOfTime

    def _make(self, stage: int, start: int, end: int, tied: int, chain_key: tuple[int, ...]) -> Cell | None:
        self.check_time()
        chain = self._chain(stage, start, end, tied, chain_key)
        weights, largest = self._weights(stage), self._least_moment(start, end, tied)
        if largest >= FAR:
            return None
        room = self.budget(stage, tied) - largest
        if chain[0, -1].min() > room + SLACK * abs(room):
            return None
        sums = chain[:, :-1]
        if start > 0:
            cheapest = self.received(start).min(axis=1).astype(float)  # [2, layout]
            sums = sums + (weights[:, :2] @ cheapest)[:, None, :]
        floors = (sums.min(axis=2) - self._grid(stage) * float(room)).max(axis=1)
        tail = np.floor(floors - np.abs(floors) * SLACK).astype(np.int64) + weights[:, 2] * self.once(stage, tied)
        tail[C] = max(int(tail[C]), int(tail[F] + tail[B]))
        _raise_columns(self.pipe, stage, tail)
        key = C if stage else H1
        return Cell(
            stage=stage,
            start=start,
            end=end,
            key=key,
            key_weights=self._key_weights(stage, key),
            tail=tail,
            facets=facets_of(self.pipe, stage, tail, {}),
            rows=empty_rows(end - start),
            extra=empty_rows(end - start),
        )

    # Exact choices.

    def layer_problem(
        self, cell: Cell, tied: int, weights: tuple[int, int], before: int = -1, after: int = -1
    ) -> LayerProblem:
        """Return the cell as a one-stage problem: least weights . (F + B, g).

        With the layouts `before` and `after` of its neighbours, what is received and what the next stage receives from
        this one count fully; without, the cheapest that can be received.
        """
        exact, span = self.exact, slice(cell.start, cell.end)
        allowed = np.stack([self.allowed(layer, tied) for layer in range(cell.start, cell.end)])
        parts = [np.where(allowed, part[span], 0) for part in (exact.forward, exact.backward, exact.step)]
        time = weights[0] * (parts[0] + parts[1]) + weights[1] * parts[2]
        if before < 0:
            time[0] += weights[0] * self._cheapest_received(cell.start)[exact.layout]
        else:
            time[0] += weights[0] * self.received(cell.start)[:, before].sum(axis=0)[exact.layout]
        if cell.stage < self.last_stage:
            sent = exact.border[:, cell.end - 1].sum(axis=0)
            if after >= 0:
                sent = sent + self.received(cell.end)[:, :, after].sum(axis=0)
            time[-1] += weights[0] * sent[exact.layout]
        switches = tuple(
            Switch(
                exit_group=exact.layout,
                entry_group=exact.layout,
                cost=weights[0] * (one.cost + two.cost),
                own=weights[0] * (one.own + two.own),
            )
            for one, two in self.switches[span]
        )
        return LayerProblem(
            time=np.where(allowed, time, FAR),
            memory=np.where(allowed, exact.memory[cell.stage][span], FAR),
            switches=switches,
            changes_base=1,
            budget=self.budget(cell.stage, tied),
            deadline=self.last_moment,
        )

    def cheapest(
        self, cell: Cell, tied: int, weights: tuple[int, int], before: int = -1, after: int = -1
    ) -> NDArray[np.intp] | None:
        """Return the cell's best choice by the times of `layer_problem`; equal questions are answered once."""
        key = (*weights, before, after)
        if key not in cell.cheapest:
            problem, span = self.layer_problem(cell, tied, weights, before, after), slice(cell.start, cell.end)
            transient = np.where(problem.time < FAR, self.exact.transient[span], FAR)
            hint = self._hints.setdefault((cell.stage, cell.end - cell.start), Hint())
            cell.cheapest[key] = solve_fitting(problem, transient, self.exact.freed[span], hint=hint)
        return cell.cheapest[key]

    def row_of(self, cell: Cell, plan: NDArray[np.intp], tied: int) -> Ints:
        """Return (F, B, g) of a choice, without what is received."""
        exact, rows = self.exact, np.arange(cell.start, cell.end)
        layouts = exact.layout[plan]
        values = [int(part[rows, plan].sum()) for part in (exact.forward, exact.backward, exact.step)]
        for way in (0, 1):
            values[way] += int(exact.switch[way, rows[1:], layouts[:-1], layouts[1:]].sum())
            if cell.stage < self.last_stage:
                values[way] += int(exact.border[way, cell.end - 1, layouts[-1]])
        values[2] += self.once(cell.stage, tied)
        return np.array(values, np.int64)

    def _key_weights(self, stage: int, key: int) -> tuple[int, int]:
        weights = self._weights(stage)[key]
        return int(weights[0]), int(weights[2])

    def settle(self, cell: Cell, tied: int) -> bool:
        """Make the floor of the cell's key exact and keep its plan; False: nothing fits.

        Once-a-step work of a later stage hides behind the backwards that follow upstream. Where that of the least C
        does not, C alone is the wrong order: the key becomes H1, which weighs g too.
        """
        if not self._settle_key(cell, tied):
            self.drop(cell)
            return False
        if cell.key == C and cell.plan is not None and cell.tail is not None:
            hidden = cell.stage * int(cell.tail[B])
            if int(self.row_of(cell, cell.plan, tied)[2]) - int(cell.tail[G]) > hidden:
                cell.key, cell.key_weights = H1, self._key_weights(cell.stage, H1)
                self._settle_key(cell, tied)
        if cell.key == H1 and cell.plan is not None:
            low = self._support(cell, tied, 1)
            self._hull(cell, tied, self.row_of(cell, cell.plan, tied), low, 3)
            self._raise_tail(cell)
        return True

    def _hull(self, cell: Cell, tied: int, high: Ints, low: Ints, rounds: int) -> None:
        """Find what lies between two choices in C and g: the slope between them is the next weight."""
        gain, price = int(high[2] - low[2]), int(low[0] + low[1] - high[0] - high[1])
        weight = gain // price if price > 0 else 0
        if rounds and 1 < weight <= self.pipe.num_micro_batches and weight not in cell.supports:
            middle = self._support(cell, tied, weight)
            self._hull(cell, tied, high, middle, rounds - 1)
            self._hull(cell, tied, middle, low, rounds - 1)

    def _support(self, cell: Cell, tied: int, weight: int) -> Ints:
        """Find the least weight * C + g exactly; keep its choice as a row and return it."""
        problem = self.layer_problem(cell, tied, (weight, 1))
        plan = present(self.cheapest(cell, tied, (weight, 1)))
        cell.supports[weight] = plan_sums(problem, plan)[0] + self.once(cell.stage, tied)
        self._keep_row(cell, plan, tied)
        return self.row_of(cell, plan, tied)

    def _keep_row(self, cell: Cell, plan: NDArray[np.intp], tied: int) -> None:
        """Add one choice to the rows in hand; the tail still covers it, which does no harm."""
        layouts = self.exact.layout[plan]
        row = Rows(
            values=self.row_of(cell, plan, tied)[None, :], entry=layouts[:1], exit=layouts[-1:], plans=plan[None, :]
        )
        cell.extra = joined(cell.extra, row)
        cell.rows = joined(cell.rows, row)

    def _settle_key(self, cell: Cell, tied: int) -> bool:
        problem = self.layer_problem(cell, tied, cell.key_weights)
        plan = self.cheapest(cell, tied, cell.key_weights)
        if plan is None:
            return False
        cell.plan, cell.solved, cell.problem = plan, True, problem
        self._keep_row(cell, plan, tied)
        cell.reach = plan_sums(problem, plan)[0] + cell.key_weights[1] * self.once(cell.stage, tied) - 1
        self._raise_tail(cell)
        return True

    def deepen(self, cell: Cell, tied: int) -> bool:
        """Add all rows up to a higher key; False (and stuck) when there are too many."""
        allowed = [int(self.allowed(layer, tied).sum()) for layer in range(cell.start, cell.end)]
        few = float(np.prod(np.array(allowed, float))) <= _FEW_PLANS
        for share in (1.0,) if few or cell.step_growth == 1 else (1.0, _SHRUNK):
            step = max(1.0, abs(cell.reach) * cell.step_factor * share)
            limit = FAR if few else int(cell.reach + 1 + step)
            try:
                found, complete = self._rows_below(cell, tied, limit)
            except TooManyLabels:
                continue
            break
        else:
            cell.stuck = True
            self.is_capped |= time.perf_counter() <= self.deadline
            return False
        if share < 1:
            cell.step_factor, cell.step_growth = cell.step_factor * share, 1
        cell.rows = found if few or complete else joined(found, cell.extra)
        cell.step_factor *= cell.step_growth
        if few or complete:
            cell.tail, cell.facets = None, cell.facets[:0]
        else:
            cell.reach = limit
            self._raise_tail(cell)
        return True

    def _raise_tail(self, cell: Cell) -> None:
        """Let the tail start after the key that rows reach."""
        tail = present(cell.tail).copy()
        tail[cell.key] = max(int(tail[cell.key]), cell.reach + 1)
        _raise_columns(self.pipe, cell.stage, tail)
        cell.tail, cell.facets = tail, facets_of(self.pipe, cell.stage, tail, cell.supports)

    def _rows_below(self, cell: Cell, tied: int, limit: int) -> tuple[Rows, bool]:
        """Return the rows with a key <= limit, and whether that are all there are."""
        problem, count = present(cell.problem), cell.end - cell.start
        known = self._hints.get((cell.stage, count), Hint()).weights
        weights = np.eye(count)[-1] if known is None else known
        peaks = peaks_of(problem, self.exact.transient[cell.start : cell.end], self.exact.freed[cell.start : cell.end])
        whole = replace(seen(problem, peaks, weights), peaks=peaks, weights=weights)
        span = Span(
            exact=self.exact,
            start=cell.start,
            end=cell.end,
            is_last=cell.stage == self.last_stage,
            weights=cell.key_weights,
            received=self._cheapest_received(cell.start),
            once=self.once(cell.stage, tied),
        )
        return rows_below(span, whole, limit, room=self.room, deadline=self.deadline)


def options(pipe: Pipe, cell: Cell, received: Ints | None) -> Ints:
    """Return [row, 7] values of the cell's rows; `received` [2, layout of the first layer] is added."""
    forward, backward, step = cell.rows.values.T
    if received is not None:
        forward, backward = forward + received[0, cell.rows.entry], backward + received[1, cell.rows.entry]
    return exact_values(pipe, cell.stage, forward, backward, step)


def facets_of(pipe: Pipe, stage: int, tail: Ints, supports: dict[int, int]) -> Ints:
    """Return the tail in slices of C: no choice has both the least C and the least g.

    With C < c', g is at least H - weight * (c' - 1) for each of the sums H.
    """
    least, columns = int(tail[C]), zip((H1, H2, H0), slopes(pipe, stage), strict=True)
    sums = [*supports.items(), *((weight, int(tail[column])) for column, weight in columns)]
    highest = max((value - int(tail[G])) // weight for weight, value in sums) + 1  # from here g is free
    highest = min(highest, 2 * least)
    if highest - least <= least // 2000:
        return tail[None, :]
    # Quadratic steps: what is near the least matters most.
    cuts = [least + (highest - least) * at * at // _FACETS**2 for at in range(_FACETS + 1)]
    facets: list[Ints] = []
    for low, high in zip(cuts, [*cuts[1:], FAR], strict=True):
        facet = tail.copy()
        facet[C] = low
        if high < FAR:
            facet[G] = max(int(tail[G]), *(value - weight * (high - 1) for weight, value in sums))
        _raise_columns(pipe, stage, facet)
        facets.append(facet)
    return np.stack(facets)


def _raise_columns(pipe: Pipe, stage: int, tail: Ints) -> None:
    """Let the sums in `tail` be at least what the single columns give; changes `tail`."""
    for column, weight in zip((H1, H2, H0), slopes(pipe, stage), strict=True):
        tail[column] = max(int(tail[column]), int(weight * tail[C] + tail[G]))
    k = pipe.num_ahead[stage]
    tail[H2] = max(int(tail[H2]), int(tail[H1] + (k - 1) * tail[C]))
