"""What a long search says meanwhile, on stderr: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from meshwright.cli.common import note

_QUIET_S = 1.0  # most searches are over by then
_EVERY_S = 5.0
_CLEAR_LINE = "\r\x1b[2K"


@contextmanager
def shown_progress() -> Generator[Callable[[str], None]]:
    """Yield what takes a line of progress."""
    is_terminal = sys.stderr.isatty()
    next_at = time.monotonic() + _QUIET_S
    was_shown = False

    def tell(line: str) -> None:
        nonlocal next_at, was_shown
        now = time.monotonic()
        if now < next_at:
            return
        if is_terminal:
            sys.stderr.write(_CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
            next_at = now + 0.1
        else:
            note(line)
            next_at = now + _EVERY_S
        was_shown = True

    try:
        yield tell
    finally:
        if is_terminal and was_shown:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
