"""A config.json written from a model: it reads back as that model, and transformers builds the same module of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from meshwright.errors import UserError
from meshwright.spec.difference import first_difference
from meshwright.spec.families import model_from_file
from meshwright.spec.families.write import architecture, config_of
from meshwright.spec.library import model, model_names
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import num_parameters
from tests.parity.zoo import own
from tests.spec.test_families import CASES, T5, read


def saved(config: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_what_is_written_reads_back_and_transformers_takes_it(model_type: str, fields: dict[str, Any], tmp_path: Path):
    spec = read(model_type, fields)
    folder = saved(config_of(spec), tmp_path)
    assert model_from_file(folder).model_copy(update={"name": spec.name}) == spec
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == [architecture(spec)]
    with torch.device("meta"):
        module = getattr(transformers, architecture(spec))._from_config(config)
    assert num_parameters(spec) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", [name for name in model_names() if model(name).family != "custom"])
def test_shipped_models_read_back(name: str, tmp_path: Path):
    spec = model(name)
    assert model_from_file(saved(config_of(spec), tmp_path)).groups == spec.groups


def test_an_untied_t5_reads_back(tmp_path: Path):
    """This version of transformers ties all of them, so its module is no witness."""
    spec = read("t5", T5 | {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False})
    assert model_from_file(saved(config_of(spec), tmp_path)).model_copy(update={"name": spec.name}) == spec


def with_block(spec: ModelSpec, **changes: Any) -> ModelSpec:
    first, blocks, last = spec.groups
    return spec.model_copy(
        update={
            "groups": (first, blocks.model_copy(update={"layer": blocks.layer.model_copy(update=changes)}), last),
        }
    )


def test_what_no_file_can_say_is_refused():
    llama = model("tiny-llama")
    for spec, says in (
        (own(), "no config.json is known of family|layers of its own"),
        (with_block(llama, post_norm=True), r"can say groups\[1\]\.layer\.post_norm: True, not False"),
        (llama.model_copy(update={"family": "mixtral"}), "a Mixtral without experts"),
        (llama.model_copy(update={"family": "vit"}), "begins with patches of images"),
    ):
        with pytest.raises(UserError, match=says):
            config_of(spec)


def test_the_first_difference_is_named():
    llama, gpt2 = model("tiny-llama"), model("gpt2")
    assert first_difference(llama, llama.model_copy(update={"name": "other", "usual_seq_len": 7})) is None
    assert first_difference(llama, gpt2) == "family: llama, not gpt2"
    wider = with_block(llama, norm_eps=1.0)
    assert first_difference(wider, llama) == "groups[1].layer.norm_eps: 1.0, not 1e-05"
    classes, tokens = (read("bert", CASES[index][1]) for index in (15, 13))
    assert first_difference(classes, tokens) is not None
    assert first_difference(classes, tokens, heads_count=False) is None
