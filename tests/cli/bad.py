"""What a row of the table of bad inputs is, and the good inputs that rows spoil."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cost.predict import predict
from meshwright.files import canonical_json
from meshwright.spec.library import cluster, model
from meshwright.spec.plan import Plan
from meshwright.spec.strategy import Strategy
from tests.plans import uniform

Content = str | bytes
Change = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A command that must be refused, and words of its one line.

    `files` are written first; a name that ends in a slash is a folder. `keeps` is a pattern of files that are whole
    and may stay.
    """

    name: str
    command: tuple[str, ...]
    says: str
    files: Mapping[str, Content] = field(default_factory=dict)
    keeps: str = ""

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            if name.endswith("/"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def spoiled(good: str, change: Change) -> str:
    """Return the JSON text `good` with its data changed; NaN and infinity are written as Python writes them."""
    data = json.loads(good)
    change(data)
    return json.dumps(data)


def with_text(good: str, path: tuple[str, ...], text: str) -> str:
    """Return the JSON text `good` with bare `text`, which means something in YAML alone, at a place."""
    mark = "<here>"
    return spoiled(good, put(*path, value=mark)).replace(json.dumps(mark), text)


def put(*path: str | int, value: Any) -> Change:
    """Return a change that puts `value` at a place."""

    def change(data: Any) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    """Return a change that removes what is at a place."""

    def change(data: Any) -> None:
        for part in path[:-1]:
            data = data[part]
        del data[path[-1]]

    return change


def question(**options: str) -> tuple[str, ...]:
    """Return the options of a small planning question, some of them replaced or added."""
    chosen = {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": "8", "seq_len": "64"} | options
    return tuple(part for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", value))


def ask(**options: str) -> tuple[str, ...]:
    """Return a `plan` command."""
    return ("plan", *question(**options))


@cache
def good_plan() -> Plan:
    plan = uniform("tiny-llama", "4xcpu", Strategy(dp_replicate=4), batch=8, seq_len=64, dtype="fp32")
    return plan.model_copy(update={"predicted": predict(plan)})


PLAN = canonical_json(good_plan())
MODEL = canonical_json(model("tiny-llama"))
CLUSTER = canonical_json(cluster("4xcpu"))
