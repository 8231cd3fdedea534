"""A plan's prediction held against the metrics of a run: step time, its parts by stage, peak memory by rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from meshwright.errors import UserError
from meshwright.files import read_lines
from meshwright.report.text import plain_table
from meshwright.spec.plan import Plan, StagePrediction
from meshwright.units import show_bytes, show_percent, show_seconds

_SKIPPED_STEPS = 3  # the first steps of a run warm up


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and measured; seconds or bytes."""

    what: str
    where: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else 0.0


def compare(plan: Plan, metrics: Path) -> list[Compared]:
    """Return what was predicted for `plan` against the medians of the steps in the file `metrics`.

    Raises UserError when the plan has no prediction, or the run is of another number of ranks.
    """
    if plan.predicted is None:
        raise UserError("plan: has no prediction; price it first, with meshwright predict or plan")
    steps = measured_steps(metrics, plan.num_devices)
    found = [_compared("step", "all", "s", plan.predicted.step_s, median(step["step_s"] for step in steps))]
    for stage, predicted in enumerate(plan.predicted.stages):
        of_stage = range(stage * plan.stage_devices, (stage + 1) * plan.stage_devices)
        for part, seconds in _parts(predicted, plan.num_micro_batches).items():
            if steps[-1].get("parts_s"):
                measured = median(
                    sum(_part(step["parts_s"], part, rank) for rank in of_stage) / len(of_stage) for step in steps
                )
                found.append(_compared(part, f"stage {stage}", "s", seconds, measured))
        for rank in of_stage:
            peak = steps[-1]["peak_memory_bytes"][rank]
            found.append(_compared("peak memory", f"rank {rank}", "bytes", predicted.peak_bytes, peak))
    return found


def measured_steps(metrics: Path, num_devices: int) -> list[dict[str, Any]]:
    """Return the records of the steps of a run, less those that warm it up.

    Raises UserError when there are none, or of another number of ranks.
    """
    steps = [record for record in read_lines(metrics) if record.get("kind") == "step"]
    steps = steps[_SKIPPED_STEPS:] or steps
    if not steps:
        raise UserError(f"{metrics}: holds no steps")
    ranks = len(steps[-1].get("peak_memory_bytes", ()))
    if ranks != num_devices:
        raise UserError(f"{metrics}: is of {ranks} ranks, but the plan is for {num_devices}")
    return steps


def compare_table(found: list[Compared]) -> Table:
    """Return the comparison as a table."""
    table = plain_table("what", "where", "predicted", "measured", "error")
    for one in found:
        show = show_bytes if one.unit == "bytes" else show_seconds
        error = show_percent(one.error) if one.measured else "-"
        table.add_row(one.what, one.where, show(one.predicted), show(one.measured), error)
    return table


def _compared(what: str, where: str, unit: str, predicted: float, measured: float) -> Compared:
    return Compared(what=what, where=where, unit=unit, predicted=predicted, measured=measured)


def _parts(predicted: StagePrediction, micro_batches: int) -> dict[str, float]:
    """Return the predicted seconds of a step in the parts that a run measures."""
    forward, backward = predicted.micro_batch.forward, predicted.micro_batch.backward
    return {
        "forward": micro_batches * (forward.total_s - forward.border_s) + predicted.step.parameter_gather_s,
        "backward": micro_batches * (backward.total_s - backward.border_s)
        + predicted.step.gradient_sync_s
        + predicted.step.copy_s,
        "bubble and borders": predicted.bubble_s + micro_batches * (forward.border_s + backward.border_s),
        "once a step": predicted.step.optimizer_s + predicted.step.tied_sync_s + predicted.step.other_s,
    }


_MEASURED_AS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "bubble and borders": ("waiting",),
    "once a step": ("sync", "optimizer"),
}


def _part(parts: dict[str, list[float]], part: str, rank: int) -> float:
    values: list[Any] = [parts[name][rank] for name in _MEASURED_AS[part]]
    return float(sum(values))
