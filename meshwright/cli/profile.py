"""meshwright profile: measure this machine's rates with all ranks busy."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.common import note
from meshwright.cli.need_torch import need_torch
from meshwright.errors import UserError
from meshwright.files import write_spec
from meshwright.spec import library


def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile to this file.")],
    local: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    backend: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the ranks compute on.")] = "cpu",
    model: Annotated[str | None, typer.Option(help="Also measure the layers of this model.")] = None,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples a step, for the layers.")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens a sample, for the layers.")] = 512,
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Dtype that layers compute in.")] = "bf16",
) -> None:
    """Measure this machine with all ranks busy; `plan --profile` uses it.

    Matrix products, copies, launches and collectives; with --model also forward and backward of its
    layers on the shapes that a plan for this many ranks can give them.
    """
    spec = None if model is None else library.model(model)
    if spec is not None and spec.max_seq_len and seq_len > spec.max_seq_len:
        raise UserError(f"seq-len: {seq_len} is above what {spec.name} has positions for ({spec.max_seq_len})")
    need_torch("profile")
    from meshwright.measure.profile import measure_profile
    from meshwright.runtime.launch import check_devices, join, launch_local, leave

    if local is not None:
        check_devices(backend, local)
        arguments = ["profile", "-o", str(output), "--backend", backend, "--dtype", dtype]
        arguments += ["--global-batch", str(global_batch), "--seq-len", str(seq_len)]
        arguments += [] if model is None else ["--model", model]
        raise typer.Exit(launch_local(local, arguments))
    device = join(backend)
    try:
        is_first = int(os.environ["RANK"]) == 0
        measured = measure_profile(
            device,
            platform.processor() or platform.machine(),
            model=spec,
            batch=global_batch,
            seq_len=seq_len,
            dtype=dtype,
            show=note if is_first else _say_nothing,
        )
        if is_first:
            write_spec(measured, output)
            note(f"profile written to {output}")
    finally:
        leave()


def _say_nothing(_line: str) -> None:
    pass
