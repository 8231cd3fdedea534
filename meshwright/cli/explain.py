"""meshwright explain: why a plan is as it is, how two differ, why not another one."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from meshwright.cli.common import STOPPED_FROM, JsonFlag, note, show_json, show_line, show_view
from meshwright.cli.options import TimeLimitOption, check_search
from meshwright.cli.progress import shown_progress
from meshwright.errors import UserError
from meshwright.report.explain import (
    binding_sentence,
    curve_table,
    losses_sentence,
    losses_table,
    memory_terms_table,
    more_memory_sentence,
    need_matplotlib,
    reason_lines,
    save_curve,
    time_terms_table,
)
from meshwright.report.text import comparison_table, proof_line, summary_line
from meshwright.search import explain as questions
from meshwright.search.engine import DEFAULT_TIME_LIMIT_S
from meshwright.search.planner import load_plan
from meshwright.search.wanted import parse_wanted
from meshwright.spec.plan import Plan

_QUESTION = ("model", "cluster", "job")  # the same in every plan that explains one; left out of JSON


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan file with a prediction.")],
    other: Annotated[Path | None, typer.Argument(help="A second plan file, to hold against the first.")] = None,
    why_not: Annotated[
        str | None, typer.Option(help="Why blocks are not so: 'tp=8 pp=2 zero=3 recompute=none m=16', or some of it.")
    ] = None,
    no_curve: Annotated[bool, typer.Option("--no-curve", help="Do not search at other memory budgets.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw throughput over memory to this file.")] = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT_S,
    json: JsonFlag = False,
) -> None:
    """Explain a plan: what binds it, what the next best lose, what memory buys; or two plans; or why not another."""
    _check(other, why_not, no_curve=no_curve, png=png, time_limit_s=time_limit)
    wanted = None if why_not is None else parse_wanted(why_not)
    first = _load(plan)
    if other is not None:
        _explain_two(first, _load(other), (str(plan), str(other)), as_json=json)
        return
    try:
        if wanted is not None:
            _show_why_not(first, questions.why_not(first, wanted, time_limit_s=time_limit), as_json=json)
            return
        with shown_progress() as tell:
            found = questions.explain(first, time_limit_s=time_limit, curve=not no_curve, progress=tell)
    except KeyboardInterrupt:
        note("stopped before there was an answer")
        raise typer.Exit(STOPPED_FROM + signal.SIGINT) from None
    if png is not None:
        _draw(found, png)
    _show_explanation(found, curve=not no_curve, as_json=json)


def _check(other: Path | None, why_not: str | None, *, no_curve: bool, png: Path | None, time_limit_s: float) -> None:
    """Raise UserError for what is wrong before a search is worth its time."""
    check_search(time_limit_s, png)
    if other is not None and why_not is not None:
        raise UserError("why-not: is asked of one plan, and two are given; leave one out")
    if png is not None and (no_curve or other is not None or why_not is not None):
        raise UserError("png: draws the curve over memory of one plan; leave out --no-curve, --why-not and the second")
    if png is not None:
        need_matplotlib()


def _load(path: Path) -> Plan:
    loaded = load_plan(path)
    questions.check_plan(loaded, where=str(path))
    return loaded


def _draw(found: questions.Explanation, path: Path) -> None:
    if not found.curve:
        raise UserError(f"png: there is no curve to draw: no plan fits a {found.plan.cluster.device.name}")
    save_curve([(point.memory_bytes, point.plan) for point in found.curve], found.plan.budget.memory_bytes, path)


def _show_explanation(found: questions.Explanation, *, curve: bool, as_json: bool) -> None:
    if as_json:
        show_json(_as_data(found))
        return
    plan = found.plan
    show_line(summary_line(plan))
    show_line(proof_line(plan))
    _show_binding(plan, found.binding)
    _show_losses(found)
    if curve:
        _show_curve(found)
    if found.cut_short:
        show_line(
            f"\nnot finished within the time limit: {'; '.join(found.cut_short)}; a longer --time-limit tells more"
        )


def _show_curve(found: questions.Explanation) -> None:
    plan = found.plan
    if not found.curve:
        show_line(f"no plan fits in the memory of a {plan.cluster.device.name}")
        return
    show_line("\nthe best plan by memory of a device:")
    rows = [(point.memory_bytes, point.plan, point.carried, point.gap) for point in found.curve]
    show_view(curve_table(rows, plan.budget.memory_bytes))
    more = found.more_memory
    if more is not None:
        show_line(more_memory_sentence(more.extra_bytes, more.before, more.after, more.gap))


def _show_binding(plan: Plan, binding: questions.Binding) -> None:
    show_line("\n" + binding_sentence(plan, binding.what, binding.stage, binding.term, binding.share))
    if binding.what == "memory":
        show_view(memory_terms_table(binding.stages_bytes))
    else:
        show_view(time_terms_table(binding.stages_s))


def _show_losses(found: questions.Explanation) -> None:
    if not found.others:
        show_line("\nthe search finds no other plan within this budget")
        return
    plan = found.plan
    faster = [one for one in found.others if one.slower_s < 0]
    if faster:
        show_line(f"\nthe search now finds a faster plan: it {_sentence(faster[0])}")
    else:
        show_line("\nthe next best plans, of other stages or micro-batches, and what they take more:")
    mine = questions.slowest_s(plan)
    rows = [
        ("faster" if one.slower_s < 0 else f"{i + 2}.", one.plan, one.terms_s) for i, one in enumerate(found.others)
    ]
    show_view(losses_table(plan, mine, rows))


def _explain_two(first: Plan, second: Plan, names: tuple[str, str], *, as_json: bool) -> None:
    found = questions.compare(first, second)
    if as_json:
        show_json(_as_data(found))
        return
    show_line("they are for different things:" if found.differs else "they are for the same model, cluster and job")
    for line in reason_lines(found.differs):
        show_line(line)
    sides = ((names[0], first, found.first), (names[1], second, found.second))
    show_view(comparison_table([(name, plan, proof_line(plan)) for name, plan, _ in sides]))
    show_line(f"\n{names[1]} {_sentence(found.against)}")
    show_view(losses_table(first, questions.slowest_s(first), [("second", second, found.against.terms_s)]))
    for name, plan, binding in sides:
        show_line(f"\n{name}: {binding_sentence(plan, binding.what, binding.stage, binding.term, binding.share)}")
        show_view(memory_terms_table(binding.stages_bytes))


def _show_why_not(plan: Plan, answer: questions.WhyNot, *, as_json: bool) -> None:
    if as_json:
        show_json(_as_data(answer))
        return
    text = answer.wanted
    match answer.verdict:
        case "already so":
            show_line(f"{text}: the plan already is so")
        case "illegal":
            show_line(f"{text}: cannot be run")
        case "not in the space":
            show_line(f"{text}: was not considered")
        case "does not fit":
            show_line(f"{text}: does not fit")
        case verdict:
            _show_held(plan, answer, verdict)
    for line in reason_lines(answer.reasons):
        show_line(line)
    if answer.stages_bytes:
        show_line("the plan of this kind that comes nearest:")
        show_view(memory_terms_table(answer.stages_bytes, answer.over_bytes))


def _show_held(plan: Plan, answer: questions.WhyNot, verdict: str) -> None:
    if answer.against is None or answer.plan is None:
        return
    show_line(f"{answer.wanted}: the best such plan {_sentence(answer.against)}")
    if verdict == "faster":
        show_line("the plan given is not the best one: plan again, perhaps with a longer --time-limit")
    show_line(f"of plans with {answer.wanted}, it is {proof_line(answer.plan)}")
    show_view(losses_table(plan, questions.slowest_s(plan), [("why not", answer.plan, answer.against.terms_s)]))


def _sentence(held: questions.Against) -> str:
    return losses_sentence(held.slower_fraction, held.slower_s, held.terms_s)


def _as_data(value: object) -> Any:
    """Return an answer as plain data. Plans are without what all of them share: model, cluster and job."""
    if isinstance(value, Plan):
        return value.model_dump(mode="json", exclude=set(_QUESTION))
    if is_dataclass(value):
        return {field.name: _as_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _as_data(item) for key, item in cast("Mapping[Any, object]", value).items()}
    if isinstance(value, tuple):
        return [_as_data(item) for item in cast("tuple[object, ...]", value)]
    return value
