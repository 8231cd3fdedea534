"""The explain command in process: what it answers, what it refuses, and what `plan` says when nothing fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cost.predict import predict
from meshwright.spec.strategy import Strategy
from tests.cli.bad import drop, put
from tests.cli.conftest import PlanFile, Run
from tests.plans import uniform

QUICK = ("--time-limit", "4")


@pytest.fixture
def slow_file(tmp_path: Path) -> str:
    """Return the path of a plan that is not the best one."""
    plan = uniform("tiny-llama", "4xcpu", Strategy(), batch=8, seq_len=64, stages=4, micro_batches=1)
    path = tmp_path / "slow.json"
    meshwright.save_plan(plan.model_copy(update={"predicted": predict(plan)}), path)
    return str(path)


def test_a_plan_is_explained(run: Run, plan_file: PlanFile):
    path = plan_file()
    code, out, _ = run("explain", path, *QUICK)
    assert code == 0
    assert "binds" in out
    assert out.count("the plan's budget") == 1
    code, brief, _ = run("explain", path, "--no-curve", *QUICK)
    assert code == 0
    assert "the plan's budget" not in brief


def test_json_holds_everything(run: Run, plan_file: PlanFile):
    code, out, _ = run("explain", plan_file(), "--json", *QUICK)
    assert code == 0
    data = json.loads(out)
    assert data["binding"]["what"] in ("memory", "time")
    steps = [point["plan"]["predicted"]["step_s"] for point in data["curve"]]
    assert steps == sorted(steps, reverse=True)
    assert data["more_memory"]["extra_bytes"] == 0
    assert all(sum(other["terms_s"].values()) == pytest.approx(other["slower_s"]) for other in data["others"])
    assert "model" not in data["plan"]


def test_the_curve_is_drawn(run: Run, plan_file: PlanFile, tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "curve.png"
    assert run("explain", plan_file(), "--png", str(picture), *QUICK)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_no_search_is_lost(
    run: Run, plan_file: PlanFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("meshwright.search.fixes.search", refuse)
    code, out, err = run("explain", plan_file(), "--png", str(tmp_path / "curve.png"))
    assert (code, out) == (2, "")
    assert err == 'error: png: needs matplotlib: pip install "meshwright[plot]"\n'


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("the search would be lost")


def test_two_plans(run: Run, plan_file: PlanFile, slow_file: str):
    best = plan_file()
    code, out, err = run("explain", best, slow_file)
    assert (code, err) == (0, "")
    assert "slower" in out
    code, out, _ = run("explain", slow_file, best, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["differs"] == []
    assert data["against"]["slower_s"] < 0


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("tp=4", "illegal"),
        ("tp=8 pp=2 zero=3 recompute=none m=16", "illegal"),
        ("zero=1", "not in the space"),
        ("pp=4 m=1", "slower"),
    ],
)
def test_why_not(run: Run, plan_file: PlanFile, text: str, verdict: str):
    path = plan_file()
    code, out, err = run("explain", path, "--why-not", text, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["verdict"] == verdict
    code, shown, err = run("explain", path, "--why-not", text)
    assert (code, err) == (0, "")
    assert text in shown


def test_why_not_what_is_so_already(run: Run, plan: meshwright.Plan, plan_file: PlanFile):
    text = f"pp={plan.num_stages},m={plan.num_micro_batches}"
    code, out, _ = run("explain", plan_file(), "--why-not", text)
    assert code == 0
    assert "already" in out


def test_why_not_what_does_not_fit(run: Run, tmp_path: Path):
    path = str(tmp_path / "tight.json")
    question = ("--model", "tiny-gpt2", "--cluster", "4xcpu", "--global-batch", "16", "--seq-len", "128")
    assert run("plan", *question, "--memory", "2MiB", "-o", path)[0] == 0
    code, out, _ = run("explain", path, "--why-not", "replicate=4 recompute=none", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["verdict"] == "does not fit"
    assert max(data["over_bytes"]) > 0
    code, out, _ = run("explain", path, "--why-not", "replicate=4 recompute=none")
    assert code == 0
    assert "too much" in out


Change = Callable[[dict[str, Any]], object]
BAD: list[tuple[str, Change, tuple[str, ...], str]] = [
    ("no prediction", put("predicted", value=None), (), "predicted"),
    ("another cluster", put("cluster", "intra_node", "bytes_per_s", value=1e6), (), "not the price of this plan"),
    ("another device", put("cluster", "device", "bf16_flops_per_s", value=1e6), (), "not the price of this plan"),
    ("another model", put("model", "groups", 1, "layer", "mlp", "ffn_size", value=64), (), "not the price"),
    ("fewer blocks", put("model", "groups", 1, "num_layers", value=2), (), "layers planned"),
    ("more devices", put("cluster", "num_nodes", value=2), (), "num_devices"),
    ("no model", drop("model"), (), "model"),
    ("unknown name", lambda data: None, ("--why-not", "speed=9"), "why-not: 'speed=9' is not understood"),
    ("no number", lambda data: None, ("--why-not", "tp=many"), "why-not: tp must be a whole number"),
    ("nothing asked", lambda data: None, ("--why-not", ""), "why-not: nothing is asked"),
    ("picture without curve", lambda data: None, ("--no-curve", "--png", "x.png"), "png: "),
    ("no time", lambda data: None, ("--time-limit", "inf"), "time-limit: "),
    ("second is missing", lambda data: None, ("nowhere.json",), "nowhere.json: no such file"),
    ("two and why-not", lambda data: None, ("nowhere.json", "--why-not", "tp=2"), "why-not: "),
]


@pytest.mark.parametrize(("change", "options", "says"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_one_line(
    run: Run, plan_file: PlanFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change,
    options: tuple[str, ...], says: str,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.search.fixes.search", refuse)
    path = plan_file(change)
    before = sorted(tmp_path.iterdir())
    code, out, err = run("explain", path, *options)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 700
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_file_is_one_line(run: Run, tmp_path: Path):
    path = tmp_path / "none.json"
    assert run("explain", str(path)) == (2, "", f"error: {path}: no such file\n")


def test_plan_says_what_would_fit(run: Run):
    question = ("--model", "tiny-llama", "--cluster", "4xcpu", "--global-batch", "8", "--seq-len", "64")
    code, out, err = run("plan", *question, "--memory", "600KiB")
    assert (code, err) == (1, "")
    assert "too much" in out
    assert "--memory" in out
    code, out, _ = run("plan", *question, "--memory", "600KiB", "--json")
    assert code == 1
    found = json.loads(out)["fixes"]
    assert {"memory", "devices"} <= {fix["kind"] for fix in found}
    for fix in found:
        # Of an option that is given twice, the last one counts.
        assert run("plan", *question, "--memory", "600KiB", *fix["options"])[0] == 0, fix["options"]
