"""Training of every task from end to end; of images also resuming, and accuracy against one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from meshwright.files import write_spec
from meshwright.models import build_model
from meshwright.runtime.data import ImageDataset, open_images
from meshwright.spec.families import model_from_config
from meshwright.spec.model import ClassifierLayer, ModelSpec, PatchEmbeddingLayer
from meshwright.spec.plan import Plan
from tests.configs import BERT, SWIN, T5
from tests.launch import run_meshwright
from tests.parity.cases import make_plan, s

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
NUM_STEPS, STOP_AT, EVAL_SAMPLES = 12, 5, 30  # 30 is not whole micro-batches


def model(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_from_config(config | changes, name="model", where="model")


def train(plan: Plan, data: Path, run_dir: Path, *more: str) -> list[dict[str, Any]]:
    """Train on two ranks, and return the records of the run."""
    optimizer = plan.job.optimizer.model_copy(update={"lr": 3e-3})
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"optimizer": optimizer})})
    write_spec(plan, run_dir.with_suffix(".json"))
    result = run_meshwright(
        "train", str(run_dir.with_suffix(".json")), "--local", "2", "--data", str(data), "--steps", str(NUM_STEPS),
        "--run-dir", str(run_dir), "--cache-dir", str(run_dir.parent / "cache"), "--held-out", "0.2",
        "--eval-samples", str(EVAL_SAMPLES), *more,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "warning: " not in result.stdout
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_run(records: list[dict[str, Any]], task: str) -> dict[str, Any]:
    """Check what any run promises; return the held-out record."""
    assert records[0]["task"] == task
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == NUM_STEPS
    assert all(step["gradient_norm"] > 0 for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    (held_out,) = (record for record in records if record["kind"] == "held_out")
    return held_out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}, its cube {i**3}.\n" for i in range(600)))
    return path


def test_masked_tokens(text: Path, tmp_path: Path):
    bert = model(BERT, model_type="bert", max_position_embeddings=40)
    plan = make_plan(bert, [[(len(bert.layers), s(shard=2, zero=3))]], micro_batches=2, batch=16)
    held_out = check_run(train(plan, text, tmp_path / "run"), "masked")
    assert held_out["num_tokens"] == pytest.approx(EVAL_SAMPLES * 40 * 0.15, rel=0.1)
    assert "held_out_accuracy" not in held_out


def test_spans(text: Path, tmp_path: Path):
    t5 = model(T5, model_type="t5", n_positions=40, target_seq_len=12, num_layers=2)
    layers = len(t5.layers)
    plan = make_plan(t5, [[(2, s())], [(layers - 2, s())]], micro_batches=4, batch=16)
    held_out = check_run(train(plan, text, tmp_path / "run"), "spans")
    assert held_out["num_tokens"] % EVAL_SAMPLES == 0  # every sample has as many targets


def test_labelled_texts(tmp_path: Path):
    bert = model(
        BERT, model_type="bert", max_position_embeddings=16, architectures=["BertForSequenceClassification"],
        num_labels=3,
    )  # fmt: skip
    lines = (json.dumps({"text": "abc"[i % 3] * (i % 7 + 3), "label": "xyz"[i % 3]}) for i in range(200))
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    layers = len(bert.layers)
    plan = make_plan(bert, [[(2, s(tp=2)), (layers - 2, s(shard=2, zero=3))]], micro_batches=2, batch=16)
    held_out = check_run(train(plan, tmp_path / "t.jsonl", tmp_path / "run"), "labelled-text")
    assert held_out["num_tokens"] == EVAL_SAMPLES
    assert 0.2 < held_out["held_out_accuracy"] <= 1


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return squares that are bright on one of four sides, which is their class."""
    path = tmp_path_factory.mktemp("pictures") / "p.npz"
    numbers = np.random.default_rng(0)
    labels = numbers.integers(0, 4, 240)
    images = numbers.integers(0, 120, (240, 16, 16), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        np.rot90(image, label)[:5] += 100
    np.savez(path, images=images, labels=labels)
    return path


def test_images_resume_under_another_plan_with_the_same_accuracy(pictures: Path, tmp_path: Path):
    swin = model(SWIN, model_type="swin", num_channels=1, num_labels=5, depths=[2, 2], num_heads=[2, 4])
    layers = len(swin.layers)
    stages = make_plan(swin, [[(3, s())], [(layers - 3, s())]], micro_batches=4, batch=32)
    replicas = make_plan(swin, [[(layers, s(rep=2))]], micro_batches=2, batch=32)
    whole = train(stages, pictures, tmp_path / "whole", "--save-every", str(STOP_AT))
    held_out = check_run(whole, "images")
    assert "images_per_s" in whole[1]
    assert held_out["num_tokens"] == EVAL_SAMPLES
    assert held_out["held_out_accuracy"] == accuracy_on_one_device(swin, pictures, tmp_path / "whole")

    checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{STOP_AT:08d}"
    resumed = train(replicas, pictures, tmp_path / "second", "--resume", str(checkpoint))
    want = {record["step"]: record["loss"] for record in whole if record["kind"] == "step"}
    got = {record["step"]: record["loss"] for record in resumed if record["kind"] == "step"}
    assert sorted(got) == list(range(STOP_AT + 1, NUM_STEPS + 1))
    for step, loss in got.items():
        assert loss == pytest.approx(want[step], rel=1e-5), f"step {step}"
    (again,) = (record for record in resumed if record["kind"] == "held_out")
    assert again["held_out_accuracy"] == held_out["held_out_accuracy"]
    assert again["held_out_loss"] == pytest.approx(held_out["held_out_loss"], rel=1e-5)


def accuracy_on_one_device(spec: ModelSpec, pictures: Path, run_dir: Path) -> float:
    """Return the accuracy of a run's last checkpoint on the held-out pictures that the run was asked."""
    whole = build_model(spec, "cpu")
    folder = run_dir / "checkpoints" / f"step-{NUM_STEPS:08d}"
    stored = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    whole.load_state_dict({name: stored[f"model.{name}"] for name, _ in whole.named_parameters()})
    assert isinstance(spec.embedding, PatchEmbeddingLayer)
    assert isinstance(spec.head, ClassifierLayer)
    images = open_images([pictures])
    dataset = ImageDataset(
        images, layer=spec.embedding, num_classes=spec.head.num_classes, split="held_out", held_out_fraction=0.2
    )
    given, classes = dataset.batch(0, EVAL_SAMPLES)
    with torch.no_grad():
        return float((whole.logits(given).argmax(-1) == classes).sum()) / EVAL_SAMPLES
