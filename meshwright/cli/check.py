"""meshwright check: is a plan legal, and does it fit? Exit code 0: fits, 1: does not, 2: not legal."""

from __future__ import annotations

import typer

from meshwright.cli.common import show_json, show_line
from meshwright.cli.described import Described, about_a_run
from meshwright.cli.run_options import verdict
from meshwright.report.run import run_line
from meshwright.report.text import fit_lines, summary_line
from meshwright.spec.legality import why_layer_only_priced, why_strategy_only_priced
from meshwright.spec.plan import Plan


def _only_priced(plan: Plan) -> list[str]:
    """Return what `train` refuses of the plan."""
    reasons = [why_strategy_only_priced(strategy) for strategy in dict.fromkeys(plan.strategies)]
    layers = [why_layer_only_priced(layer) for layer in dict.fromkeys(plan.model.layers)]
    reasons += [f"{reason} can be priced but not trained yet" for reason in layers if reason is not None]
    return [f"train refuses it: {reason}" for reason in reasons if reason is not None]


@about_a_run
def check(found: Described, as_json: bool) -> None:
    """Say in one screen whether a plan is legal and fits. Exit code 0: it fits, 1: it does not, 2: it is not legal."""
    if found.run is not None:
        fits = found.run.fits
        lines = [run_line(found.run.run), "legal: yes", verdict(found.run)]
    else:
        assert found.plan is not None  # noqa: S101 one of the two is there
        assert found.plan.predicted is not None  # noqa: S101 described prices
        fits = found.plan.predicted.peak_bytes <= found.plan.budget.usable_bytes
        lines = [summary_line(found.plan), "legal: yes", *fit_lines(found.plan), *_only_priced(found.plan)]
    if as_json:
        show_json({"legal": True, "fits": fits, "reasons": lines[2:]})
    else:
        for line in lines:
            show_line(line)
    if not fits:
        raise typer.Exit(1)
