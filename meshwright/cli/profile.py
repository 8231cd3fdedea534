"""meshwright profile: measure this machine's rates with all ranks busy."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.common import note
from meshwright.cli.need_torch import need_torch
from meshwright.files import write_spec


def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile to this file.")],
    local: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None,
    backend: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the ranks compute on.")] = "cpu",
) -> None:
    """Measure matrix products, copies, launches and collectives with all ranks busy; `plan --profile` uses them."""
    need_torch("profile")
    from meshwright.measure.rates import measure_rates
    from meshwright.runtime.launch import join, launch_local, leave

    if local is not None:
        arguments = ["profile", "-o", str(output), "--backend", backend]
        raise typer.Exit(launch_local(local, arguments))
    device = join(backend)
    try:
        measured = measure_rates(device, name=platform.processor() or platform.machine())
        if int(os.environ["RANK"]) == 0:
            write_spec(measured, output)
            note(f"profile written to {output}")
    finally:
        leave()
