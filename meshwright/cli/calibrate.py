"""meshwright calibrate: factors from the user's own runs, for plan and predict."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, note, show_json, show_line
from meshwright.cli.compare import METRICS, PLAN, check_metrics
from meshwright.cost.calibrate import RunMeasured
from meshwright.cost.calibrate import calibrate as fitted
from meshwright.cost.predict import predict as price
from meshwright.errors import UserError
from meshwright.files import check_writable, is_folder, write_spec
from meshwright.report.compare import measured_steps
from meshwright.search.planner import load_plan
from meshwright.spec.calibration import Calibration
from meshwright.units import several, show_percent

_FEW = 3


def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs: what train --run-dir names, with plan and metrics.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the factors to this file.")],
    json: JsonFlag = False,
) -> None:
    """Learn from own runs how far predictions are off: for plan --calibration and predict --calibration."""
    check_writable(output)
    found = fitted([_measured(folder) for folder in runs])
    write_spec(found, output)
    if json:
        show_json(found.model_dump(mode="json"))
        return
    _show(found)
    note(f"calibration written to {output}")


def _measured(folder: Path) -> RunMeasured:
    """Return a run's plan, priced as without calibration, and its medians."""
    if not is_folder(folder):
        raise UserError(f"{folder}: is not the folder of a run")
    plan, file = load_plan(folder / PLAN), folder / METRICS
    check_metrics(file, plan)
    steps = measured_steps(file, plan.num_devices)
    return RunMeasured(
        plan=plan.model_copy(update={"predicted": price(plan)}),
        step_s=median(step["step_s"] for step in steps),
        peak_bytes=max(steps[-1]["peak_memory_bytes"]),
    )


def _show(found: Calibration) -> None:
    if found.compute_factor == found.communication_factor:
        show_line(
            f"seconds: x {found.compute_factor:.3g} (runs lie within {show_percent(found.time_spread_share)} of it)"
        )
    else:
        show_line(
            f"seconds: compute x {found.compute_factor:.3g}, all else x {found.communication_factor:.3g} "
            f"(runs lie within {show_percent(found.time_spread_share)} of it)"
        )
    show_line(f"memory: x {found.memory_factor:.3g} (runs lie within {show_percent(found.memory_spread_share)} of it)")
    if found.num_runs < _FEW:
        show_line(f"from {several(found.num_runs, 'run')}: more, of different plans, say more")
