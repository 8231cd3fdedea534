"""meshwright schema: the JSON Schema of a file format."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import BaseModel

from meshwright.cli.common import show_json, show_line
from meshwright.errors import UserError
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import Budget, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.profile import Profile
from meshwright.spec.strategy import Strategy

KINDS: dict[str, type[BaseModel]] = {
    "plan": Plan,
    "model": ModelSpec,
    "cluster": ClusterSpec,
    "job": JobSpec,
    "budget": Budget,
    "strategy": Strategy,
    "profile": Profile,
}


def schema(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}; none lists them.")] = None,
) -> None:
    """Print the JSON Schema of a file format."""
    if kind is None:
        for name, spec in KINDS.items():
            show_line(f"{name}: {(spec.__doc__ or '').strip().splitlines()[0]}")
        return
    if kind not in KINDS:
        raise UserError(f"schema: {kind!r} is not a format; choose one of {', '.join(KINDS)}")
    show_json(KINDS[kind].model_json_schema())
