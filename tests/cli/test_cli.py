"""The command line in process: what it prints and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.cli.schema import KINDS
from tests.cli.conftest import PlanFile, Run
from tests.launch import ROOT

QUESTION = ["--model", "tiny-llama", "--cluster", "4xcpu", "--global-batch", "8", "--seq-len", "64"]
PLAN = ["plan", *QUESTION]


def test_plan_shows_and_writes(run: Run, tmp_path: Path):
    path = tmp_path / "plan.json"
    code, out, err = run(*PLAN, "-o", str(path))
    assert code == 0
    assert err == f"plan written to {path}\n"
    for part in ("tiny-llama", "predicted", "optimal under this cost model", "searched"):
        assert part in out
    assert meshwright.load_plan(path).predicted is not None


def test_plan_prints_json(run: Run, plan: meshwright.Plan):
    code, out, err = run(*PLAN, "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["plan"] == plan.model_dump(mode="json")
    assert {"runners_up", "tried", "search_s"} <= data.keys()


def test_a_place_that_cannot_be_written_is_known_before_the_search(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("the search would be lost")

    monkeypatch.setattr("meshwright.search.planner.plan", searched)
    code, _, err = run(*PLAN, "-o", str(tmp_path))
    assert (code, err) == (2, f"error: {tmp_path}: cannot be written: Is a directory\n")


def test_nothing_fits_is_an_answer_with_code_1(run: Run):
    code, out, err = run(*PLAN, "--memory", "100KiB")
    assert (code, err) == (1, "")
    assert out.startswith("nothing fits: the smallest plan needs")
    assert "too much" in out
    code, out, _ = run(*PLAN, "--memory", "100KiB", "--json")
    data = json.loads(out)
    assert code == 1
    assert max(data["shortfall_bytes"]) > 0
    assert data["nearest"]["model"]["name"] == "tiny-llama"


def test_show_and_predict_read_what_plan_wrote(run: Run, plan: meshwright.Plan, plan_file: PlanFile):
    path = plan_file()
    code, shown, err = run("show", path)
    assert (code, err) == (0, "")
    assert "predicted" in shown
    code, out, _ = run("show", path, "--json")
    assert json.loads(out) == plan.model_dump(mode="json")
    code, out, err = run("predict", path, "--json")
    assert (code, err) == (0, "")
    assert plan.predicted is not None
    assert json.loads(out) == plan.predicted.model_dump(mode="json")


def test_predict_prices_a_uniform_plan(run: Run):
    uniform = ["--tp", "2", "--pp", "2", "--micro-batches", "4", "--recompute"]
    code, out, err = run("predict", *QUESTION, *uniform, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["stages"]) == 2
    code, out, _ = run("predict", *QUESTION, "--zero-stage", "3", "--dp-shard", "2")
    assert code == 0
    assert "hsdp2x2-zero3" in out


@pytest.mark.parametrize("kind", KINDS)
def test_schema_prints_json_schema(run: Run, kind: str):
    code, out, err = run("schema", kind)
    assert (code, err) == (0, "")
    assert json.loads(out)["type"] == "object"


def test_schema_lists_the_formats(run: Run):
    code, out, _ = run("schema")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == list(KINDS)


def test_planning_imports_no_torch():
    code = "import meshwright, meshwright.cli, sys; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_plan_for_eight_gpus_takes_seconds_without_torch(tmp_path: Path):
    options = {"model": "llama-2-7b", "cluster": "8xa100-sxm-40g", "global-batch": "64", "seq-len": "4096"}
    arguments = ["plan", "-o", str(tmp_path / "plan.json")]
    for name, value in options.items():
        arguments += [f"--{name}", value]
    code = f"import sys; sys.modules['torch'] = None\nfrom meshwright.cli import main\nmain({arguments!r})"
    before = os.times()
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    after = os.times()  # CPU seconds: other tests may run beside this one
    assert after.children_user + after.children_system - before.children_user - before.children_system < 6
    assert meshwright.load_plan(tmp_path / "plan.json").num_devices == 8
