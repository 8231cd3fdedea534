"""meshwright import: profiles of other programs as a profile of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from meshwright.cli.common import JsonFlag, note, show_json, show_line, show_view
from meshwright.files import check_writable, write_spec
from meshwright.imports.galvatron import GalvatronProfile, read_galvatron
from meshwright.imports.galvatron_profile import Converted, to_profile
from meshwright.spec import library

import_app = typer.Typer(
    name="import",
    help="Turn a profile of another program into one that `plan --profile` takes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@import_app.callback()
def _commands() -> None:
    """Turn a profile of another program into one that `plan --profile` takes."""


@import_app.command("galvatron")
def import_galvatron(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR|FILE...", help="Folders or files of its profilers.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the profile to this file.")],
    model: Annotated[str | None, typer.Option(help="Which set, where there are several.")] = None,
    model_spec: Annotated[
        str | None, typer.Option(help="What was measured: a library name or a file (default: from meta_configs).")
    ] = None,
    model_output: Annotated[Path | None, typer.Option(help="Also write that model, to plan for, to this file.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Which cluster, as NODESxGPUS, where there are several.")] = None,
    json: JsonFlag = False,
) -> None:
    """Turn a profile of Hetu-Galvatron into one of ours, and say what was taken, missing and assumed."""
    for path in (output, model_output):
        if path is not None:
            check_writable(path)
    spec = None if model_spec is None else library.model(model_spec)
    found = read_galvatron(sources, model=model, hardware=hardware)
    converted = to_profile(found, spec)
    write_spec(converted.profile, output)
    if model_output is not None and converted.model is not None:
        write_spec(converted.model, model_output)
    if json:
        show_json(_as_data(found, converted))
    else:
        _show(found, converted)
    note(f"{len(converted.profile.samples)} samples written to {output}")
    if model_output is not None:
        note(f"model written to {model_output}" if converted.model is not None else "no model written: no layers taken")


def _rows(found: GalvatronProfile, converted: Converted) -> list[tuple[str, str]]:
    rows = [("taken", f"{what}: {how}") for what, how in converted.taken]
    rows += [("assumed", line) for line in converted.assumed]
    rows += [("left out", line) for line in (*converted.left_out, *found.notes)]
    return rows + [("missing", line) for line in found.missing]


def _show(found: GalvatronProfile, converted: Converted) -> None:
    hardware = found.hardware
    cluster = "no cluster" if hardware is None else f"{hardware.num_nodes} x {hardware.gpus_per_node} GPUs"
    show_line(f"{found.name}, {found.precision or 'no dtype named'}, {cluster}")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    before = ""
    for kind, line in _rows(found, converted):
        table.add_row(kind if kind != before else "", line)
        before = kind
    show_view(table)


def _as_data(found: GalvatronProfile, converted: Converted) -> dict[str, object]:
    return {
        "name": found.name,
        "files": list(found.files),
        "taken": [{"what": what, "how": how} for what, how in converted.taken],
        "assumed": list(converted.assumed),
        "left_out": [*converted.left_out, *found.notes],
        "missing": list(found.missing),
    }
