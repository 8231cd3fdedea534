"""The training command from end to end: metrics, held-out loss, checkpoints, resuming under another plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.files import write_spec
from meshwright.spec.plan import Plan, StagePlan
from tests.launch import run_meshwright, run_ranks
from tests.parity.cases import cluster, gpt2, llama, make_plan, s

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
NUM_STEPS, STOP_AT = 20, 10


def byte_plan(plan: Plan) -> Plan:
    """Return `plan` for a vocabulary of bytes and a milder optimizer."""
    groups = tuple(
        g.model_copy(update={"layer": g.layer.model_copy(update={"vocab_size": 256, "padded_vocab_size": 256})})
        if g.layer.kind != "block"
        else g
        for g in plan.model.groups
    )
    optimizer = plan.job.optimizer.model_copy(update={"warmup_steps": 4, "lr": 3e-3})
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"groups": groups}),
            "job": plan.job.model_copy(update={"optimizer": optimizer}),
        }
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    lines = (f"line {i}: the square of {i} is {i * i}, its cube {i**3}.\n" for i in range(600))
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return plan files: four ranks in two stages, and two ranks in one, of the same tied model."""
    folder = tmp_path_factory.mktemp("plans")
    model = gpt2()
    made = {
        "four": make_plan(
            model,
            [[(2, s(tp=2)), (1, s(rep=2))], [(1, s(shard=2, zero=3)), (2, s(tp=2))]],
            micro_batches=4,
            batch=16,
        ),
        "two": make_plan(model, [[(1, s(rep=2)), (4, s(shard=2, zero=2)), (1, s(rep=2))]], micro_batches=2, batch=16),
    }
    paths = {}
    for name, plan in made.items():
        paths[name] = folder / f"{name}.json"
        write_spec(byte_plan(plan), paths[name])
    return paths


def train(plan: Path, ranks: int, text: Path, run_dir: Path, *more: str) -> list[dict[str, Any]]:
    """Train, and return the records of the run."""
    result = run_meshwright(
        "train", str(plan), "--local", str(ranks), "--data", str(text), "--steps", str(NUM_STEPS),
        "--run-dir", str(run_dir), "--cache-dir", str(text.parent / "cache"), "--seed", "3", *more,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


@pytest.fixture(scope="module")
def whole(plans: dict[str, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(plans["four"], 4, text, folder)
    return folder


def test_a_run_leaves_what_it_promises(whole: Path):
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records]
    assert kinds == ["start", *["step"] * NUM_STEPS, "held_out", "checkpoint"]
    step = records[1]
    assert {"loss", "gradient_norm", "lr", "step_s", "tokens_per_s", "mfu", "peak_memory_bytes"} <= step.keys()
    assert len(step["peak_memory_bytes"]) == 4
    assert all(peak > 0 for peak in step["peak_memory_bytes"])
    assert records[-3]["loss"] < records[1]["loss"]
    assert records[-2]["held_out_loss"] < records[1]["loss"]
    assert list((whole / "tensorboard").glob("events.*"))
    assert (whole / "plan.json").exists()
    checkpoint = whole / "checkpoints" / f"step-{NUM_STEPS:08d}"
    assert (checkpoint / "checkpoint.json").exists()
    assert {path.suffix for path in checkpoint.iterdir()} == {".json", ".safetensors"}


def test_resuming_under_another_plan_goes_on_as_if_nothing_had_happened(
    whole: Path, plans: dict[str, Path], text: Path, tmp_path: Path
):
    first = train(plans["four"], 4, text, tmp_path / "first", "--stop-at", str(STOP_AT))
    assert max(losses(first)) == STOP_AT
    second = train(plans["two"], 2, text, tmp_path / "second", "--resume", str(tmp_path / "first"))
    want = losses([json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()])
    got = losses(second)
    assert sorted(got) == list(range(STOP_AT + 1, NUM_STEPS + 1))
    for step, loss in got.items():
        assert loss == pytest.approx(want[step], rel=1e-5), f"step {step}"


def test_a_checkpoint_of_another_model_is_refused(whole: Path, text: Path, tmp_path: Path):
    other = byte_plan(make_plan(llama(), [[(6, s())]], micro_batches=1, batch=4))
    write_spec(other, tmp_path / "plan.json")
    result = run_meshwright(
        "train", str(tmp_path / "plan.json"), "--local", "1", "--data", str(text), "--resume", str(whole),
        "--run-dir", str(tmp_path / "run"), "--cache-dir", str(text.parent / "cache"), "--seed", "3",
    )  # fmt: skip
    assert result.returncode == 2
    assert "a model other than the plan's" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_plan_for_another_number_of_ranks_is_refused(plans: dict[str, Path], text: Path):
    result = run_ranks(2, "meshwright", "train", str(plans["four"]), "--data", str(text))
    assert result.returncode != 0
    assert "the plan is for 4 ranks, but 2 were started" in result.stderr


def test_a_job_can_be_described_for_a_larger_cluster_than_is_used():
    """A plan may use fewer devices than its cluster has."""
    plan = make_plan(llama(), [[(6, s())]], micro_batches=1, batch=4)
    larger = plan.model_copy(update={"cluster": cluster(8)})
    assert Plan.model_validate_json(larger.model_dump_json()).stages == (StagePlan.of([s()] * 6),)
