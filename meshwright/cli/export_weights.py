"""meshwright export-weights: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.common import note, show_line
from meshwright.cli.need_torch import need_torch
from meshwright.units import show_bytes


def export_weights(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint (step-N), or a run folder: its newest.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; an earlier export is replaced.")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="What the weights are stored as.")] = "fp32",
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder: config.json and safetensors. Needs no ranks."""
    need_torch("export-weights")
    from meshwright.runtime.begin import export_checkpoint

    files = export_checkpoint(checkpoint, output, dtype, note)
    total_bytes = sum(file.stat().st_size for file in files)
    show_line(f"weights written to {output}: {len(files)} files, {show_bytes(total_bytes)}, {dtype}")
