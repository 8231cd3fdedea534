"""Tables and sentences that explain a plan: what binds it, what others lose, what memory buys, what would fit.

They take plain data: seconds and bytes by term, as `search.explain` names them.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from meshwright.errors import UserError
from meshwright.report.text import SORTS, plain_table, shown_per_s, throughput_cell, throughput_unit
from meshwright.spec.plan import Plan, Prediction
from meshwright.units import GiB, show_bytes, show_percent, show_seconds

_COLUMNS = {
    "compute_s": "compute",
    "recompute_s": "recompute",
    "tp_s": "tp",
    "zero_s": "zero",
    "wait_s": "wait",
    "relayout_s": "re-layout",
    "border_s": "border",
    "once_a_step_s": "once a step",
    "bubble_s": "bubble",
}
_BYTES = {
    "states_bytes": "model states",
    "activation_bytes": "activations in flight",
    "transient_bytes": "transients",
}
_SHOWN_REASONS = 8
_SHOWN_TERMS = 2
_NOTHING = 1e-9  # of a step: sums of the same seconds in another order
_INCHES = (7.0, 4.5)


def binding_sentence(plan: Plan, what: str, stage: int, term: str, share: float) -> str:
    """Return what keeps the plan from being faster: its memory or its time, which stage and which term."""
    predicted, budget_bytes = _predicted(plan), plan.budget.usable_bytes
    stages = predicted.stages
    if what == "memory":
        needed_bytes = stages[stage].bound_bytes
        verb = "DOES NOT FIT" if stages[stage].peak_bytes > budget_bytes else "binds"
        return (
            f"memory {verb}: stage {stage} needs {show_bytes(needed_bytes)} of its {show_bytes(budget_bytes)} "
            f"({_share(share)}), most of it {_BYTES[term]}; "
            f"{show_bytes(needed_bytes - stages[stage].peak_bytes)} of that is slack of the bound"
        )
    fullest_bytes = max(one.bound_bytes for one in stages)
    busy_s = stages[stage].busy_s
    return (
        f"time binds: stage {stage} is the slowest, busy for {show_seconds(busy_s)} of a step of "
        f"{show_seconds(predicted.step_s)}, and {SORTS[term]} takes {_share(share)} of the step. No stage is near "
        f"its budget: the fullest needs {show_bytes(fullest_bytes)} of {show_bytes(budget_bytes)}"
    )


def memory_terms_table(rows: Sequence[Mapping[str, int]], over_bytes: Sequence[int] = ()) -> Table:
    """Return what each stage holds by term, and what of it is slack; `over_bytes`: by how much it is too much."""
    names = [*_BYTES.values(), "bound", "of budget", "peak", "slack of bound"]
    table = plain_table("stage", *names, *(["too much"] if over_bytes else []))
    for stage, row in enumerate(rows):
        cells = [show_bytes(row[name]) for name in (*_BYTES, "bound_bytes")]
        cells += [_share(row["bound_bytes"] / row["budget_bytes"]), show_bytes(row["peak_bytes"])]
        cells += [show_bytes(row["bound_bytes"] - row["peak_bytes"])]
        table.add_row(str(stage), *cells, *([show_bytes(over_bytes[stage])] if over_bytes else []))
    return table


def time_terms_table(rows: Iterable[Mapping[str, float]]) -> Table:
    """Return the seconds of a step of each stage by term."""
    table = plain_table("stage", *_COLUMNS.values(), "step")
    for stage, row in enumerate(rows):
        table.add_row(str(stage), *(show_seconds(row[name]) for name in _COLUMNS), show_seconds(sum(row.values())))
    return table


def losses_table(
    best: Plan, terms_s: Mapping[str, float], others: Iterable[tuple[str, Plan, Mapping[str, float]]]
) -> Table:
    """Return the seconds of a step of `best` by term, and what each other plan takes more."""
    table = plain_table("plan", "step", *_COLUMNS.values(), *_PLAN_COLUMNS)
    step_s = _predicted(best).step_s
    table.add_row("this", show_seconds(step_s), *(show_seconds(terms_s[name]) for name in _COLUMNS), *_in_short(best))
    for name, plan, more_s in others:
        cells = [_more(more_s[term], step_s) for term in _COLUMNS]
        table.add_row(name, _more(sum(more_s.values()), step_s), *cells, *_in_short(plan))
    table.caption = "seconds of a step on the slowest stage; the others': how many more, for as many samples"
    table.caption_justify = "left"
    return table


def losses_sentence(slower_fraction: float, slower_s: float, terms_s: Mapping[str, float]) -> str:
    """Return by how much a plan is slower (or faster), and the terms that make it so."""
    step_s = abs(slower_s / slower_fraction) if slower_fraction else 0.0
    if abs(slower_fraction) <= _NOTHING:
        return "takes as long"
    sign = 1 if slower_s > 0 else -1
    ranked = sorted(_COLUMNS, key=lambda name: -sign * terms_s[name])
    mostly = [name for name in ranked[:_SHOWN_TERMS] if sign * terms_s[name] > _NOTHING * step_s]
    saved = [name for name in ranked[::-1][:1] if sign * terms_s[name] < -_NOTHING * step_s]
    words = ", ".join(f"{SORTS[name]} {_more(terms_s[name], step_s)}" for name in mostly)
    but = "".join(f"; on the other side {SORTS[name]} {_more(terms_s[name], step_s)}" for name in saved)
    direction = "slower" if sign > 0 else "faster"
    return f"is {show_seconds(abs(slower_s))} a step {direction} ({show_percent(slower_fraction)}): {words}{but}"


def curve_table(points: Sequence[tuple[int, Plan, bool, float | None]], own_bytes: int) -> Table:
    """Return (budget, best plan, whether it is the one for less memory, gap) as a line a budget, and what changes."""
    table = plain_table(
        "memory", throughput_unit(plan for _, plan, _, _ in points), "step", "of the fastest", "gap", *_PLAN_COLUMNS, ""
    )
    fastest_s = min((_predicted(plan).step_s for _, plan, _, _ in points), default=0.0)
    for memory_bytes, plan, carried, gap in points:
        predicted = _predicted(plan)
        cells = ("as above", "", "") if carried else _in_short(plan)
        table.add_row(
            show_bytes(memory_bytes),
            throughput_cell(plan),
            show_seconds(predicted.step_s),
            _share(fastest_s / predicted.step_s),
            "-" if gap is None else f"{100 * gap:.2g} %",
            *cells,
            "the plan's budget" if memory_bytes == own_bytes else "",
        )
    held_back = max((plan.budget.reserved_bytes for _, plan, _, _ in points), default=0)
    memory = f"memory: all of a device, {show_bytes(held_back)} of it held back; " if held_back else ""
    table.caption = f"{memory}gap: how far from the best plan for that memory this one can be, for the search's time"
    table.caption_justify = "left"
    return table


def more_memory_sentence(extra_bytes: int, before: Plan, after: Plan, gap: float | None) -> str:
    """Return what another GiB of memory buys."""
    if not extra_bytes:
        return f"the budget is all the memory that {before.cluster.device.name} has"
    gained = shown_per_s(after) - shown_per_s(before)
    fraction = gained / shown_per_s(before)
    unknown = "how much is possible is not known" if gap is None else f"{100 * gap:.2g} % of the step at most"
    doubt = "" if gap == 0 else f" (a longer search may find more: {unknown})"
    if fraction <= _NOTHING:
        return f"{show_bytes(extra_bytes)} more memory buys nothing{doubt}"
    unit = throughput_unit([after])
    return (
        f"{show_bytes(extra_bytes)} more memory buys {gained:,.0f} {unit} ({show_percent(fraction)}){doubt}: "
        f"{what_changes(before, after)}"
    )


def what_changes(before: Plan, after: Plan) -> str:
    """Return in a few words how the second plan differs from the first."""
    pairs = zip(_PLAN_COLUMNS, _in_short(before), _in_short(after), strict=True)
    changes = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    return "; ".join(changes) or "other layers under the same strategies"


def reason_lines(reasons: Sequence[str]) -> list[str]:
    """Return reasons as lines, the first few of them."""
    lines = [f"  {reason}" for reason in reasons[:_SHOWN_REASONS]]
    return lines if len(reasons) <= _SHOWN_REASONS else [*lines, f"  and {len(reasons) - _SHOWN_REASONS} more"]


def fixes_table(rows: Iterable[tuple[str, Sequence[str], Sequence[str], Plan]]) -> Table:
    """Return changes that make it fit: (what, options to type, options to leave out, the plan that it gives)."""
    rows = list(rows)
    unit = throughput_unit(plan for *_, plan in rows)
    table = plain_table("what would fit", "type", "step", unit, *_PLAN_COLUMNS)
    for what, options, leave_out, plan in rows:
        typed = " ".join(options) + (f" (without {', '.join(leave_out)})" if leave_out else "")
        cells = (show_seconds(_predicted(plan).step_s), throughput_cell(plan))
        table.add_row(what, typed or "-", *cells, *_in_short(plan))
    return table


def need_matplotlib() -> None:
    """Raise UserError when no picture can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('png: needs matplotlib: pip install "meshwright[plot]"')


def save_curve(points: Sequence[tuple[int, Plan]], own_bytes: int, path: Path) -> None:
    """Draw throughput over memory to a PNG file."""
    need_matplotlib()
    from matplotlib.figure import Figure  # only who wants a picture needs it

    plan = points[0][1]
    memory_gib = [memory_bytes / GiB for memory_bytes, _ in points]
    per_s = [shown_per_s(plan) for _, plan in points]
    figure: Any = Figure(figsize=_INCHES, layout="constrained")  # its methods are annotated in part only
    axes = figure.add_subplot()
    # Between two budgets the plan for the smaller one is what is known to fit.
    axes.step(memory_gib, per_s, where="post", marker="o")
    axes.axvline(own_bytes / GiB, linestyle=":", color="grey", label="budget of the plan")
    axes.set_xlabel("memory of a device (GiB)")
    axes.set_ylabel(f"{throughput_unit([plan])} (predicted)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{plan.model.name} on {plan.cluster.name}, batch {plan.global_batch_size} x {plan.job.seq_len}")
    axes.legend(loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


_PLAN_COLUMNS = ("layers by stage", "micro-batches", "strategies")


def _in_short(plan: Plan) -> tuple[str, str, str]:
    return (
        "+".join(str(stage.num_layers) for stage in plan.stages),
        str(plan.num_micro_batches),
        ", ".join(strategy.label for strategy in dict.fromkeys(plan.strategies)),
    )


def _more(seconds: float, step_s: float) -> str:
    """Return a difference of seconds with its sign; what is rounding is nothing."""
    if abs(seconds) <= _NOTHING * step_s:
        return "0"
    return ("+" if seconds > 0 else "-") + show_seconds(abs(seconds))


def _share(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans, and given ones are checked
    return plan.predicted
