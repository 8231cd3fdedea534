"""meshwright compare: a plan's prediction against the metrics of its run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from pydantic import BaseModel, ConfigDict

from meshwright.cli.common import JsonFlag, show_json, show_view
from meshwright.errors import UserError
from meshwright.files import from_data, is_folder, read_lines
from meshwright.report.compare import compare as compared
from meshwright.report.compare import compare_table
from meshwright.search.planner import load_plan
from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, PositiveFloat
from meshwright.spec.plan import Plan

METRICS, PLAN = "metrics.jsonl", "plan.json"  # what a run writes into its folder
_Part = Literal["forward", "backward", "waiting", "sync", "optimizer"]
_DECIDES_A_RUN = ("model", "num_devices", "global_batch_size", "num_micro_batches", "schedule", "stages")


class _StepRecord(BaseModel):
    """What a comparison needs of the record of a step; a run writes more. `parts_s` is empty where it says little."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    kind: Literal["step"]
    step_s: PositiveFloat
    peak_memory_bytes: tuple[NonNegativeInt, ...]
    parts_s: dict[_Part, tuple[NonNegativeFloat, ...]]


def compare(
    plan: Annotated[Path, typer.Argument(help="A plan file with a prediction.")],
    metrics: Annotated[Path, typer.Argument(help="Its run folder, or the metrics.jsonl in it.")],
    json: JsonFlag = False,
) -> None:
    """Hold a plan's prediction against its run: step time and its parts by stage, peak memory by rank."""
    loaded = load_plan(plan)
    file = metrics / METRICS if is_folder(metrics) else metrics
    check_metrics(file, loaded)
    found = compared(loaded, file)
    if json:
        show_json([{**asdict(one), "error": one.error} for one in found])
    else:
        show_view(compare_table(found))


def check_metrics(file: Path, plan: Plan) -> None:
    """Raise UserError when the records are not those of a run of `plan`."""
    steps = [record for record in read_lines(file) if record.get("kind") == "step"]
    for number, data in enumerate(steps, start=1):
        where = f"{file}: step record {number}"
        record = from_data(_StepRecord, data, where=where)
        for part in get_args(_Part) if record.parts_s else ():
            ranks = len(record.parts_s.get(part, ()))
            if ranks != len(record.peak_memory_bytes):
                raise UserError(f"{where}: parts_s.{part}: is of {ranks} ranks, not {len(record.peak_memory_bytes)}")
    trained = file.parent / PLAN
    if not trained.is_file():
        return
    other = load_plan(trained)
    changed = [name for name in _DECIDES_A_RUN if getattr(other, name) != getattr(plan, name)]
    if changed:
        raise UserError(f"{file}: is of a run of another plan, {trained}: it differs in {', '.join(changed)}")
