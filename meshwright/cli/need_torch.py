"""The check that stands before commands that compute."""

from __future__ import annotations

import importlib.util

from meshwright.errors import UserError


def need_torch(command: str) -> None:
    """Raise UserError when torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"{command}: needs torch, which is not installed; pip install 'meshwright[train]'")
