"""meshwright plan: find the fastest plan."""

from __future__ import annotations

from dataclasses import asdict

import typer

from meshwright.cli.common import JsonFlag, note, show_json, show_line, show_view
from meshwright.cli.options import (
    BatchOption,
    ClusterOption,
    DtypeOption,
    MemoryOption,
    MicroBatchesOption,
    ModelOption,
    PlanOutputOption,
    ProfileOption,
    ReserveOption,
    ScheduleOption,
    SeqLenOption,
    SpaceOption,
    StagesOption,
    TimeLimitOption,
    check_search,
)
from meshwright.report.text import comparison_table, plan_view, why_it_loses
from meshwright.search import planner
from meshwright.search.engine import DEFAULT_TIME_LIMIT_S, Found, Infeasible
from meshwright.units import show_bytes

_SHOWN_RUNNERS_UP = 3


def plan(
    model: ModelOption,
    cluster: ClusterOption,
    global_batch: BatchOption,
    seq_len: SeqLenOption,
    memory: MemoryOption = None,
    reserve: ReserveOption = None,
    dtype: DtypeOption = "bf16",
    profile: ProfileOption = None,
    space: SpaceOption = "full",
    schedule: ScheduleOption = "1f1b",
    stages: StagesOption = None,
    micro_batches: MicroBatchesOption = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT_S,
    output: PlanOutputOption = None,
    json: JsonFlag = False,
) -> None:
    """Find the fastest plan to train a model on a cluster within a memory budget. Needs no GPU and no torch."""
    check_search(time_limit, output)
    outcome = planner.plan(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        memory=memory,
        reserve=reserve,
        dtype=dtype,
        profile=profile,
        space=space,
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        time_limit_s=time_limit,
    )
    if isinstance(outcome, Infeasible):
        _show_infeasible(outcome, as_json=json)
        raise typer.Exit(1)
    if output is not None:
        planner.save_plan(outcome.plan, output)
    _show_found(outcome, as_json=json)
    if output is not None:
        note(f"plan written to {output}")


def _show_found(found: Found, *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "plan": found.plan.model_dump(mode="json"),
                "runners_up": [other.model_dump(mode="json") for other in found.runners_up],
                "tried": [asdict(tried) for tried in found.tried],
                "search_s": found.search_s,
            }
        )
        return
    show_view(plan_view(found.plan))
    solved = sum(tried.step_s is not None for tried in found.tried)
    show_line(f"searched {len(found.tried)} settings in {found.search_s:.2f} s; {solved} solved, the rest cannot win")
    if found.runners_up:
        shown = found.runners_up[:_SHOWN_RUNNERS_UP]
        rows = [(f"{i + 2}.", other, why_it_loses(other, found.plan)) for i, other in enumerate(shown)]
        show_view(comparison_table([("best", found.plan, ""), *rows]))


def _show_infeasible(outcome: Infeasible, *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "infeasible": outcome.reason,
                "shortfall_bytes": list(outcome.shortfall_bytes),
                "nearest": None if outcome.nearest is None else outcome.nearest.model_dump(mode="json"),
            }
        )
        return
    show_line(f"nothing fits: {outcome.reason}")
    if outcome.nearest is not None:
        show_line("the plan that comes nearest:")
        show_view(plan_view(outcome.nearest))
        for stage, short in enumerate(outcome.shortfall_bytes):
            show_line(f"stage {stage}: {show_bytes(short)} too much" if short else f"stage {stage}: fits")
