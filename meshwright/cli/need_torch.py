"""What stands around commands that compute."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from contextlib import contextmanager

import typer

from meshwright.errors import UserError


def need_torch(command: str) -> None:
    """Raise UserError when torch is not installed."""
    # Before torch is imported: when a rank dies, the others say so in one line, and not in C++ stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"{command}: needs torch, which is not installed; pip install 'meshwright[train]'")


@contextmanager
def one_voice() -> Generator[None]:
    """Let the launcher on this machine speak for ranks that have only lost contact to one that broke."""
    from meshwright.runtime.launch import launcher_speaks
    from meshwright.runtime.watchdog import LostContactError

    try:
        yield
    except LostContactError:
        if not launcher_speaks():
            raise
        raise typer.Exit(1) from None
