"""What memory buys: the best plan for budgets from the least that anything fits in to all that a device has.

More memory is never slower: where a search within its time finds no faster plan, the one for less memory stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.search.engine import Found, Progress, Request
from meshwright.search.fixes import fitting_plan, least_memory, searched, with_memory
from meshwright.spec.plan import Plan
from meshwright.units import GiB, show_bytes

NUM_BUDGETS = 10
_ROUNDING = 1e-9  # sums of the same seconds in another order
_LEAST_TIME_S = 0.05
_SHARE_OF_TIME = 0.125  # of the time limit: one search of the curve
_MORE_SHARES = 4  # what one more GiB buys is asked for by itself: so many shares of the time that is left


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The best plan known for a budget. `carried`: no search found a faster one than at less memory.

    `gap`: no plan for this budget is faster by more than this fraction; None: not known.
    """

    memory_bytes: int
    plan: Plan
    carried: bool
    gap: float | None


def curve_until(
    request: Request,
    known: tuple[Plan, ...],
    until: float,
    *,
    num_budgets: int = NUM_BUDGETS,
    progress: Progress | None = None,
) -> tuple[tuple[Point, ...], list[str]]:
    """Return the best plan for each budget as far as there is time `until` then, and in words what there was none for.

    Empty when nothing fits a device. `known` are plans that fit the request's own budget, which is one of the budgets,
    and so is one with a GiB more.
    """
    tell = progress or _nobody
    tell("searching for the least memory")
    own_bytes, most_bytes = request.budget.memory_bytes, request.cluster.device.memory_bytes
    most_bytes = max(own_bytes, most_bytes)
    smallest, cut_short = _least(request, until)
    if smallest is None or smallest.budget.memory_bytes > most_bytes:
        return (), cut_short
    least_bytes, more_bytes = smallest.budget.memory_bytes, min(own_bytes + GiB, most_bytes)
    budgets = _budgets(least_bytes, own_bytes, most_bytes, num_budgets)
    found: dict[int, list[Plan]] = {least_bytes: [smallest]}
    if own_bytes > least_bytes:  # what is known for the own budget has been searched for already, and longer
        found[own_bytes] = [plan for plan in known if _fits(plan)]
    open_budgets = [budget for budget in (more_bytes, *budgets) if not found.get(budget)]
    for number, memory_bytes in enumerate(dict.fromkeys(open_budgets)):
        is_more = memory_bytes == more_bytes
        left_s = until - time.perf_counter()
        if left_s <= 0:
            break
        tell(f"searching within {show_bytes(memory_bytes)}")
        shares = len(open_budgets) - number + (_MORE_SHARES - 1 if is_more else 0)
        time_limit_s = min(
            request.time_limit_s * (1.0 if is_more else _SHARE_OF_TIME),
            left_s * (_MORE_SHARES if is_more else 1) / shares,
        )
        plan = fitting_plan(replace(with_memory(request, memory_bytes), time_limit_s=time_limit_s))
        found[memory_bytes] = [] if plan is None else [plan]
    missing = [budget for budget in budgets if budget not in found]
    if missing:
        cut_short.append("the search at budgets of " + ", ".join(map(show_bytes, missing)))
    return _rising({budget: found[budget] for budget in budgets if budget in found}), cut_short


def _least(request: Request, until: float) -> tuple[Plan | None, list[str]]:
    """Return a plan with the least memory, and in words what there was no time for."""
    left_s = max(0.0, until - time.perf_counter())
    time_limit_s = min(request.time_limit_s * _SHARE_OF_TIME, left_s / 2)
    short = replace(request, time_limit_s=max(_LEAST_TIME_S, time_limit_s))
    tiny = with_memory(short, request.budget.reserved_bytes + 1)
    nothing = searched(tiny)
    if isinstance(nothing, Found):
        return None, []
    cut_short = ["the search for the least memory"] if nothing.stopped else []
    return least_memory(tiny, nothing, until=until), cut_short


def _rising(found: dict[int, list[Plan]]) -> tuple[Point, ...]:
    """Return the points by rising budget, of each the best plan of it and of all before."""
    points: list[Point] = []
    for memory_bytes, plans in found.items():
        if not points:
            points.append(Point(memory_bytes=memory_bytes, plan=plans[0], carried=False, gap=_gap(plans[0], plans)))
            continue
        before = points[-1].plan
        best = min([before, *plans], key=_step_s)
        carried = _step_s(best) >= _step_s(before) * (1.0 - _ROUNDING)
        kept = before if carried else best
        points.append(Point(memory_bytes=memory_bytes, plan=kept, carried=carried, gap=_gap(kept, plans)))
    return tuple(points)


def _gap(plan: Plan, searched_plans: Iterable[Plan]) -> float | None:
    """Return how much faster than `plan` any plan may be, by the bounds that searches for its budget have proved."""
    bounds = [one.proof.lower_bound_s for one in searched_plans if one.proof is not None]
    return max(0.0, 1.0 - max(bounds) / _step_s(plan)) if bounds else None


def _budgets(least_bytes: int, own_bytes: int, most_bytes: int, count: int) -> tuple[int, ...]:
    """Return budgets at equal ratios, with the own one and a GiB more."""
    ratio = most_bytes / least_bytes
    steps = (round(least_bytes * ratio ** (index / (count - 1))) for index in range(count))
    wanted = {least_bytes, most_bytes, own_bytes, min(own_bytes + GiB, most_bytes), *steps}
    return tuple(sorted(budget for budget in wanted if least_bytes <= budget <= most_bytes))


def _nobody(line: str) -> None:
    """Take a line of progress that nobody wants to see."""


def _fits(plan: Plan) -> bool:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    return plan.predicted.peak_bytes <= plan.budget.usable_bytes


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    return plan.predicted.step_s
