"""Seconds between measured points: noise taken out where it makes more cheaper than less, straight lines between."""

from __future__ import annotations

from bisect import bisect_left

Points = tuple[tuple[int, float], ...]
"""(size, seconds) by rising size."""


def rising(points: Points) -> Points:
    """Return points with seconds that never fall: where noise has made more cheaper than less, their mean.

    Isotonic regression by pooling neighbours (Ayer et al. 1955, doi 10.1214/aoms/1177728423).
    """
    pools: list[tuple[float, int]] = []  # mean and number of points
    for _, seconds in points:
        mean, count = seconds, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, count = (mean * count + before * others) / (count + others), count + others
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return tuple((size, seconds) for (size, _), seconds in zip(points, means, strict=True))


def on_line(points: Points, size: float, *, at_nothing_s: float, least_slope: float) -> float:
    """Return seconds at `size` > 0, in straight lines from (0, `at_nothing_s`) through the points.

    Above the largest they rise as just before, or by `least_slope` if that is steeper.
    """
    line = ((0, at_nothing_s), *points)
    right = min(bisect_left([at for at, _ in line], size), len(line) - 1)
    (low, low_s), (high, high_s) = line[right - 1], line[right]
    slope = (high_s - low_s) / (high - low)
    if size > high:
        return high_s + (size - high) * max(slope, least_slope)
    return low_s + (size - low) * slope
