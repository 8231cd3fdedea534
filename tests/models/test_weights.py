"""Hugging Face folders: what is read and written again is the same to the bit, and what is wrong is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.models.names import checkpoint_tensors
from meshwright.models.weights import MARK, fingerprint, open_weights, save_weights
from meshwright.runtime.initialize import initial_parameter, parameter_name
from meshwright.spec.families.write import config_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import layer_parameters
from tests.models.test_huggingface import CASES, build_ours, build_theirs, make_inputs

INDEX = "model.safetensors.index.json"


def saved(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, ModelSpec]:
    """Save their module of a case to `folder`, and return it with our description of it."""
    theirs, spec = build_theirs(name)
    theirs = theirs.to(dtype)
    theirs.save_pretrained(folder, **options)  # pyright: ignore[reportCallIssue]
    return theirs, spec


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(want: dict[str, Tensor], got: dict[str, Tensor], spec: ModelSpec) -> bool:
    """Return whether files hold the same to the bit; an untied BERT writes a second bias, which it never uses."""
    unused = {copy for tensor in checkpoint_tensors(spec) for copy in tensor.copies}
    return want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want.keys() - unused)


def all_parameters(spec: ModelSpec) -> set[str]:
    return {
        parameter_name(spec, index, parameter)
        for index, layer in enumerate(spec.layers)
        for parameter in layer_parameters(layer)
    }


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_and_written_to_the_bit(name: str, tmp_path: Path):
    theirs, spec = saved(name, tmp_path / "theirs")
    weights = open_weights(tmp_path / "theirs", spec)
    assert weights.new == ()
    ours = build_ours({n: weights(n) for n in all_parameters(spec)}, spec)
    inputs, _ = make_inputs(spec)
    assert torch.allclose(ours.logits(*inputs.values()), theirs(**inputs).logits, atol=1e-5, rtol=1e-5)

    files = save_weights(tmp_path / "ours", spec, weights, config=config_of(spec))
    assert {file.name for file in files} == {"config.json", "model.safetensors", MARK}
    want, got = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert same(want, got, spec)
    if name == "t5-untied":
        return  # this version of transformers ties it whatever the files say
    loaded = getattr(transformers, CASES[name][0]).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert torch.equal(loaded.eval()(**inputs).logits, theirs.eval()(**inputs).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-untied", "swin"])
def test_shards(name: str, tmp_path: Path):
    _, spec = saved(name, tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / INDEX).exists()
    weights = open_weights(tmp_path / "theirs", spec)
    files = save_weights(tmp_path / "ours", spec, weights, config=config_of(spec), max_shard_bytes=60_000)
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    shards = {file.name for file in files if file.suffix == ".safetensors"}
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == shards
    want, got = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert got.keys() == index["weight_map"].keys()
    assert same(want, got, spec)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in got.values())
    getattr(transformers, CASES[name][0]).from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "again")
    assert same(want, all_tensors(tmp_path / "again"), spec)


@pytest.mark.parametrize(("dtype", "short"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_half_precision_is_read_as_fp32_and_written_again_to_the_bit(dtype: torch.dtype, short: Any, tmp_path: Path):
    _, spec = saved("qwen3", tmp_path / "theirs", dtype=dtype)
    weights = open_weights(tmp_path / "theirs", spec)
    assert weights("layers.1.norm1.weight").dtype == torch.float32
    save_weights(tmp_path / "ours", spec, weights, config=config_of(spec), dtype=short)
    want, got = all_tensors(tmp_path / "theirs"), all_tensors(tmp_path / "ours")
    assert all(got[key].dtype == dtype and torch.equal(want[key], got[key]) for key in want)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert loaded.dtype == dtype


def test_padding_is_zero(tmp_path: Path):
    _, spec = saved("gpt2", tmp_path)
    token = open_weights(tmp_path, spec)("layers.0.token.weight")
    assert len(token) > spec.vocab_size
    assert not token[spec.vocab_size :].any()


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def torn(folder: Path, file: str = "model.safetensors") -> None:
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-100])


def shard_of(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def without_a_tensor_of_the_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["nothing.weight"] = shard_of(folder).name
    (folder / INDEX).write_text(json.dumps(index))


def index_of(content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps(content))


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda f: edit(f, lambda t: t.pop("model.layers.0.input_layernorm.weight")),
        "layernorm.weight: is missing",
    ),
    "head missing": (lambda f: edit(f, lambda t: t.pop("lm_head.weight")), "lm_head.weight: is missing; --new-head"),
    "unexpected": (lambda f: edit(f, lambda t: t.update(odd=torch.zeros(2))), "odd: is not a tensor of this model"),
    "shape": (
        lambda f: edit(f, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(7, 48)})),
        r"embed_tokens.weight has shape \(7, 48\), but that of llama is \(300, 48\)$",
    ),
    "shape of head": (
        lambda f: edit(f, lambda t: t.update({"lm_head.weight": torch.zeros(7, 48)})),
        "--new-head begins with a new one",
    ),
    "dtype": (lambda f: edit(f, lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)})), "is stored as I8"),
    "torn": (torn, "model.safetensors: is not a whole safetensors file"),
    "text": (lambda f: (f / "model.safetensors").write_text("words"), "is not a whole safetensors file"),
    "no file": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors; weights are read from"),
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin is pickled.*save_pretrained",
    ),
}
BAD_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: shard_of(f).unlink(), "model-00001-of-.* is missing, which .* names; fetch"),
    "torn shard": (lambda f: torn(f, shard_of(f).name), "model-00001-of-.*: is not a whole safetensors file"),
    "index names too much": (without_a_tensor_of_the_index, "nothing.weight is not in it, where"),
    "index without map": (index_of({}), "weight_map: must be an object"),
    "index is a list": (index_of([1]), "weight_map: must be an object"),
    "index leads out": (index_of({"weight_map": {"a": "../a.safetensors"}}), "is no safetensors file of this folder"),
}


@pytest.mark.parametrize("what", [*BAD, *BAD_SHARDS])
def test_bad_folders_are_refused_in_one_line(what: str, tmp_path: Path):
    is_whole = what in BAD
    _, spec = saved("llama", tmp_path, max_shard_size="1GB" if is_whole else "40KB")
    spoil, says = (BAD if is_whole else BAD_SHARDS)[what]
    spoil(tmp_path)
    with pytest.raises(UserError, match=says) as error:
        open_weights(tmp_path, spec)
    assert "\n" not in str(error.value)


def test_no_folder(tmp_path: Path):
    with pytest.raises(UserError, match="no such folder"):
        open_weights(tmp_path / "nowhere", build_theirs("llama")[1])


def test_a_new_head_is_drawn_and_nothing_else(tmp_path: Path):
    theirs, spec = saved("bert", tmp_path / "tokens")
    draw = initial_parameter(spec, 3)
    theirs.bert.save_pretrained(tmp_path / "body")  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"cls\.predictions.* is missing; --new-head"):
        open_weights(tmp_path / "body", spec)
    weights = open_weights(tmp_path / "body", spec, new_head=draw)
    assert weights.new
    assert all(name.startswith("cls.predictions.") for name in weights.new)
    head = f"layers.{len(spec.layers) - 1}."
    kept = open_weights(tmp_path / "tokens", spec)
    for name in all_parameters(spec):
        assert torch.equal(weights(name), (draw if name.startswith(head) else kept)(name)), name


def test_classes_of_another_number_are_new(tmp_path: Path):
    theirs, _ = saved("vit", tmp_path)  # five classes
    two = build_theirs("vit-no-bias")[1].head
    spec = build_theirs("vit")[1]
    spec = spec.model_copy(update={"groups": (*spec.groups[:-1], spec.groups[-1].model_copy(update={"layer": two}))})
    with pytest.raises(UserError, match=r"classifier\.\w+ has shape \(5,.*--new-head begins with a new one"):
        open_weights(tmp_path, spec)
    weights = open_weights(tmp_path, spec, new_head=initial_parameter(spec, 0))
    assert set(weights.new) == {"classifier.weight", "classifier.bias"}
    norm = f"layers.{len(spec.layers) - 1}.norm.weight"
    assert torch.equal(weights(norm), theirs.vit.layernorm.weight)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def test_a_classifier_from_a_language_model(tmp_path: Path):
    saved("bert", tmp_path)
    spec = build_theirs("bert-classes")[1]
    weights = open_weights(tmp_path, spec, new_head=initial_parameter(spec, 0))
    assert set(weights.new) == {
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip


def test_only_an_earlier_export_is_replaced(tmp_path: Path):
    _, spec = saved("gpt2", tmp_path / "theirs")
    weights, config = open_weights(tmp_path / "theirs", spec), config_of(spec)
    with pytest.raises(UserError, match="holds files that are not of an earlier export"):
        save_weights(tmp_path / "theirs", spec, weights, config=config)
    (tmp_path / "empty").mkdir()
    save_weights(tmp_path / "empty", spec, weights, config=config, max_shard_bytes=60_000)
    save_weights(tmp_path / "empty", spec, weights, config=config, dtype="bf16")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"config.json", "model.safetensors", MARK}
    (tmp_path / "empty" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds tokenizer\.json, which is not of the earlier export"):
        save_weights(tmp_path / "empty", spec, weights, config=config)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; name a folder"):
        save_weights(tmp_path / "file", spec, weights, config=config)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path):
    _, spec = saved("gpt2", tmp_path / "theirs")
    weights, config = open_weights(tmp_path / "theirs", spec), config_of(spec)
    save_weights(tmp_path / "ours", spec, weights, config=config)
    before = (tmp_path / "ours" / "model.safetensors").read_bytes()
    last = f"layers.{len(spec.layers) - 1}.norm.bias"

    def breaks(name: str) -> Tensor:
        if name == last:
            raise OSError(28, "No space left on device")
        return weights(name) + 1

    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save_weights(tmp_path / "ours", spec, breaks, config=config)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours"}
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == before


def test_one_tensor_at_a_time_is_asked_for(tmp_path: Path):
    """Reading and writing go through the parameters in the order of the file, each asked for once or twice (tied)."""
    _, spec = saved("gpt2", tmp_path / "theirs")
    weights, asked = open_weights(tmp_path / "theirs", spec), []
    save_weights(tmp_path / "ours", spec, lambda n: (asked.append(n), weights(n))[1], config=config_of(spec))
    assert asked == [ours for tensor in checkpoint_tensors(spec) for ours in tensor.ours]


def test_fingerprints_tell_folders_apart(tmp_path: Path):
    saved("gpt2", tmp_path / "a")
    saved("gpt2", tmp_path / "b")
    saved("gpt2-untied", tmp_path / "c")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") != fingerprint(tmp_path / "c")
