"""What commands share: output, and options that several take."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
BAD_INPUT, STOPPED_FROM = 2, 128  # exit codes: what the user must mend; above this, a signal's number is added
_PLAIN_WIDTH = 200


def show_view(view: RenderableType) -> None:
    """Print a view to the terminal, or unwrapped to a file or pipe."""
    if sys.stdout is None:  # closed: nobody reads
        return
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    Console(width=width, highlight=False, markup=False).print(view)


def show_line(line: str) -> None:
    """Print one line at once."""
    if sys.stdout is None:
        return
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show_json(value: Any) -> None:
    """Print plain data as JSON."""
    if sys.stdout is None:
        return
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")


def note(line: str) -> None:
    """Print a remark beside the output."""
    sys.stderr.write(line + "\n")
