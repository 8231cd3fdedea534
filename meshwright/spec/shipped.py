"""The data files that the package ships beside its descriptions."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from meshwright.files import read_data


def shipped(*names: str) -> Traversable:
    """Return the file or folder with this path in `data`."""
    return resources.files("meshwright.spec").joinpath("data", *names)


def read_shipped(file: Traversable) -> Any:
    """Return what a shipped YAML or JSON file holds."""
    with resources.as_file(file) as path:
        return read_data(path)
