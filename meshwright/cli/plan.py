"""meshwright plan: find the fastest plan."""

from __future__ import annotations

import signal
from dataclasses import asdict

import typer

from meshwright.cli.common import STOPPED_FROM, JsonFlag, note, show_json, show_line, show_view
from meshwright.cli.options import (
    AlgorithmOption,
    BatchOption,
    CalibrationOption,
    ClusterOption,
    ConfidenceOption,
    DropoutOption,
    DtypeOption,
    MemoryOption,
    MicroBatchesOption,
    ModelOption,
    PartitionOption,
    PlanOutputOption,
    ProfileOption,
    ReserveOption,
    ScheduleOption,
    SeqLenOption,
    SpaceOption,
    StagesOption,
    TargetSeqLenOption,
    TimeLimitOption,
    WithoutRuleOption,
    WithRuleOption,
    check_search,
)
from meshwright.cli.progress import shown_progress
from meshwright.errors import UserError
from meshwright.report.explain import fixes_table, memory_terms_table
from meshwright.report.search import balance_table
from meshwright.report.text import comparison_table, plan_view, proof_line, summary_line, why_it_loses
from meshwright.search import planner
from meshwright.search.balance import stage_sizes
from meshwright.search.engine import DEFAULT_TIME_LIMIT_S, Found, Infeasible, Request, search
from meshwright.search.explain import stages_bytes
from meshwright.search.fixes import fixes
from meshwright.spec.plan import Plan

_SHOWN_RUNNERS_UP = 3


def plan(
    model: ModelOption,
    cluster: ClusterOption,
    global_batch: BatchOption,
    seq_len: SeqLenOption = None,
    target_seq_len: TargetSeqLenOption = None,
    memory: MemoryOption = None,
    reserve: ReserveOption = None,
    memory_confidence: ConfidenceOption = None,
    dtype: DtypeOption = "bf16",
    dropout: DropoutOption = 0.0,
    profile: ProfileOption = None,
    calibration: CalibrationOption = None,
    space: SpaceOption = "full",
    partition: PartitionOption = None,
    algorithm: AlgorithmOption = "exact",
    with_rules: WithRuleOption = None,
    without_rules: WithoutRuleOption = None,
    schedule: ScheduleOption = "1f1b",
    stages: StagesOption = None,
    micro_batches: MicroBatchesOption = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT_S,
    output: PlanOutputOption = None,
    json: JsonFlag = False,
) -> None:
    """Find the fastest plan to train a model on a cluster within a memory budget. Needs no GPU and no torch."""
    check_search(time_limit, output)
    _check_together(algorithm, partition, with_rules or [], without_rules or [])
    request = planner.make_request(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        target_seq_len=target_seq_len,
        memory=memory,
        reserve=reserve,
        memory_confidence=memory_confidence,
        dtype=dtype,
        dropout=dropout,
        profile=profile,
        calibration=calibration,
        space=space,
        partition="bmw" if algorithm == "bmw" else partition,
        rules={**dict.fromkeys(with_rules or [], True), **dict.fromkeys(without_rules or [], False)},
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        time_limit_s=time_limit,
    )
    outcome = _searched(request)
    if isinstance(outcome, Infeasible):
        _show_infeasible(request, outcome, as_json=json)
        raise typer.Exit(1)
    if output is not None:
        planner.save_plan(outcome.plan, output)
    _show_found(outcome, as_json=json)
    if output is not None:
        note(f"plan written to {output}")


def _check_together(algorithm: str, partition: str | None, on: list[str], off: list[str]) -> None:
    """Raise UserError for options that exclude each other."""
    if algorithm == "bmw" and partition not in (None, "bmw"):
        raise UserError(f"partition: {partition} stages and algorithm bmw exclude each other; drop one of them")
    if both := sorted(set(on) & set(off)):
        raise UserError(f"with: rule {both[0]} is switched on and off; drop one of them")


def _searched(request: Request) -> Found | Infeasible:
    try:
        with shown_progress() as tell:
            return search(request, tell)
    except KeyboardInterrupt:
        note("stopped before there was a plan")
        raise typer.Exit(STOPPED_FROM + signal.SIGINT) from None


def _show_found(found: Found, *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "plan": found.plan.model_dump(mode="json"),
                "runners_up": [other.model_dump(mode="json") for other in found.runners_up],
                "tried": [asdict(tried) for tried in found.tried],
                "search_s": found.search_s,
                "stopped": found.stopped,
                "exact": None if found.exact is None else found.exact.model_dump(mode="json"),
                "balances": [asdict(balance) for balance in found.balances],
            }
        )
        return
    show_view(plan_view(found.plan))
    if found.stopped:
        proof = found.plan.proof
        how_good = "with its gap" if proof is None or proof.gap else "and other batch sizes may be better"
        show_line(f"stopped by the {found.stopped}: this is the best plan so far, {how_good}")
    solved = sum(tried.step_s is not None for tried in found.tried)
    if found.exact is not None:
        _show_loop(found, found.exact)
    rest = "the rest was not decided or cannot win" if found.stopped else "the rest cannot win"
    show_line(f"searched {len(found.tried)} settings in {found.search_s:.2f} s; {solved} solved, {rest}")
    if found.runners_up:
        shown = found.runners_up[:_SHOWN_RUNNERS_UP]
        rows = [(f"{i + 2}.", other, why_it_loses(other, found.plan)) for i, other in enumerate(shown)]
        show_view(comparison_table([("best", found.plan, ""), *rows]))


def _show_loop(found: Found, exact: Plan) -> None:
    if found.balances:
        rows = ((one.name, stage_sizes(one.boundaries), one.alpha_t, one.alpha_m) for one in found.balances)
        show_view(balance_table(rows))
    loses = why_it_loses(found.plan, exact)
    show_line(f"the exact search over the same strategies: {summary_line(exact)}")
    show_view(comparison_table([("loop", found.plan, loses), ("exact", exact, proof_line(exact))]))


def _show_infeasible(request: Request, outcome: Infeasible, *, as_json: bool) -> None:
    changes = fixes(request, outcome)
    if as_json:
        show_json(
            {
                "infeasible": outcome.reason,
                "shortfall_bytes": list(outcome.shortfall_bytes),
                "nearest": None if outcome.nearest is None else outcome.nearest.model_dump(mode="json"),
                "fixes": [{**asdict(fix), "plan": fix.plan.model_dump(mode="json")} for fix in changes],
            }
        )
        return
    show_line(f"nothing fits: {outcome.reason}")
    if outcome.nearest is not None:
        show_line("the plan that comes nearest:")
        show_view(plan_view(outcome.nearest))
        show_view(memory_terms_table(stages_bytes(outcome.nearest), outcome.shortfall_bytes))
    if changes:
        show_line("what would make it fit, each tried by a search:")
        show_view(fixes_table((fix.what, fix.options, fix.leave_out, fix.plan) for fix in changes))
    else:
        show_line("nothing that was tried makes it fit: more memory or devices, a smaller batch, another space")
