"""What a model is trained for, and from its plan and a user's sources to samples of the shapes that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from meshwright.cli.train import TaskName
from meshwright.errors import UserError
from meshwright.runtime.data import choose_task, load_tokenizer
from meshwright.runtime.data.order import IGNORE_INDEX
from meshwright.runtime.data.prepare import DataRequest, LastSamples, RunData, open_data
from meshwright.runtime.data.task import TASKS
from meshwright.runtime.data.windows import TokenDataset
from meshwright.spec.families import model_from_config
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.sample import input_shapes, target_shape
from tests.configs import BERT, GPT2, LLAMA, MISTRAL, SWIN, T5, VIT

TEXT = "".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(300))
CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": (GPT2, "causal"),
    "llama": (LLAMA, "causal"),
    "mistral": (MISTRAL, "causal"),
    "bert": (BERT, "masked"),
    "bert-classifier": (CLASSIFIER, "labelled-text"),
    "t5": (T5, "spans"),
    "vit": (VIT, "images"),
    "swin": (SWIN, "images"),
}


def model(name: str) -> ModelSpec:
    config = {"model_type": name.removesuffix("-classifier")} | CONFIGS[name][0]
    return model_from_config(config, name=name, where=name)


def job(name: str) -> JobSpec:
    spec = model(name)
    return JobSpec(
        global_batch_size=4,
        seq_len=spec.fixed_seq_len or 32,
        target_seq_len=12 if spec.has_targets else None,
    )


def opened(name: str, tmp_path: Path, *sources: Path | str, **options: Any) -> RunData:
    request = {
        "sources": tuple(str(source) for source in sources), "tokenizer": "bytes", "cache_dir": str(tmp_path / "cache"),
        "seed": 0, "held_out_fraction": 0.1, "evaluates": True,
    } | options  # fmt: skip
    return open_data(model(name), job(name), DataRequest(**request))


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "t.txt").write_text(TEXT)
    lines = (json.dumps({"text": f"text {i}", "label": i % 3}) for i in range(40))
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    numbers = np.random.default_rng(0)
    np.savez(tmp_path / "i.npz", images=numbers.random((40, 9, 9)), labels=numbers.integers(0, 2, 40))
    text = tmp_path / "t.txt"
    return {
        "causal": text, "masked": text, "spans": text, "labelled-text": tmp_path / "t.jsonl",
        "images": tmp_path / "i.npz",
    }  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_samples_have_the_shapes_that_the_model_takes(name: str, tmp_path: Path, sources: dict[str, Path]):
    task = CONFIGS[name][1]
    data = opened(name, tmp_path, sources[task])
    assert data.task == task
    assert data.held_out is not None
    for split in (data.training, data.held_out):
        inputs, targets = split.batch(0, 3)
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        assert [tuple(x.shape) for x in given] == [(3, *shape) for shape in input_shapes(model(name), job(name))]
        assert tuple(targets.shape) == (3, *target_shape(model(name), job(name)))
        most = model(name).vocab_size or 2
        assert all(x.max() < most for x in given if not x.is_floating_point())
    assert 0 < data.entropy() < 4
    again = opened(name, tmp_path, sources[task])
    assert again.identity == data.identity
    assert opened(name, tmp_path, sources[task], evaluates=False).held_out is None


def test_a_task_can_be_confirmed_but_not_changed():
    assert choose_task(model("bert"), "masked") == "masked"
    for name, task in (("bert", "causal"), ("gpt2", "masked"), ("vit", "labelled-text"), ("t5", "causal")):
        with pytest.raises(UserError, match=f"task: {name} cannot be trained on {task}; its layers allow"):
            choose_task(model(name), task)


def test_the_command_line_knows_the_tasks():
    assert get_args(TaskName) == TASKS


def test_the_identity_tells_tasks_and_tokenizers_apart(tmp_path: Path, sources: dict[str, Path]):
    text = sources["masked"]
    assert len({opened(name, tmp_path, text).identity for name in ("gpt2", "bert", "t5")}) == 3


# ---- files of tokens


@pytest.mark.parametrize(
    ("name", "dtype"), [("t.bin", "<u2"), ("t.u16", "<u2"), ("t.u32", "<u4"), ("t.npy", "i8"), ("t.npy", "u8")]
)
def test_token_files(tmp_path: Path, name: str, dtype: str):
    tokens = np.random.default_rng(0).integers(0, 300, 2000).astype(dtype)
    if name.endswith(".npy"):
        np.save(tmp_path / name, tokens)
    else:
        (tmp_path / name).write_bytes(tokens.tobytes())
    for _ in range(2):  # the second time what it holds is known
        data = opened("gpt2", tmp_path, tmp_path / name)
        want = TokenDataset(tokens, seq_len=32, held_out_fraction=0.1)
        assert torch.equal(data.training.batch(0, 50)[0], want.batch(0, 50)[0])
    (tmp_path / "other.u32").write_bytes(tokens.astype("<u4").tobytes())
    assert opened("gpt2", tmp_path, tmp_path / "other.u32").identity == data.identity


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.u16", b"", "0 bytes are no uint16 tokens"),
        ("a.u32", b"123456", "6 bytes are no uint32 tokens"),
        ("a.npy", b"no array", "not a .npy array"),
        ("a.u16", np.full(90, 300, "<u2").tobytes(), r"token id 300 is not below the model's vocab_size \(300\)"),
    ],
)
def test_bad_token_files(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened("gpt2", tmp_path, tmp_path / name)


def test_bad_token_arrays(tmp_path: Path):
    for array, message in (
        (np.zeros((5, 5), int), "must be one row of integers, not 5 x 5 of int64"),
        (np.zeros(50), "must be one row of integers, not 50 of float64"),
        (np.full(50, -1), "token id -1 is below 0"),
    ):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(UserError, match=message):
            opened("gpt2", tmp_path, tmp_path / "a.npy")
    with pytest.raises(UserError, match="must be the only source"):
        opened("gpt2", tmp_path, tmp_path / "a.npy", "stdlib")
    with pytest.raises(UserError, match=r"none.bin: no such file"):
        opened("gpt2", tmp_path, tmp_path / "none.bin")


# ---- tokenizers


def test_a_folder_with_word_pieces_alone(tmp_path: Path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able", "able", "Able", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == len(pieces)
    assert (tokenizer.end_of_document, tokenizer.id_of("[MASK]")) == (3, 4)
    assert tokenizer.encode("Unable able, a").tolist() == [5, 6, 7, 1, 9]
    assert load_tokenizer(tmp_path / "vocab.txt").identity == tokenizer.identity
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    cased = load_tokenizer(tmp_path)
    assert cased.encode("Able able").tolist() == [8, 7]
    assert cased.identity != tokenizer.identity
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 1  # the whole description goes before the vocabulary


def test_bad_word_pieces(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"vocab.txt: has no line \[UNK\]"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": 3}')
    with pytest.raises(UserError, match="do_lower_case must be true or false, not 3"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path, sources: dict[str, Path]):
    pieces = ["[UNK]", *(f"w{i}" for i in range(400))]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    with pytest.raises(UserError, match="tokenizer: has 401 ids, but bert-classifier has a vocab_size of 300"):
        opened("bert-classifier", tmp_path, sources["labelled-text"], tokenizer=str(tmp_path))


# ---- evaluation


def test_samples_after_the_last_count_nothing(tmp_path: Path, sources: dict[str, Path]):
    data = opened("bert-classifier", tmp_path, sources["labelled-text"])
    whole = data.training.batch(0, 12)[1]
    last = LastSamples(data.training, 10)
    assert last.batch(0, 4)[1].tolist() == whole[:4].tolist()
    assert last.batch(8, 4)[1].tolist() == [*whole[8:10].tolist(), IGNORE_INDEX, IGNORE_INDEX]
    assert last.batch(12, 2)[1].tolist() == [IGNORE_INDEX] * 2
