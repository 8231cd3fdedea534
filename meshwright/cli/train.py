"""meshwright train: train with a plan, under torchrun or with ranks started here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import note, show_line
from meshwright.cli.need_torch import need_torch
from meshwright.errors import UserError
from meshwright.search.planner import load_plan

_DEFAULT_DATA = ["stdlib"]  # typer copies it


def train(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    data: Annotated[list[str], typer.Option(help="Text files, folders, .jsonl files, or stdlib.")] = _DEFAULT_DATA,
    tokenizer: Annotated[str, typer.Option(help="bytes, or a tokenizer.json.")] = "bytes",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all, resumed ones included.")] = 100,
    stop_at: Annotated[int | None, typer.Option(min=1, help="Stop (and save) at this step already.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Where plan, metrics, events and checkpoints go.")] = Path("runs/train"),
    local: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and of the order of the data.")] = 0,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the data held out.")] = 0.05,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between held-out losses (0: at the end).")] = 0,
    eval_samples: Annotated[int, typer.Option(min=0, help="Held-out samples to use at most.")] = 64,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints (0: at the end).")] = 0,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between metrics.")] = 1,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint, or a run folder to go on from.")] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where tokens are kept.")] = Path("runs/cache"),
    timeout: Annotated[int, typer.Option(min=1, help="Seconds a rank waits for another.")] = 600,
) -> None:
    """Train with a plan. Start it with torchrun, or with --local N for N ranks on this machine."""
    loaded = load_plan(plan)
    need_torch("train")
    from meshwright.runtime.checkpoint import check_model, find_checkpoint
    from meshwright.runtime.launch import check_devices, launch_local
    from meshwright.runtime.parallelize import refuse_what_cannot_run
    from meshwright.runtime.train import TrainOptions, prepare_data
    from meshwright.runtime.train import train as run

    options = TrainOptions(
        data=tuple(data),
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
        timeout_s=timeout,
    )
    if local is None:
        run(loaded, options, show=show_line)
        return
    # What can be refused is refused here, once, before any rank starts.
    if local != loaded.num_devices:
        raise UserError(
            f"local: the plan is for {loaded.num_devices} ranks, not {local}; use --local {loaded.num_devices}"
        )
    refuse_what_cannot_run(loaded)
    check_devices(loaded.cluster.device.backend, local)
    if resume is not None:
        check_model(find_checkpoint(resume, note), loaded.model)
    prepare_data(loaded, options)
    raise typer.Exit(launch_local(local, _arguments(plan, options)))


def _arguments(plan: Path, options: object) -> list[str]:
    """Return the command line that repeats this call on one rank."""
    from meshwright.runtime.train import TrainOptions

    assert isinstance(options, TrainOptions)  # noqa: S101 made above
    arguments = ["train", str(plan)]
    for source in options.data:
        arguments += ["--data", source]
    values = {
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
        "--cache-dir": options.cache_dir,
        "--timeout": options.timeout_s,
    }
    for name, value in values.items():
        if value is not None:
            arguments += [name, str(value)]
    return arguments
