"""meshwright predict: the price of a plan file, or of one strategy for all layers under any framework."""

from __future__ import annotations

from meshwright.cli.common import show_json, show_view
from meshwright.cli.described import Described, about_a_run
from meshwright.cli.run_options import run_views
from meshwright.report.text import plan_view


@about_a_run
def predict(found: Described, as_json: bool) -> None:
    """Predict step time and memory, term by term, of a plan file or of one strategy for all layers.

    With --framework the run is another framework's, in Megatron's terms.
    """
    if found.run is not None:
        if as_json:
            show_json(found.run.as_data())
            return
        for view in run_views(found.run):
            show_view(view)
    elif found.plan is not None and found.plan.predicted is not None:
        if as_json:
            show_json(found.plan.predicted.model_dump(mode="json"))
        else:
            show_view(plan_view(found.plan))
