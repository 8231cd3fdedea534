"""What plans were predicted to take, and what their trials on real ranks took."""

from __future__ import annotations

from rich.table import Table

from meshwright.report.text import plain_table
from meshwright.spec.trial import Trial, Trials
from meshwright.units import show_bytes, show_percent, show_seconds


def winner(trials: Trials) -> Trial | None:
    """Return the trial with the least median seconds a sample; None when no plan ran.

    A plan that needs more GPU memory than its budget does not win; on CPU ranks peaks say less than
    their prediction does, because the allocator holds more than is alive.
    """
    ran = [one for one in trials.trials if one.has_run and not _is_over(one)]
    return min(ran, key=lambda one: one.median_s / one.plan.global_batch_size, default=None)


def trials_table(trials: Trials, best: Trial | None = None) -> Table:
    """Return a line a plan, in the order of its prediction."""
    table = plain_table(
        "plan", "strategies", "stages", "micro-batches", "step predicted", "measured", "range", "error",
        "peak predicted", "measured", "error", "",
    )  # fmt: skip
    for number, one in enumerate(trials.trials):
        table.add_row(
            str(number + 1),
            ", ".join(strategy.label for strategy in dict.fromkeys(one.plan.strategies)),
            "+".join(str(stage.num_layers) for stage in one.plan.stages),
            str(one.plan.num_micro_batches),
            *_seconds(one),
            *_bytes(one),
            one.failure or ("over its budget" if _is_over(one) else "fastest" if one is best else ""),
        )
    return table


def _is_over(one: Trial) -> bool:
    is_gpu = one.plan.cluster.device.backend == "cuda"
    return is_gpu and max(one.peak_bytes, default=0) > one.plan.budget.usable_bytes


def _seconds(one: Trial) -> tuple[str, str, str, str]:
    predicted_s = None if one.plan.predicted is None else one.plan.predicted.step_s
    said = "-" if predicted_s is None else show_seconds(predicted_s)
    if not one.has_run:
        return said, "-", "-", "-"
    span = f"{show_seconds(min(one.step_s))} .. {show_seconds(max(one.step_s))}"
    error = "-" if predicted_s is None else show_percent(predicted_s / one.median_s - 1)
    return said, show_seconds(one.median_s), span, error


def _bytes(one: Trial) -> tuple[str, str, str]:
    predicted = None if one.plan.predicted is None else one.plan.predicted.peak_bytes
    said = "-" if predicted is None else show_bytes(predicted)
    if not one.peak_bytes:
        return said, "-", "-"
    measured = max(one.peak_bytes)
    return said, show_bytes(measured), "-" if predicted is None else show_percent(predicted / measured - 1)
