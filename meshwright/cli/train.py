"""meshwright train: train with a plan, under torchrun or with ranks started here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from meshwright.cli.common import note, show_line
from meshwright.cli.need_torch import need_torch
from meshwright.cli.one_voice import one_voice
from meshwright.errors import UserError
from meshwright.files import check_writable
from meshwright.search.planner import load_plan
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.runtime.train import TrainOptions

TaskName = Literal["causal", "masked", "spans", "images", "labelled-text"]  # as runtime.data.task, which needs torch
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Text files, folders, .jsonl files, one token file, or stdlib (the default for text); for images a "
        "folder of classes, an .npz, two .npy, or digits (the default)."
    ),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option(help="Where plan, metrics, events and checkpoints go (default: runs/train, or what is resumed)."),
]
InitFromOption = Annotated[
    Path | None, typer.Option(help="A Hugging Face folder (config.json, safetensors) to begin from.")
]
NewHeadOption = Annotated[
    bool, typer.Option("--new-head", help="Draw a head that the folder lacks, or has of another size.")
]


def train(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    data: DataOption = None,
    task: Annotated[TaskName | None, typer.Option(help="What is trained (default: what the model is for).")] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes, a tokenizer.json, a vocab.txt, or their folder.")] = "bytes",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all, resumed ones included.")] = 100,
    stop_at: Annotated[int | None, typer.Option(min=1, help="Stop (and save) at this step already.")] = None,
    run_dir: RunDirOption = None,
    local: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and of the order of the data.")] = 0,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the data held out.")] = 0.05,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between held-out losses (0: at the end).")] = 0,
    eval_samples: Annotated[int, typer.Option(min=0, help="Held-out samples to use at most.")] = 64,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints (0: at the end).")] = 0,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between metrics.")] = 1,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint, or a run folder to go on from.")] = None,
    init_from: InitFromOption = None,
    new_head: NewHeadOption = False,
    cache_dir: Annotated[Path, typer.Option(help="Where tokens are kept.")] = Path("runs/cache"),
    timeout: Annotated[int, typer.Option(min=1, help="Seconds without progress that mean a hang.")] = 600,
) -> None:
    """Train with a plan. Start it with torchrun, or with --local N for N ranks on this machine."""
    loaded = load_plan(plan)
    need_torch("train")
    from meshwright.runtime.checkpoint import refuse_another_run
    from meshwright.runtime.launch import launcher_speaks
    from meshwright.runtime.train import CHECKPOINTS, TrainOptions

    _check_beginning(resume, init_from, new_head=new_head)
    run_dir = run_dir or _run_dir(resume)
    options = TrainOptions(
        data=tuple(data or ()),
        task=task,
        run_dir=str(run_dir),
        num_steps=steps,
        stop_at=stop_at,
        tokenizer=tokenizer,
        cache_dir=str(cache_dir),
        seed=seed,
        held_out_fraction=held_out,
        eval_every=eval_every,
        eval_samples=eval_samples,
        save_every=save_every,
        log_every=log_every,
        resume=None if resume is None else str(resume),
        init_from=None if init_from is None else str(init_from),
        new_head=new_head,
        timeout_s=timeout,
    )
    if resume is None and os.environ.get("RANK", "0") == "0" and not launcher_speaks():
        refuse_another_run(run_dir, run_dir / CHECKPOINTS)
    if local is None:
        _run_rank(loaded, options)
        return
    raise typer.Exit(_start_ranks(plan, loaded, options, local))


def _check_beginning(resume: Path | None, init_from: Path | None, *, new_head: bool) -> None:
    if resume is not None and init_from is not None:
        raise UserError("init-from: a resumed run has its weights already; drop --init-from or --resume")
    if new_head and init_from is None:
        raise UserError("new-head: without --init-from every weight is new already; drop it")


def _run_dir(resume: Path | None) -> Path:
    """Return the run folder that a resumed run goes on in: the one that is named, or that of the checkpoint."""
    if resume is None:
        return Path("runs/train")
    return resume.parent.parent if resume.name.startswith("step-") else resume


def _start_ranks(path: Path, plan: Plan, options: TrainOptions, num_ranks: int) -> int:
    """Start the ranks on this machine; what can be refused is refused before. Returns the exit code."""
    from meshwright.runtime.begin import begin_from
    from meshwright.runtime.checkpoint import check_model, find_checkpoint
    from meshwright.runtime.launch import check_devices, launch_local
    from meshwright.runtime.parallelize import refuse_what_cannot_run
    from meshwright.runtime.train import prepare_data

    if num_ranks != plan.num_devices:
        raise UserError(
            f"local: the plan is for {plan.num_devices} ranks, not {num_ranks}; use --local {plan.num_devices}"
        )
    refuse_what_cannot_run(plan)
    check_devices(plan.cluster.device.backend, num_ranks)
    if options.resume is not None:
        check_model(find_checkpoint(Path(options.resume), note), plan.model)
    if options.init_from is not None:
        begin_from(options.init_from, plan.model, seed=options.seed, new_head=options.new_head)
    check_writable(Path(options.run_dir) / "metrics.jsonl")
    prepare_data(plan, options)
    return launch_local(num_ranks, _arguments(path, options))


def _run_rank(plan: Plan, options: TrainOptions) -> None:
    """Train as one rank. Exit codes: 128 + number of the signal that ended the run early, 1 when this rank broke."""
    from meshwright.runtime.train import train as run

    with one_voice():
        stopped_by = run(plan, options, show=show_line)
    if stopped_by:
        raise typer.Exit(128 + stopped_by)


def _arguments(plan: Path, options: TrainOptions) -> list[str]:
    """Return the command line that repeats this call on one rank."""
    arguments = ["train", str(plan)]
    for source in options.data:
        arguments += ["--data", source]
    values = {
        "--task": options.task,
        "--tokenizer": options.tokenizer,
        "--steps": options.num_steps,
        "--stop-at": options.stop_at,
        "--run-dir": options.run_dir,
        "--seed": options.seed,
        "--held-out": options.held_out_fraction,
        "--eval-every": options.eval_every,
        "--eval-samples": options.eval_samples,
        "--save-every": options.save_every,
        "--log-every": options.log_every,
        "--resume": options.resume,
        "--init-from": options.init_from,
        "--cache-dir": options.cache_dir,
        "--timeout": options.timeout_s,
    }
    for name, value in values.items():
        if value is not None:
            arguments += [name, str(value)]
    return [*arguments, "--new-head"] if options.new_head else arguments
