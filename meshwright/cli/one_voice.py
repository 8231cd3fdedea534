"""Who speaks when a rank breaks: the launcher, where it is ours, and not every rank that has lost contact to it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import typer


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
