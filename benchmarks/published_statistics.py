"""Statistics of predictions against published measurements: errors, intervals, calibration, order, fit.

An error is predicted / measured - 1. Medians and 90th percentiles are of its size, the bias is the median of the
error itself. Pooled figures weigh every record; since records of one source are alike, the interval of a pooled
median draws whole source groups (bootstrap).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

_T = TypeVar("_T")
_DRAWS, _SEED = 2000, 0
APART = 0.05  # measured times further apart than this have an order
CLOSE = 0.02  # a pick this near to the best is as good
_LEAST_TO_CALIBRATE = 3
_REWEIGHTED, _SMALL_ERROR = 20, 0.005  # rounds, and the error below which all count alike


@dataclass(frozen=True)
class Summary:
    """How large errors are: `median` and `p90` of their size, `bias` their median."""

    num: int
    median: float | None
    p90: float | None
    bias: float | None
    largest: float | None = None
    low: float | None = None
    high: float | None = None


def summarise(errors: Sequence[float]) -> Summary:
    """Return the summary of `errors`."""
    if not errors:
        return Summary(0, None, None, None)
    sizes = sorted(abs(error) for error in errors)
    return Summary(len(sizes), median(sizes), percentile(sizes, 90), median(errors), sizes[-1])


def with_interval(errors: Mapping[str, Sequence[float]]) -> Summary:
    """Return the pooled summary of errors by source group, with a 95 % interval of the median that draws groups."""
    pooled = [error for group in errors.values() for error in group]
    found = summarise(pooled)
    if len(errors) < 2:
        return found
    rng, groups = random.Random(_SEED), [list(map(abs, group)) for group in errors.values()]
    draws = sorted(
        median([size for group in rng.choices(groups, k=len(groups)) for size in group]) for _ in range(_DRAWS)
    )
    return Summary(**{**asdict(found), "low": percentile(draws, 2.5), "high": percentile(draws, 97.5)})


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the `share`-th percentile of `ordered` values, interpolated."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def grouped(items: Iterable[_T], key: Callable[[_T], Any]) -> dict[Any, list[_T]]:
    """Return `items` by `key`, in order of first appearance."""
    found: dict[Any, list[_T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


def calibrated_errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the errors of (predicted, measured) `pairs` after one scalar, which the other pairs give."""
    if len(pairs) < _LEAST_TO_CALIBRATE:
        return []
    logs = [math.log(measured / predicted) for predicted, measured in pairs]
    found = []
    for place, (predicted, measured) in enumerate(pairs):
        scale = math.exp(median(logs[:place] + logs[place + 1 :]))
        found.append(predicted * scale / measured - 1)
    return found


def offset_calibrated_errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the errors of (predicted, measured) `pairs` after a factor and an offset, which the other pairs give.

    They minimise the sum of |factor predicted / measured + offset / measured - 1| (least squares, reweighted).
    """
    if len(pairs) <= _LEAST_TO_CALIBRATE:
        return []
    found = []
    for place, (predicted, measured) in enumerate(pairs):
        factor, offset = _line([*pairs[:place], *pairs[place + 1 :]])
        found.append((factor * predicted + offset) / measured - 1)
    return found


def _line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    ratios = [(predicted / measured, 1 / measured) for predicted, measured in pairs]
    weights = [1.0] * len(ratios)
    factor, offset = 1.0, 0.0
    for _ in range(_REWEIGHTED):
        rows = list(zip(weights, ratios, strict=True))
        xx = sum(w * x * x for w, (x, _) in rows)
        xy = sum(w * x * y for w, (x, y) in rows)
        yy = sum(w * y * y for w, (_, y) in rows)
        x_sum, y_sum = sum(w * x for w, (x, _) in rows), sum(w * y for w, (_, y) in rows)
        determinant = xx * yy - xy * xy
        if determinant <= 1e-9 * xx * yy:  # one size only: a factor says all
            factor, offset = x_sum / xx, 0.0
        else:
            factor, offset = (x_sum * yy - y_sum * xy) / determinant, (y_sum * xx - x_sum * xy) / determinant
        weights = [1 / max(_SMALL_ERROR, abs(factor * x + offset * y - 1)) for x, y in ratios]
    return factor, offset


@dataclass(frozen=True)
class Order:
    """How well predictions order the plans of one set."""

    num_pairs: int
    num_right: int
    regret: float
    picked: str
    best: str


def order_of(plans: Sequence[tuple[str, Any, float, float]]) -> Order | None:
    """Return the order of plans (id, plan, predicted, measured); pairs of one plan or within APART are left out.

    The pick is the plan with the least prediction; of the same plan measured several times the mean counts.
    """
    if len(plans) < 2:
        return None
    num_pairs = num_right = 0
    for place, (_, first_plan, first_predicted, first_measured) in enumerate(plans):
        for _, plan, predicted, measured in plans[place + 1 :]:
            is_apart = abs(measured - first_measured) > APART * min(measured, first_measured)
            if plan == first_plan or not is_apart:
                continue
            num_pairs += 1
            num_right += (predicted - first_predicted) * (measured - first_measured) > 0
    least = min(predicted for _, _, predicted, _ in plans)
    picks = [(name, measured) for name, _, predicted, measured in plans if predicted <= least * (1 + 1e-12)]
    best_name, best_s = min(((name, measured) for name, _, _, measured in plans), key=lambda one: one[1])
    regret = sum(measured for _, measured in picks) / len(picks) / best_s - 1
    return Order(num_pairs, num_right, regret, picks[0][0], best_name)


@dataclass(frozen=True)
class Fit:
    """One record's need of device memory against a share of what the device has."""

    id: str
    share: float  # need / memory of the device
    is_oom: bool


def confusion(fits: Sequence[Fit], threshold: float) -> dict[str, Any]:
    """Return how often "does not fit" was right, with every miss and false alarm and its margin to `threshold`."""

    def listed(wrong: list[Fit]) -> list[dict[str, Any]]:
        wrong = sorted(wrong, key=lambda one: one.share)
        return [{"id": one.id, "share": one.share, "margin": one.share - threshold} for one in wrong]

    ooms, good = [one for one in fits if one.is_oom], [one for one in fits if not one.is_oom]
    misses = [one for one in ooms if one.share <= threshold]
    alarms = [one for one in good if one.share > threshold]
    return {
        "threshold": threshold,
        "num_oom": len(ooms),
        "num_found": len(ooms) - len(misses),
        "num_fit": len(good),
        "num_false_alarms": len(alarms),
        "misses": listed(misses),
        "false_alarms": listed(alarms),
    }
