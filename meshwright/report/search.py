"""Tables of how a search went."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from meshwright.report.text import plain_table


def balance_table(rows: Iterable[tuple[str, tuple[int, ...], float, float]]) -> Table:
    """Return how evenly time and memory lie on the stages of partitions: (name, layers by stage, alpha_t, alpha_m)."""
    table = plain_table("partition", "layers by stage", "alpha_t", "alpha_m")
    for name, sizes, alpha_t, alpha_m in rows:
        table.add_row(name, "+".join(map(str, sizes)), f"{alpha_t:.3f}", f"{alpha_m:.3f}")
    table.caption = "alpha: 1 - largest / sum over stages; 1 - 1 / stages is perfect balance"
    table.caption_justify = "left"
    return table
