"""What tests of the command line share: running a command in process, and a plan in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cli import main
from meshwright.files import canonical_json

Run = Callable[..., tuple[int, str, str]]
PlanFile = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command and returns exit code, stdout and stderr, native code's included."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        captured = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def plan() -> meshwright.Plan:
    found = meshwright.plan("tiny-llama", "4xcpu", global_batch=8, seq_len=64)
    assert isinstance(found, meshwright.Found)
    return found.plan


@pytest.fixture
def plan_file(plan: meshwright.Plan, tmp_path: Path) -> PlanFile:
    """Return a function that writes the plan, its data changed by `change`, and returns the path."""

    def write(change: Callable[[dict[str, Any]], object] = lambda data: None) -> str:
        data = json.loads(canonical_json(plan))
        change(data)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        return str(path)

    return write
