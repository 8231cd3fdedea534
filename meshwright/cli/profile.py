"""meshwright profile: measure this machine's rates with all ranks busy."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from meshwright.cli.common import STOPPED_FROM, note
from meshwright.cli.need_torch import need_torch
from meshwright.cli.one_voice import one_voice
from meshwright.errors import UserError
from meshwright.files import check_writable, read_spec, sha256, write_spec
from meshwright.spec import library
from meshwright.spec.base import Dtype
from meshwright.spec.job import JobSpec, parse_batch
from meshwright.spec.model import ModelSpec
from meshwright.spec.profile import Profile

if TYPE_CHECKING:
    from meshwright.measure.profile import Question

_WIDE_SPREAD, _SHARE_VARYING = 0.5, 0.2


def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile to this file.")],
    local: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    backend: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the ranks compute on.")] = "cpu",
    model: Annotated[str | None, typer.Option(help="Also measure the layers of this model.")] = None,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples a step at most, for the layers.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens a sample, for the layers.")] = 512,
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Dtype that layers compute in.")] = "bf16",
    timeout: Annotated[int, typer.Option(min=1, help="Seconds without progress that mean a hang.")] = 600,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure all again, also what the file has.")] = False,
) -> None:
    """Measure this machine with all ranks busy; `plan --profile` uses it.

    Matrix products, copies, launches, the optimizer, collectives, and what compute and communication
    take from each other; with --model also its layers on the shapes that a plan for this many ranks
    can give them. Several machines: start it with torchrun. An interrupted run is gone on with by the
    same command.
    """
    spec = None if model is None else library.model(model)
    if spec is not None and spec.max_seq_len and seq_len > spec.max_seq_len:
        raise UserError(f"seq-len: {seq_len} is above what {spec.name} has positions for ({spec.max_seq_len})")
    parse_batch(str(global_batch))
    check_writable(output)
    previous = None if fresh or not output.exists() else read_spec(Profile, output)
    need_torch("profile")
    from meshwright.runtime.launch import check_devices, launch_local

    if local is None:
        _measure(output, backend, spec, global_batch, seq_len, dtype, previous, timeout)
        return
    check_devices(backend, local)
    arguments = ["profile", "-o", str(output), "--backend", backend, "--dtype", dtype]
    arguments += ["--global-batch", str(global_batch), "--seq-len", str(seq_len)]
    arguments += [] if model is None else ["--model", model]
    arguments += ["--timeout", str(timeout), *(["--fresh"] if fresh else [])]
    code = launch_local(local, arguments)
    if code > STOPPED_FROM and output.exists():
        kept = read_spec(Profile, output)
        if not kept.is_complete:
            again = "the same command without --fresh" if fresh else "the same command"
            note(f"{len(kept.samples)} samples are kept in {output}; {again} goes on from there")
    raise typer.Exit(code)


def _measure(
    output: Path,
    backend: Literal["cpu", "cuda"],
    model: ModelSpec | None,
    global_batch: int,
    seq_len: int,
    dtype: Dtype,
    previous: Profile | None,
    timeout_s: int,
) -> None:
    """Measure on this rank."""
    import torch

    from meshwright.measure.profile import measure_profile
    from meshwright.runtime.first_rank import from_first_rank, on_first_rank
    from meshwright.runtime.supervise import supervised
    from meshwright.runtime.watchdog import Progress

    def work(device: torch.device, progress: Progress) -> None:
        # On other machines there may be another file, or none.
        held = from_first_rank(None if previous is None else previous.model_dump_json())
        show = on_first_rank(note)

        def show_progress(line: str) -> None:
            progress.begin(line)
            show(line)

        measured = measure_profile(
            device,
            _device_name(backend),
            _question(model, global_batch, seq_len, dtype),
            previous=None if held is None else Profile.model_validate_json(held),
            show=show_progress,
            keep=on_first_rank(lambda found: write_spec(found, output)),
        )
        show(f"{len(measured.samples)} samples written to {output}")
        varying = sum(sample.spread > _WIDE_SPREAD for sample in measured.samples)
        if varying > _SHARE_VARYING * len(measured.samples):
            show(
                f"{varying} of them vary by more than {100 * _WIDE_SPREAD:.0f} %: is the machine busy? "
                "Measure again with --fresh when it is quiet"
            )

    terms = {"model": "" if model is None else sha256(model), "job": f"{global_batch} {seq_len} {dtype}"}
    with one_voice():
        supervised(work, backend, timeout_s=timeout_s, terms=terms)


def _question(model: ModelSpec | None, global_batch: int, seq_len: int, dtype: Dtype) -> Question:
    from meshwright.measure.profile import Question

    job = JobSpec(global_batch_size=global_batch, seq_len=seq_len, param_dtype=dtype)
    return Question(model=model, job=job, batch=global_batch)


def _device_name(backend: str) -> str:
    if backend == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()
