"""meshwright show: a plan file as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, show_json, show_line, show_view
from meshwright.report.text import plan_view
from meshwright.search.explain import as_priced_now
from meshwright.search.planner import load_plan


def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    json: JsonFlag = False,
) -> None:
    """Show a plan: the strategy of every layer, and its prediction."""
    loaded = load_plan(plan)
    if json:
        show_json(loaded.model_dump(mode="json"))
    else:
        shown = as_priced_now(loaded)
        show_view(plan_view(shown))
        if shown is not loaded:
            show_line("the file holds another price: it was edited, or another version priced it; shown as priced now")
