"""Layers split over tensor-parallel ranks compute what one device does, and talk as much as is priced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.models.ranks import CONFIGS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    path: Path = tmp_path_factory.mktemp("tensor-parallel") / "found.json"
    result = run_ranks(2, "tests.models.ranks", str(path))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[:6000]
    return json.loads(path.read_text())


NAMES = [name for config in CONFIGS for name in (config, f"{config}-recomputed")]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(name: str, found: dict[str, list[dict[str, Any]]]):
    for rank in found[name]:
        assert rank["loss_error"] < 1e-6
        assert not rank["gradient_errors"]


@pytest.mark.parametrize("name", NAMES)
def test_they_talk_as_much_as_is_priced(name: str, found: dict[str, list[dict[str, Any]]]):
    for rank in found[name]:
        assert not rank["calls"]
        assert rank["num_calls"] > 0
