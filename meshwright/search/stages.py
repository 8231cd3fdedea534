"""Cut layers into pipeline stages and choose their strategies so that the simulated step is shortest.

For fixed P and m (shared notes, sections 2 and 4):
 1. Floors of every (stage, range) give a bound per plan by the recursion of bound.py; its least is found by dynamic
    programming (recursion.py).
 2. The winner's cells are made exact, cheapest choice first, then row by row (rows.py); what is missing stays a tail
    of floors. Every winner also yields a plan, which is improved and simulated: the incumbent.
 3. A winner without a tail whose bound equals its simulated time, or no way below the incumbent, is the proof.
    Where the bound stays below the simulation, all ways below the incumbent are listed and simulated.
Caps and the time limit end this early with the incumbent and the least bound found so far: never more is claimed. What
is known then can be gone on from, with larger caps where one was in the way.

P = 1 costs m (F + B) + g: one number, solved by layers.py. Tied first and last layers: one problem for each strategy
of theirs. The largest integer in hand is far below 2**63 (problem.py scales), so equal means equal.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.search.arrays import problem_of_arrays
from meshwright.search.bound import C, Pipe
from meshwright.search.closed_form import is_closed_form, solve_closed_form
from meshwright.search.labels import FAR, pareto_rows, present
from meshwright.search.layers import OutOfTime
from meshwright.search.near import good_fitting
from meshwright.search.one_stage import Best, Part, Plan, good_one_stage, solve_one_stage
from meshwright.search.problem import Exact, StageChoice, StageProblem, price, to_exact
from meshwright.search.recursion import Cells, Way, all_below, floor, least_bound, viable
from meshwright.search.rows import Cell, Table
from meshwright.search.shortfall import shortfall
from meshwright.search.spans import possible_spans
from meshwright.search.whole import plan_at, plan_of_rows, simulated, stage_times
from meshwright.spec.schedule import ScheduleName

_LIKED_TIES = 3
_GRACE_S = 2.0  # beyond the time limit, while there is no plan
_CLOSING_CAP = 100_000  # ways listed when the bound does not decide
_NEARLY = 20_000  # of the step: what is less is not worth another list


@dataclass(kw_only=True)
class Unfinished:
    """What is known of a problem of which time or a cap has ended the search."""

    table: Table | None = None  # of several stages
    proved: dict[Part, int] = field(default_factory=dict[Part, int])  # of one stage

    @property
    def can_widen(self) -> bool:
        """Return whether a cap was in the way, and the next search has a larger one."""
        return self.table is not None and self.table.is_capped and self.table.can_widen


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A share of all plans: one strategy of the tied layers (-1: not tied) and one partition (None: any)."""

    tied: int
    partition: tuple[int, ...] | None


def solve(  # noqa: PLR0913 arrays by keyword
    *,
    layer_s: ArrayLike,
    states_bytes: ArrayLike,
    act_bytes: ArrayLike,
    in_flight: ArrayLike,
    budget_bytes: ArrayLike,
    num_micro_batches: int,
    backward_s: ArrayLike | None = None,
    step_s: ArrayLike | None = None,
    transient_bytes: ArrayLike | None = None,
    freed_bytes: ArrayLike | None = None,
    switch_s: ArrayLike | None = None,
    switch_backward_s: ArrayLike | None = None,
    border_s: ArrayLike | None = None,
    border_backward_s: ArrayLike | None = None,
    layout: ArrayLike | None = None,
    schedule: ScheduleName = "1f1b",
    tied: bool = False,
    partitions: tuple[tuple[int, ...], ...] | None = None,
    time_limit_s: float = math.inf,
) -> StageChoice | None:
    """Return the best cut into stages with the best strategies, or None when nothing fits.

    `layer_s`, `states_bytes`, `act_bytes` (of one micro-batch), `transient_bytes` (the largest counts), `freed_bytes`
    (gone when earlier layers of the stage need their transients; None: nothing is), `step_s` (once a step) are
    [layer, strategy], inf: not allowed; `in_flight` and `budget_bytes` are [stage] (or one budget for all). `switch_s`
    [(layer,) strategy, strategy]: entry i between the layers i-1 and i of one stage. `border_s`: what the stage that
    receives pays across a border, shaped like `switch_s`; or [(layer,) strategy], or one number: the send of what a
    layer hands on, which both neighbours pay. `layout` [strategy] says which strategies have equal switches and
    borders (default: none); `tied`: first and last layer use one strategy.

    Objective: with `backward_s` the simulated step of the schedule, `layer_s` being the forward pass. Without it the
    closed form sum C + (m - 1) max C + max g over the stages' seconds C and once-a-step seconds g.
    """
    problem = problem_of_arrays(
        forward_s=np.array(layer_s, float),
        backward_s=backward_s,
        step_s=step_s,
        memory=(states_bytes, act_bytes, transient_bytes, freed_bytes),
        switches=(switch_s, switch_backward_s),
        borders=(border_s, border_backward_s),
        stages=(in_flight, budget_bytes),
        layout=layout,
        num_micro_batches=num_micro_batches,
    )
    # All forward passes and then backward ones that take no time end after sum C + (m - 1) max C.
    problem = replace(problem, schedule="gpipe" if backward_s is None else schedule, tied=tied)
    return solve_problem(problem, time_limit_s=time_limit_s, partitions=partitions)


def solve_problem(
    problem: StageProblem, *, time_limit_s: float = 2.0, partitions: tuple[tuple[int, ...], ...] | None = None
) -> StageChoice | None:
    """Return the best plan found and a bound that holds for all plans, or None when nothing fits.

    `partitions` restricts the boundaries (each P + 1 rising layer numbers, 0 first, L last). At least one plan is
    returned when one fits, however small the time limit.
    """
    deadline, unfinished = time.perf_counter() + time_limit_s, Unfinished()
    go_on = partial(solve_below, problem, partitions=partitions, unfinished=unfinished)
    best, _ = go_on(beat_s=None, time_limit_s=time_limit_s)
    while best is not None and best.gap > 0 and unfinished.can_widen and time.perf_counter() < deadline:
        better, bound_s = go_on(beat_s=best.objective_s, time_limit_s=deadline - time.perf_counter())
        lower_s = max(best.lower_bound_s, min(bound_s, best.objective_s))
        best = replace(best, lower_bound_s=lower_s) if better is None else better
    return best


def solve_below(
    problem: StageProblem,
    *,
    beat_s: float | None,
    time_limit_s: float = 2.0,
    partitions: tuple[tuple[int, ...], ...] | None = None,
    unfinished: Unfinished | None = None,
) -> tuple[StageChoice | None, float]:
    """Return the best plan found that is faster than `beat_s` (None: any), and a bound for all plans.

    Much faster than `solve_problem` when there is no such plan: then (None, bound), the bound being `beat_s`
    unless the time limit or a cap came first, or infinite when nothing fits at all. What a call leaves in `unfinished`
    lets another one, of the same problem with a `beat_s` that is no larger, go on from there.
    """
    deadline = time.perf_counter() + time_limit_s
    if problem.num_stages > problem.num_layers:
        return None, math.inf
    unfinished = Unfinished() if unfinished is None else unfinished
    exact = to_exact(problem) if unfinished.table is None else unfinished.table.exact
    base = exact.source.num_layers if problem.num_stages == 1 else 1  # one stage counts changes in the lowest digit
    once = exact.stage_step[0] if problem.num_stages == 1 else 0  # the constant that one stage leaves out
    limit = FAR if beat_s is None else base * (math.floor(beat_s * exact.time_scale) - once)
    best = Best(ticks=limit)
    first_by = deadline if best.is_known else deadline + _GRACE_S
    if problem.num_stages == 1:
        lower = solve_one_stage(exact, best, first_by, unfinished.proved)
    else:
        lower = _closed_form(exact, best) if partitions is None and is_closed_form(exact) else None
        if lower is None:
            lower = _solve_many_stages(exact, partitions, (deadline, first_by), best, unfinished)
    if best.plan is None and beat_s is None and lower < FAR:  # no plan in time, and not known that none fits
        leanest = shortfall(problem, partitions=partitions)
        if leanest is None or max(leanest.over_bytes) > 0:
            return None, math.inf
        choice = price(problem, leanest.boundaries, leanest.strategies)
        bound = min(choice.objective_s, (lower / base + once) / exact.time_scale)
        return replace(choice, lower_bound_s=bound), bound
    if best.plan is None:
        return None, math.inf if lower >= FAR else (lower / base + once) / exact.time_scale
    choice = price(problem, *best.plan)
    proved = lower >= best.ticks
    bound = choice.objective_s if proved else min(choice.objective_s, (lower / base + once) / exact.time_scale)
    return replace(choice, lower_bound_s=bound), bound


def better_plan(problem: StageProblem, known: StageChoice) -> StageChoice | None:
    """Return a plan that is faster than `known`, found by little and always the same work, or None.

    Of several stages it is the most even cut, of which each stage is chosen by itself.
    """
    exact = to_exact(problem)
    tied = known.strategies[0] if problem.tied else -1
    if problem.num_stages == 1:
        plan = good_one_stage(exact, tied)
    else:
        table = Table(_without_dominated(exact), _pipe(problem), math.inf)
        plan = _good_stages(table, _Part(tied=tied, partition=None), math.floor(known.objective_s * exact.time_scale))
    if plan is None:
        return None
    choice = price(problem, *plan)
    return choice if choice.objective_s < known.objective_s else None


class PartitionPlans:
    """Good plans of partitions into several stages, by little and always the same work: no proof, no clock.

    Tied ends try every strategy for the first partition, and then the few that were best for it.
    """

    def __init__(self, problem: StageProblem) -> None:
        self._problem = problem
        exact = to_exact(problem)
        self._table = Table(_without_dominated(exact), _pipe(problem), math.inf)
        self._ties = _ties(exact)

    def plan(self, partition: tuple[int, ...]) -> StageChoice | None:
        """Return a fast plan of `partition` within the budgets, or None where none is found."""
        found: list[tuple[float, int, StageChoice]] = []
        for tied in self._ties:
            plan = _good_stages(self._table, _Part(tied=tied, partition=partition), FAR)
            if plan is not None:
                choice = price(self._problem, *plan)
                found.append((choice.objective_s, tied, choice))
        found.sort(key=lambda one: one[:2])
        if found and len(self._ties) > _LIKED_TIES:
            self._ties = [tied for _, tied, _ in found[:_LIKED_TIES]]
        return found[0][2] if found else None


def _good_stages(table: Table, part: _Part, limit: int) -> Plan | None:
    tied, way = part.tied, _balanced(table, _cells(table, part, limit))
    if way is None:
        return None
    cuts, strategies = [0], list[int]()
    for stage, cell in enumerate(way):
        start, end = cuts[-1], cuts[-1] + cell.end - cell.start
        here = replace(cell, stage=stage, start=start, end=end)
        before = int(table.exact.layout[strategies[-1]]) if start else -1
        problem = table.layer_problem(here, tied, cell.key_weights, before)
        transient = np.where(problem.time < FAR, table.exact.transient[start:end], FAR)
        chosen = good_fitting(problem, transient, table.exact.freed[start:end])
        if chosen is None:
            return None
        cuts.append(end)
        strategies.extend(int(s) for s in chosen)
    return tuple(cuts), tuple(strategies)


def _closed_form(exact: Exact, best: Best) -> int | None:
    """Solve a small problem of the closed form; return the bound over all plans, None when it is not small enough."""
    solved = solve_closed_form(exact)
    if solved is None:
        return None
    if solved[0] < best.ticks:
        best.ticks, best.plan = solved
    return best.ticks


def _pipe(problem: StageProblem) -> Pipe:
    stages, m = problem.num_stages, problem.num_micro_batches
    phased = problem.schedule == "gpipe"
    ahead = tuple(m if phased else min(m, stages - stage) for stage in range(stages))
    return Pipe(num_micro_batches=m, num_ahead=ahead, phased=phased)


def _parts(exact: Exact, partitions: tuple[tuple[int, ...], ...] | None) -> list[_Part]:
    return [_Part(tied=tied, partition=cut) for tied in _ties(exact) for cut in (partitions or (None,))]


def _ties(exact: Exact) -> list[int]:
    """Return the strategies that tied first and last layers may share and no other beats in every way; [-1]: free."""
    if not exact.source.tied:
        return [-1]
    both = np.flatnonzero((exact.forward[0] < FAR) & (exact.forward[-1] < FAR))
    rows = [part[layer, both] for layer in (0, -1) for part in (exact.forward, exact.backward, exact.step)]
    rows += [part[layer, both] for layer in (0, -1) for part in (exact.transient, -exact.freed, *exact.memory)]
    rows += [exact.tied_step[both], exact.tied_extra[both]]
    return sorted(int(s) for s in both[pareto_rows(np.stack(rows, axis=1), exact.layout[both])])


def _without_dominated(exact: Exact) -> Exact:
    """Forbid what another strategy of the same layout beats or equals in every way; tied layers keep all of theirs."""
    arrays = (exact.forward, exact.backward, exact.step, exact.transient, -exact.freed, *exact.memory)
    forward = exact.forward.copy()
    done: dict[int, NDArray[np.intp]] = {}
    for layer, kind in enumerate(exact.layer_class):
        if exact.source.tied and layer in (0, exact.source.num_layers - 1):
            continue
        if kind not in done:
            allowed = np.flatnonzero(exact.forward[layer] < FAR)
            values = np.stack([part[layer, allowed] for part in arrays], axis=1)
            done[kind] = allowed[pareto_rows(values, exact.layout[allowed])]
        forward[layer] = FAR
        forward[layer, done[kind]] = exact.forward[layer, done[kind]]
    return replace(exact, forward=forward)


# Several stages.


def _solve_many_stages(
    exact: Exact,
    partitions: tuple[tuple[int, ...], ...] | None,
    deadlines: tuple[float, float],
    best: Best,
    unfinished: Unfinished,
) -> int:
    """Solve each part, the promising ones first; return the bound over all.

    `deadlines`: once there is a plan, and before.
    """
    start, (deadline, first_by) = time.perf_counter(), deadlines
    if unfinished.table is None:
        unfinished.table = Table(_without_dominated(exact), _pipe(exact.source), deadline, first_by)
    table = unfinished.table
    table.resume(deadline, first_by)
    parts = _parts(exact, partitions)
    relaxed: dict[tuple[int, ...] | None, int] = {}  # [partition] bound with the ends free
    if exact.source.tied:
        with suppress(OutOfTime):  # then nothing is known of any part
            parts, relaxed = _untied_first(table, parts, start + (deadline - start) / 2, best)
    bounds = [relaxed.get(part.partition, 0) for part in parts]
    if not exact.source.tied and len(parts) > 1:
        with suppress(OutOfTime):  # then nothing is known of the rest
            for at, part in enumerate(parts):
                bounds[at] = _bottleneck(table, _cells(table, part))
    lower = FAR
    for at in sorted(range(len(parts)), key=lambda at: (bounds[at], at)):
        if bounds[at] < best.ticks and time.perf_counter() < (deadline if best.is_known else first_by):
            bounds[at] = max(bounds[at], _solve_part(table, parts[at], deadline, best))
        lower = min(lower, bounds[at])
    return min(lower, best.ticks)


def _untied_first(
    table: Table, parts: list[_Part], deadline: float, best: Best
) -> tuple[list[_Part], dict[tuple[int, ...] | None, int]]:
    """Bound tied problems by leaving first and last layer free; return the parts, likely ones first, and the bounds.

    The incumbent comes from the strategies that the free problem's ends like best.
    """
    relaxed: dict[tuple[int, ...] | None, int] = {}
    ordered = parts
    for cut in dict.fromkeys(part.partition for part in parts):
        free = _Part(tied=-1, partition=cut)
        cells = _cells(table, free, best.ticks)
        liked: list[int] = []
        while (way := _balanced(table, cells)) is not None:
            if all(cell.solved or table.settle(cell, -1) for cell in way):
                liked = [int(cell.plan[at]) for cell, at in ((way[-1], -1), (way[0], 0)) if cell.plan is not None]
                break
            cells = _alive(table, cells, -1, best.ticks)
        if way is None:
            relaxed[cut] = best.ticks
            continue
        ordered = sorted(ordered, key=lambda part: part.tied not in liked)
        for part in ordered:
            if part.partition == cut and (not best.is_known or part.tied in liked):
                _first_plan(table, part, _cells(table, part, best.ticks), best)
        if best.is_known:
            relaxed[cut] = _solve_part(table, free, deadline, best)
    return ordered, relaxed


def _cells(table: Table, part: _Part, limit: int = FAR) -> Cells:
    """Return the cells of a part in which something may fit and that may be in a plan below `limit`."""
    num_stages = table.last_stage + 1
    cells: Cells = [{} for _ in range(num_stages)]
    if part.partition is None:
        spans = possible_spans(table.exact, table.pipe, limit)
    else:
        spans = [[span] for span in pairwise(part.partition)]
    for stage in range(num_stages):
        for start, end in spans[stage]:
            cell = table.cell(stage, start, end, part.tied)
            if cell is not None:
                cells[stage].setdefault(start, {})[end] = cell
    return viable(table.pipe, cells, limit)


def _alive(table: Table, cells: Cells, tied: int, limit: int) -> Cells:
    """Return the cells that may still be in a plan below `limit`; cells found not to fit are gone."""
    known = [
        {
            start: {end: cell for end, cell in ends.items() if table.cell(stage, start, end, tied) is cell}
            for start, ends in starts.items()
        }
        for stage, starts in enumerate(cells)
    ]
    return viable(table.pipe, known, limit)


def _bottleneck(table: Table, cells: Cells) -> int:
    """Return the least over all cuts of the largest m * C: a bound."""
    way = _balanced(table, cells)
    return FAR if way is None else max(table.pipe.num_micro_batches * floor(cell, C) for cell in way)


def _balanced(table: Table, cells: Cells) -> list[Cell] | None:
    """Return the cells of the cut with the least largest C, then the least sum of C."""
    num_layers = table.last_layer + 1
    best: dict[int, tuple[int, int, list[Cell]]] = {num_layers: (0, 0, [])}
    for starts in reversed(cells):
        here: dict[int, tuple[int, int, list[Cell]]] = {}
        for start, ends in starts.items():
            for end, cell in ends.items():
                if end in best:
                    c = floor(cell, C)
                    value = (max(c, best[end][0]), c + best[end][1])
                    if start not in here or value < here[start][:2]:
                        here[start] = (*value, [cell, *best[end][2]])
        best = here
    return best[0][2] if 0 in best else None


def _solve_part(table: Table, part: _Part, deadline: float, best: Best) -> int:
    """Close the gap between the least bound of a part and the incumbent; return the bound reached."""
    value = 0
    try:
        cells = _cells(table, part, best.ticks)
        if not best.is_known:
            cells = _first_plan(table, part, cells, best)
        while True:
            cells = _alive(table, cells, part.tied, best.ticks)
            _offer_rows(table, part, cells, best)
            way = least_bound(table, cells, best.ticks)
            if way is None:
                return best.ticks
            value = max(value, way.value)
            open_cells = [step.cell for step in way.steps if step.row < 0]
            if not open_cells:
                _offer(table, part, plan_of_rows(way), best)
                if best.ticks <= way.value:
                    return best.ticks
                if part.tied < 0 and table.exact.source.tied:  # ends left free: a bound, not a plan
                    return min(value, best.ticks)
                return _close(table, part, cells, value, deadline, best)
            if best.is_known and time.perf_counter() > deadline:
                return min(value, best.ticks)
            if not _refine(table, part, way, open_cells, best, deadline):
                return min(value, best.ticks)
    except OutOfTime:
        return min(value, best.ticks)


def _offer_rows(table: Table, part: _Part, cells: Cells, best: Best) -> None:
    """Offer the best plan that the rows in hand make."""
    known = least_bound(table, cells, best.ticks, tails=False)
    if known is not None:
        _offer(table, part, plan_of_rows(known), best)


def _refine(table: Table, part: _Part, way: Way, open_cells: list[Cell], best: Best, deadline: float) -> bool:
    """Make the winner's tails sharper; return False when none can be."""
    unsolved = [cell for cell in open_cells if not cell.solved]
    for cell in unsolved:
        if not table.settle(cell, part.tied):
            return True
    if unsolved:
        _try_cells(
            table, part, [step.cell for step in way.steps], [0, *(step.end for step in way.steps)], best, deadline
        )
        return True
    deeper = [cell for cell in open_cells if not cell.stuck and table.deepen(cell, part.tied)]
    return bool(deeper)


def _first_plan(table: Table, part: _Part, cells: Cells, best: Best) -> Cells:
    """Find a plan on the most even cut that fits."""
    while True:
        cells = _alive(table, cells, part.tied, FAR)
        way = _balanced(table, cells)
        if way is None:
            return cells
        if all(cell.solved or table.settle(cell, part.tied) for cell in way):
            cuts = [0]
            for cell in way:
                cuts.append(cuts[-1] + cell.end - cell.start)
            _try_cells(table, part, way, cuts, best, table.deadline)
            return cells


def _close(table: Table, part: _Part, cells: Cells, value: int, deadline: float, best: Best) -> int:
    """List and simulate all ways below the incumbent, or below as much as a cap lets; return the bound reached."""
    reached, most = value, FAR  # below `most` there are too many
    while True:
        cells = _alive(table, cells, part.tied, best.ticks)
        limit = best.ticks if best.ticks < most else (reached + most) // 2
        if most < FAR and limit - reached <= limit // _NEARLY:
            return min(reached, best.ticks)
        leaves = all_below(table, cells, limit, _CLOSING_CAP)
        if leaves is None:
            most = limit
            continue
        if len(leaves.rows):
            times = simulated(table, leaves.values)
            at = int(times.argmin())
            if times[at] < best.ticks:
                _offer(table, part, plan_at(cells, leaves.boundaries[at], leaves.rows[at]), best)
        if not leaves.tails:
            reached = max(reached, limit)
        if reached >= best.ticks:
            return best.ticks
        if time.perf_counter() > deadline or (leaves.tails and not _sharpen(table, part, leaves.tails)):
            return min(reached, best.ticks)


def _sharpen(table: Table, part: _Part, cells: list[Cell]) -> bool:
    """Settle or deepen cells; return whether any changed."""
    changed = False
    for cell in cells:
        if not cell.solved:
            table.settle(cell, part.tied)
            changed = True
        elif not cell.stuck:
            changed |= table.deepen(cell, part.tied)
    return changed


# Plans in hand.


def _offer(table: Table, part: _Part, plan: Plan, best: Best) -> bool:
    """Simulate a plan that fits; keep it when it is better."""
    tied = part.tied
    if table.exact.source.tied and tied < 0:
        if plan[1][0] != plan[1][-1]:
            return False
        tied = plan[1][0]
    found = int(simulated(table, stage_times(table, tied, plan)[None])[0])
    table.last_moment = min(table.last_moment, table.deadline)  # there is a plan
    if found < best.ticks:
        best.ticks, best.plan = found, plan
        return True
    return False


def _try_cells(table: Table, part: _Part, cells: list[Cell], cuts: list[int], best: Best, deadline: float) -> None:
    """Offer the cells' cheapest choices as one plan, then each stage's best choice given its neighbours'."""
    if any(cell.plan is None for cell in cells):
        return
    plan: Plan = (tuple(cuts), tuple(int(s) for cell in cells if cell.plan is not None for s in cell.plan))
    here = Best()
    if not _offer(table, part, plan, here):
        return
    try:
        for weights in ((0, 0), (table.pipe.num_micro_batches, 1)):
            if best.is_known and here.ticks > best.ticks * 1.05:
                break
            for stage in range(len(cells)):
                if time.perf_counter() > deadline:
                    return
                _improve(table, part, stage, weights, here)
    finally:  # also where the time is over
        if here.ticks < best.ticks:
            best.ticks, best.plan = here.ticks, here.plan


def _improve(table: Table, part: _Part, stage: int, weights: tuple[int, int], here: Best) -> None:
    """Choose one stage again for its neighbours' layouts; (0, 0) weighs like the cell's key."""
    cuts, strategies = present(here.plan)
    start, end = cuts[stage], cuts[stage + 1]
    cell = present(table.cell(stage, start, end, part.tied))
    layout = table.exact.layout
    before = int(layout[strategies[start - 1]]) if start else -1
    after = int(layout[strategies[end]]) if end < len(strategies) else -1
    chosen = table.cheapest(cell, part.tied, weights if any(weights) else cell.key_weights, before, after)
    if chosen is not None:
        changed = (*strategies[:start], *(int(s) for s in chosen), *strategies[end:])
        if changed != strategies:
            _offer(table, part, (cuts, changed), here)
