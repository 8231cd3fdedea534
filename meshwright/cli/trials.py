"""Run plans briefly on real ranks: on this machine, or on the ranks of a job that torchrun started.

On this machine the ranks read the trials from a file and write them back turn by turn. A plan that
breaks its ranks (out of memory, a bug) is marked as failed, and the job is started again for the rest.
On CPU ranks peak memory comes from a run of its own, in which freed memory is given back at once;
that run is slower, so its times do not count.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import BAD_INPUT, STOPPED_FROM, note
from meshwright.cli.need_torch import need_torch
from meshwright.cli.one_voice import one_voice
from meshwright.files import read_spec, write_spec
from meshwright.spec.plan import Plan
from meshwright.spec.trial import Trial, Trials

if TYPE_CHECKING:
    import torch

    from meshwright.runtime.watchdog import Progress

_GIVE_BACK_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000"}  # docs/log.md says why


def run_trials_here(plans: tuple[Plan, ...], *, rounds: int, steps: int, with_memory: bool = True) -> Trials:
    """Start ranks on this machine and return the trials of `plans`, all for equally many devices.

    Without `with_memory` the peak of a CPU rank is what the allocator held.
    """
    need_torch("trials")
    from meshwright.runtime.launch import check_devices
    from meshwright.runtime.parallelize import refuse_what_cannot_run

    for plan in plans:
        refuse_what_cannot_run(plan)
    backend = plans[0].cluster.device.backend
    check_devices(backend, plans[0].num_devices)
    blank = Trials.of(plans)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / "trials.json"
        trials = _until_all_ran(blank, path, rounds=rounds, steps=steps)
        if backend == "cuda" or not with_memory:
            return trials
        note("peak memory, in a run of its own")
        with _environment(_GIVE_BACK_MEMORY):
            blank = Trials(trials=tuple(Trial(plan=one.plan, failure=one.failure) for one in trials.trials))
            peaks = _until_all_ran(blank, path, rounds=1, steps=1)
    both = zip(trials.trials, peaks.trials, strict=True)
    return Trials(trials=tuple(one.model_copy(update={"peak_bytes": peak.peak_bytes}) for one, peak in both))


def run_trials_as_rank(
    plans: tuple[Plan, ...] | None, device: torch.device, progress: Progress, *, rounds: int, steps: int
) -> Trials | None:
    """Return the trials of the plans that the first rank gives: on the first rank, None on the others."""
    from meshwright.measure.trials import run_trials
    from meshwright.runtime.first_rank import from_first_rank, is_first_rank, on_first_rank

    given = None if plans is None else Trials.of(plans).model_dump_json()
    held = from_first_rank(given)
    if held is None:
        return None
    trials = Trials.model_validate_json(held)
    show = on_first_rank(note)
    found = run_trials(trials, device, rounds=rounds, steps=steps, progress=progress, show=show, keep=lambda _: None)
    return found if is_first_rank() else None


def trials_of_file(
    path: Annotated[Path, typer.Argument()],
    rounds: Annotated[int, typer.Option(min=1)],
    steps: Annotated[int, typer.Option(min=1)],
) -> None:
    """Run one rank of the trials in a file, and write what came of them back into it."""
    trials = read_spec(Trials, path)

    from meshwright.measure.trials import run_trials
    from meshwright.runtime.first_rank import on_first_rank
    from meshwright.runtime.supervise import supervised

    def work(device: torch.device, progress: Progress) -> None:
        run_trials(
            trials,
            device,
            rounds=rounds,
            steps=steps,
            progress=progress,
            show=on_first_rank(note),
            keep=on_first_rank(lambda done: write_spec(done, path)),
        )

    with one_voice():
        supervised(work, trials.trials[0].plan.cluster.device.backend)


def _until_all_ran(trials: Trials, path: Path, *, rounds: int, steps: int) -> Trials:
    """Start the ranks, and again without a plan that broke them, until every plan has run or failed."""
    from meshwright.runtime.launch import launch_local

    num_ranks = trials.trials[0].plan.num_devices
    while any(one.failure is None and len(one.step_s) < rounds for one in trials.trials):
        write_spec(trials, path)
        code = launch_local(num_ranks, ["run-trials", str(path), "--rounds", str(rounds), "--steps", str(steps)])
        trials = read_spec(Trials, path)
        if code == 0:
            continue
        if trials.running is None or code > STOPPED_FROM or code == BAD_INPUT:
            raise typer.Exit(code)  # the ranks have said why
        broken = trials.trials[trials.running].model_copy(update={"failure": "broke its ranks"})
        note(f"plan {trials.running + 1} broke its ranks; going on without it")
        trials = trials.with_trial(trials.running, broken)
    return trials


@contextmanager
def _environment(values: dict[str, str]) -> Generator[None]:
    """Set variables for the ranks started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
