"""The check that stands before commands that compute."""

from __future__ import annotations

import importlib.util
import os

from meshwright.errors import UserError


def need_torch(command: str) -> None:
    """Raise UserError when torch is not installed."""
    # Before torch is imported: when a rank dies, the others say so in one line, and not in C++ stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"{command}: needs torch, which is not installed; pip install 'meshwright[train]'")
