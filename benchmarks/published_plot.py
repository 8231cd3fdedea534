"""Predicted against measured step times and memory of published runs, as one picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from published_pricing import Priced
from published_records import FILTERS
from published_statistics import grouped

from meshwright.units import GiB


def plot(priced: Iterable[Priced], path: Path) -> None:
    """Write the picture to `path`: times of the subsets dense and moe, memory of base."""
    mpl.use("agg")
    from matplotlib import pyplot

    priced = list(priced)
    timed = [one for one in priced if FILTERS["dense"](one.record.raw) or FILTERS["moe"](one.record.raw)]
    some = [one for one in priced if FILTERS["base"](one.record.raw)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6.5))
    times = [(one.record.group, one.record.iter_time_s, one.time_s) for one in timed]
    memory = [(one.record.group, one.record.memory_bytes, one.memory_bytes) for one in some]
    _scatter(left, times, 1.0, "seconds a step")
    _scatter(right, memory, GiB, "memory, GiB")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _scatter(axes: Any, points: list[tuple[str, float | None, float | None]], unit: float, title: str) -> None:
    known = [
        (group, measured / unit, predicted / unit) for group, measured, predicted in points if measured and predicted
    ]
    if not known:
        return
    for number, (group, some) in enumerate(grouped(known, lambda one: one[0]).items()):
        marker = "os^vD<>pPX*h"[number % 12]
        axes.scatter([m for _, m, _ in some], [p for _, _, p in some], s=14, alpha=0.6, marker=marker, label=group)
    low, high = min(m for _, m, _ in known), max(m for _, m, _ in known)
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    for factor in (0.8, 1.25):
        axes.plot([low, high], [low * factor, high * factor], color="grey", linewidth=0.5, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel=f"measured {title}", ylabel=f"predicted {title}")
    axes.legend(fontsize=8)
