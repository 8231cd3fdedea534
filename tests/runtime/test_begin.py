"""Training from Hugging Face folders and back to them, over ranks and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from meshwright.errors import UserError
from meshwright.files import write_spec
from meshwright.models import build_model
from meshwright.models.loss import IGNORE_INDEX
from meshwright.models.weights import MARK, open_weights
from meshwright.runtime.begin import export_checkpoint
from meshwright.runtime.checkpoint import whole_parameters
from meshwright.spec.families import model_from_file
from meshwright.spec.families.write import architecture, config_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from tests.cli.conftest import run  # noqa: F401 a fixture
from tests.launch import run_meshwright, run_ranks
from tests.parity.cases import make_plan, s
from tests.parity.reference import make_batch
from tests.parity.zoo import CONFIGS, family
from tests.runtime.begin_ranks import MODELS, cases

TIMEOUT_S, NUM_STEPS, STOP_AT = 100, 6, 3
VOCAB = 256
LLAMA = CONFIGS["mistral"] | {"model_type": "llama", "vocab_size": VOCAB, "tie_word_embeddings": True}


def save_theirs(spec: ModelSpec, folder: Path) -> nn.Module:
    """Write `folder` with transformers' module of `spec`, its weights random, and return the module."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(spec)))
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    module = getattr(transformers, architecture(spec))(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return module.eval()


def their_loss(module: nn.Module, plan: Plan) -> float:
    """Return their mean loss of the batch that the ranks have."""
    given, targets = make_batch(plan, 0)
    names = ("input_ids", "decoder_input_ids") if plan.model.vocab_size else ("pixel_values",)
    with torch.no_grad():
        logits = module(**dict(zip(names, given, strict=False))).logits
    return float(nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_plan_begins_with_the_loss_of_transformers(num_ranks: int, tmp_path: Path):
    modules = {name: save_theirs(family(name), tmp_path / name) for name in MODELS}
    result = run_ranks(
        num_ranks, "tests.runtime.begin_ranks", str(tmp_path), str(tmp_path / "r.json"), timeout_s=TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr[-4000:]
    losses = json.loads((tmp_path / "r.json").read_text())
    wanted = {case.name: their_loss(modules[case.plan.model.name], case.plan) for case in cases(num_ranks)}
    assert {case.plan.model.name for case in cases(num_ranks)} == set(MODELS)
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder of a small Llama, a fact in its config.json that we do not read among the rest."""
    folder = tmp_path_factory.mktemp("theirs") / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_theirs(model_from_file(folder), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"made_by": "a test", "eos_token_id": 7}))
    (folder.parent / "text.txt").write_text("".join(f"the square of {i} is {i * i}.\n" for i in range(900)))
    return folder


def plan_of(folder: Path, name: str, model: ModelSpec | None = None) -> Path:
    """Write one of two plans of the folder's model, over two ranks, and return its path."""
    layouts: dict[str, Any] = {
        "stages": [[(1, s()), (2, s())], [(2, s()), (1, s())]],
        "mixed": [[(1, s(tp=2)), (2, s(shard=2, zero=3)), (2, s(tp=2)), (1, s(tp=2))]],
    }
    plan = make_plan(model or model_from_file(folder), layouts[name], micro_batches=2, batch=8)
    path = folder.parent / f"{name}.json"
    write_spec(plan, path)
    return path


def train(plan: Path, run_dir: Path, *more: str) -> dict[int, float]:
    """Train on two ranks, and return the loss of every step."""
    text = plan.parent / "text.txt"
    result = run_meshwright(
        "train", str(plan), "--local", "2", "--data", str(text), "--steps", str(NUM_STEPS), "--run-dir", str(run_dir),
        "--cache-dir", str(plan.parent / "cache"), "--eval-samples", "0", *more, timeout_s=TIMEOUT_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


@pytest.mark.distributed
@pytest.mark.slow
def test_from_a_folder_over_two_plans_to_a_folder(folder: Path, tmp_path: Path):
    begin = ("--init-from", str(folder))
    stages, mixed = plan_of(folder, "stages"), plan_of(folder, "mixed")
    whole = train(stages, tmp_path / "whole", *begin)
    first = train(stages, tmp_path / "first", *begin, "--stop-at", str(STOP_AT))
    second = train(mixed, tmp_path / "second", "--resume", str(tmp_path / "first"))
    assert {**first, **second} == pytest.approx(whole, rel=1e-5)
    assert sorted({**first, **second}) == list(range(1, NUM_STEPS + 1))

    result = run_meshwright("export-weights", str(tmp_path / "second"), "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", MARK}
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert after == before, "kept through a checkpoint, a resumed run and another checkpoint"

    spec = model_from_file(folder)
    checkpoint = tmp_path / "second" / "checkpoints" / f"step-{NUM_STEPS:08d}"
    trained, exported = whole_parameters(checkpoint, spec), open_weights(tmp_path / "out", spec)
    ours = build_model(spec, "cpu")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            key = name if name != f"layers.{len(spec.layers) - 1}.output.weight" else "layers.0.token.weight"
            parameter.copy_(trained(key))
            assert torch.equal(trained(key)[: spec.vocab_size], exported(key)[: spec.vocab_size])
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    ids = torch.randint(0, VOCAB, (2, 12))
    assert torch.allclose(ours.logits(ids), module.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    _check_older_checkpoint(tmp_path / "first", tmp_path / "older", spec)
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(start.model.norm.weight, module.model.norm.weight)


def _check_older_checkpoint(run_dir: Path, out: Path, spec: ModelSpec) -> None:
    """Take from a checkpoint what earlier versions did not write: then the run's plan says the model."""
    checkpoint = run_dir / "checkpoints" / f"step-{STOP_AT:08d}"
    info = json.loads((checkpoint / "checkpoint.json").read_text())
    info["files"] = [file for file in info["files"] if file["name"] not in ("model.json", "config.json")]
    (checkpoint / "checkpoint.json").write_text(json.dumps(info))
    for name in ("model.json", "config.json"):
        (checkpoint / name).unlink()
    for dtype in ("fp32", "bf16"):
        export_checkpoint(checkpoint, out, dtype, print)
    assert model_from_file(out).groups == spec.groups
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert json.loads((out / MARK).read_text())["step"] == STOP_AT
    (run_dir / "plan.json").unlink()
    with pytest.raises(UserError, match="does not say its model"):
        export_checkpoint(checkpoint, out, "fp32", print)


def complaint(run: Any, *arguments: str) -> str:  # noqa: F811
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_what_does_not_fit_is_said_before_ranks_start(
    run: Any,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    def launched(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("meshwright.runtime.launch.launch_local", launched)
    monkeypatch.chdir(tmp_path)
    plan = str(plan_of(folder, "stages"))

    def train_(*more: str, plan: str = plan) -> str:
        data = ("--data", str(folder.parent / "text.txt"), "--run-dir", str(tmp_path / "run"))
        return complaint(run, "train", plan, "--local", "2", *data, *more)

    assert "a resumed run has its weights already" in train_("--init-from", str(folder), "--resume", "x")
    assert "without --init-from every weight is new" in train_("--new-head")
    assert "no such file" in train_("--init-from", str(tmp_path / "nowhere"))
    other = model_from_file(folder).model_copy(update={"family": "qwen2"})
    other_plan = str(plan_of(folder, "mixed", other))
    assert "which has family: qwen2, not llama; plan with --model" in train_(
        "--init-from", str(folder), plan=other_plan
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((folder / "config.json").read_text())
    assert "holds no model.safetensors" in train_("--init-from", str(empty))
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_exported_is_said(run: Any, folder: Path, tmp_path: Path):  # noqa: F811
    assert "no such folder" in complaint(run, "export-weights", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert "holds no whole checkpoint" in complaint(run, "export-weights", str(tmp_path), "-o", str(tmp_path / "out"))
    assert "not of an earlier export" in complaint(run, "export-weights", str(tmp_path), "-o", str(folder))
    assert not (tmp_path / "out").exists()
