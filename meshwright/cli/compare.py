"""meshwright compare: a plan's prediction against the metrics of its run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, show_json, show_view
from meshwright.report.compare import compare as compared
from meshwright.report.compare import compare_table
from meshwright.search.planner import load_plan


def compare(
    plan: Annotated[Path, typer.Argument(help="A plan file with a prediction.")],
    metrics: Annotated[Path, typer.Argument(help="Its run folder, or the metrics.jsonl in it.")],
    json: JsonFlag = False,
) -> None:
    """Hold a plan's prediction against its run: step time and its parts by stage, peak memory by rank."""
    found = compared(load_plan(plan), metrics / "metrics.jsonl" if metrics.is_dir() else metrics)
    if json:
        show_json([{**asdict(one), "error": one.error} for one in found])
    else:
        show_view(compare_table(found))
