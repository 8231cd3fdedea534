"""meshwright tune: run the best few plans briefly on real ranks, and keep the one that is fastest there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, note, show_json, show_line, show_view
from meshwright.cli.need_torch import need_torch
from meshwright.cli.one_voice import one_voice
from meshwright.cli.options import (
    BatchOption,
    ClusterOption,
    DropoutOption,
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
    TargetSeqLenOption,
    TimeLimitOption,
    check_search,
)
from meshwright.cli.trials import run_trials_as_rank, run_trials_here
from meshwright.errors import UserError
from meshwright.report.trials import trials_table, winner
from meshwright.search import planner
from meshwright.search.engine import DEFAULT_TIME_LIMIT_S, Infeasible, Request
from meshwright.search.finalists import finalists
from meshwright.spec.plan import Plan
from meshwright.spec.trial import Trial, Trials


class NothingFitsError(UserError):
    """An answer, and a no."""

    exit_code = 1


def tune(
    model: ModelOption,
    cluster: ClusterOption,
    global_batch: BatchOption,
    seq_len: SeqLenOption = None,
    target_seq_len: TargetSeqLenOption = None,
    local: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to run.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each plan.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps a turn.")] = 3,
    memory: MemoryOption = None,
    reserve: ReserveOption = None,
    dtype: DtypeOption = "bf16",
    dropout: DropoutOption = 0.0,
    profile: ProfileOption = None,
    space: SpaceOption = "full",
    schedule: ScheduleOption = "1f1b",
    stages: StagesOption = None,
    micro_batches: MicroBatchesOption = None,
    time_limit: TimeLimitOption = DEFAULT_TIME_LIMIT_S,
    output: PlanOutputOption = None,
    json: JsonFlag = False,
) -> None:
    """Find the best plans, run each for a few steps on real ranks, and keep the fastest.

    The cure for what the cost model gets wrong on this machine. Start it with torchrun, or with
    --local N for N ranks here; it trains on random tokens and keeps nothing of the weights.
    """
    check_search(time_limit, output)
    request = planner.make_request(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        target_seq_len=target_seq_len,
        memory=memory,
        reserve=reserve,
        dtype=dtype,
        dropout=dropout,
        profile=profile,
        space=space,
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        time_limit_s=time_limit,
    )
    need_torch("tune")
    _check_ranks(request.cluster.num_devices, local)
    trials = _tune_as_rank(request, top, rounds, steps) if local is None else _tune_here(request, top, rounds, steps)
    if trials is not None:
        _show(trials, output, as_json=json)


def _check_ranks(num_devices: int, local: int | None) -> None:
    if local is None:
        from meshwright.runtime.launch import check_world_size

        check_world_size(num_devices)
    elif local != num_devices:
        raise UserError(f"local: the cluster has {num_devices} devices, not {local}; use --local {num_devices}")


def _tune_here(request: Request, top: int, rounds: int, steps: int) -> Trials:
    return run_trials_here(_finalists(request, top), rounds=rounds, steps=steps)


def _tune_as_rank(request: Request, top: int, rounds: int, steps: int) -> Trials | None:
    """Tune on this rank; the first one searches for all, since a search that runs out of time may end elsewhere."""
    import torch

    from meshwright.runtime.first_rank import is_first_rank
    from meshwright.runtime.supervise import TIMEOUT_S, supervised
    from meshwright.runtime.watchdog import Progress

    def work(device: torch.device, progress: Progress) -> Trials | None:
        progress.begin("searching")
        plans = _finalists(request, top) if is_first_rank() else None
        return run_trials_as_rank(plans, device, progress, rounds=rounds, steps=steps)

    # The others wait for the first one's search.
    timeout_s = TIMEOUT_S + math.ceil(2 * request.time_limit_s)
    with one_voice():
        return supervised(work, request.cluster.device.backend, timeout_s=timeout_s)


def _finalists(request: Request, top: int) -> tuple[Plan, ...]:
    plans = finalists(request, top)
    if isinstance(plans, Infeasible):
        raise NothingFitsError(f"nothing fits: {plans.reason}; meshwright plan with the same options says more")
    note(f"{len(plans)} plans to run")
    return plans


def _show(trials: Trials, output: Path | None, *, as_json: bool) -> None:
    best = winner(trials)
    if as_json:
        number = None if best is None else trials.trials.index(best)
        show_json({"winner": number, "trials": [one.model_dump(mode="json") for one in trials.trials]})
    else:
        show_view(trials_table(trials, best))
    if best is None:
        show_line("no plan ran to its end within its budget")
        raise typer.Exit(1)
    if not as_json:
        show_line(_verdict(trials, best))
    if output is not None:
        planner.save_plan(best.plan, output)
        note(f"the fastest plan is written to {output}")


def _verdict(trials: Trials, best: Trial) -> str:
    """Return in words whether the trials bear out the search's choice."""
    first, number = trials.trials[0], trials.trials.index(best) + 1
    if best is first:
        return "the plan that the search chose is the fastest of those that ran"
    if not first.has_run:
        return f"the plan that the search chose did not run; {number} is the fastest of the others"
    gain = (first.median_s / first.plan.global_batch_size) / (best.median_s / best.plan.global_batch_size) - 1
    return f"plan {number} is {100 * gain:.1f} % faster a sample than the one that the search chose"
