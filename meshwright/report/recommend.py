"""A table of cluster sizes with the best plan for each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from meshwright.report.text import plain_table, throughput_cell, throughput_unit
from meshwright.spec.plan import Plan
from meshwright.units import show_bytes, show_seconds


def sizes_table(rows: Sequence[tuple[str, Plan | None, str, float | None]]) -> Table:
    """Return clusters with the plan for each, why there is none, and what a billion tokens cost."""
    with_cost = any(cost is not None for *_, cost in rows)
    columns = [
        "cluster",
        "step",
        throughput_unit(plan for _, plan, _, _ in rows),
        "a device",
        "mfu",
        "peak",
        "stages",
        "strategies",
    ]
    table = plain_table(*columns, *(["a billion tokens"] if with_cost else []))
    for cluster, plan, reason, cost in rows:
        if plan is None or plan.predicted is None:
            table.add_row(cluster, "-", "-", "-", "-", "-", "-", _short(reason))
            continue
        predicted = plan.predicted
        strategies = ", ".join(strategy.label for strategy in dict.fromkeys(plan.strategies))
        table.add_row(
            cluster,
            show_seconds(predicted.step_s),
            throughput_cell(plan),
            throughput_cell(plan, plan.num_devices),
            f"{100 * predicted.mfu:.1f} %",
            show_bytes(predicted.peak_bytes),
            str(plan.num_stages),
            strategies,
            *([f"{cost:,.2f}"] if cost is not None else []),
        )
    return table


def _short(reason: str) -> str:
    """Return the reason without its explanation in parentheses."""
    return f"does not fit: {reason.split(' (the bound')[0]}" if "(the bound" in reason else reason
