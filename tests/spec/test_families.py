"""config.json files against the modules that transformers builds from them, and error lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.errors import UserError
from meshwright.spec.families import READERS, model_from_config, model_from_file
from meshwright.spec.model import BlockLayer, ModelSpec
from meshwright.spec.parameters import layer_parameters, num_parameters
from meshwright.spec.parts import RopeScaling
from tests.configs import GPT2, LLAMA, LLAMA3_ROPE

CASES = [
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 100, "tie_word_embeddings": False, "activation_function": "gelu"}),
    ("llama", LLAMA),
    ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", LLAMA | {"head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}),
    ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    ("qwen3", LLAMA | {"head_dim": 8}),
    ("qwen3", LLAMA | {"attention_bias": True}),
]


def block(model: ModelSpec) -> BlockLayer:
    layer = model.layers[1]
    assert isinstance(layer, BlockLayer)
    return layer


def read(model_type: str, fields: dict[str, Any]) -> ModelSpec:
    return model_from_config({"model_type": model_type, **fields}, name="m", where="config.json")


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_parameter_counts_are_those_of_transformers(model_type: str, fields: dict[str, Any]):
    config = AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    blocks = module.transformer.h if model_type == "gpt2" else module.model.layers

    # The file that transformers would save, which leaves some defaults out and moves others.
    model = model_from_config(json.loads(config.to_json_string()), name="m", where="config.json")

    assert num_parameters(model) == sum(p.numel() for p in module.parameters())
    assert sum(p.num_elements for p in layer_parameters(block(model))) == sum(p.numel() for p in blocks[0].parameters())
    assert model.num_blocks == len(blocks)
    assert model.tied_embedding == config.tie_word_embeddings
    assert model == read(model_type, fields)


def test_gpt2_fields():
    model = read("gpt2", GPT2)
    assert (model.family, model.tied_embedding, model.max_seq_len) == ("gpt2", True, 32)
    assert (model.embedding.max_positions, model.embedding.padded_vocab_size) == (32, 384)
    assert (block(model).mlp.activation, block(model).mlp.ffn_size) == ("gelu_tanh", 4 * 48)
    assert (block(model).norm, block(model).norm_eps) == ("layernorm", 1e-5)


def test_llama_fields():
    model = read("llama", LLAMA | {"rms_norm_eps": 1e-5})
    attention = block(model).attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 2, 12)
    assert (attention.rotary, attention.rope_theta, attention.rope_scaling) == (True, 10000.0, None)
    assert (model.tied_embedding, model.max_seq_len, model.embedding.max_positions) == (False, 64, 0)
    assert (block(model).mlp.gated, block(model).norm, block(model).norm_eps) == (True, "rmsnorm", 1e-5)


def test_heads_without_groups_by_default():
    fields = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert block(read("llama", fields)).attention.num_kv_heads == 4


def test_old_and_new_rope_files_agree():
    new = read("llama", LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}})
    old = read("llama", LLAMA | {"rope_theta": 500000, "rope_scaling": LLAMA3_ROPE})
    older_name = {"type" if key == "rope_type" else key: value for key, value in LLAMA3_ROPE.items()}
    assert new == old == read("llama", LLAMA | {"rope_theta": 500000.0, "rope_scaling": older_name})
    assert block(new).attention.rope_theta == 500000.0
    assert block(new).attention.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
    )


def test_qwen_attention():
    qwen2, qwen3 = block(read("qwen2", LLAMA)).attention, block(read("qwen3", LLAMA)).attention
    assert (qwen2.bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.bias, qwen3.qk_norm, qwen3.head_size) == (False, True, 128)


BAD = [
    ("gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True is not supp"),
    ("gpt2", GPT2 | {"scale_attn_weights": False}, "scale_attn_weights: False is not supported"),
    ("gpt2", GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: True is not supported"),
    ("gpt2", GPT2 | {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
    ("gpt2", GPT2 | {"activation_function": "relu"}, "activation_function: 'relu' is not supported; allowed: silu, "),
    ("gpt2", GPT2 | {"n_head": 5}, r"n_head: 5 does not divide n_embd \(48\)"),
    ("gpt2", GPT2 | {"n_layer": None}, "n_layer: required, but missing"),
    ("llama", LLAMA | {"hidden_size": None}, "hidden_size: required, but missing"),
    ("llama", LLAMA | {"hidden_size": "48"}, "hidden_size: must be a positive whole number, not '48'"),
    ("llama", LLAMA | {"hidden_size": True}, "hidden_size: must be a positive whole number, not True"),
    ("llama", LLAMA | {"num_attention_heads": 0}, "num_attention_heads: must be a positive whole number, not 0"),
    ("llama", LLAMA | {"num_key_value_heads": 3}, r"num_key_value_heads: 3 does not divide num_attention_heads \(4\)"),
    ("llama", LLAMA | {"num_attention_heads": 16}, "head_dim: must be even for rotary positions, not 3"),
    ("llama", LLAMA | {"rms_norm_eps": -1.0}, r"rms_norm_eps: must be a positive number, not -1\.0"),
    ("llama", LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a positive number, not nan"),
    ("llama", LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false, not 'yes'"),
    (
        "llama",
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "rope_scaling: rope_type: 'yarn' is not s",
    ),
    (
        "llama",
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "type: 'linear' is not supported; allowed: d",
    ),
    ("llama", LLAMA | {"rope_scaling": {"factor": 2.0}}, "rope_type: required beside factor"),
    ("llama", LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor: required, but missing"),
    ("llama", LLAMA | {"rope_scaling": 2}, "rope_scaling: must be an object, not 2"),
    ("llama", LLAMA | {"rope_parameters": {"full_attention": {}}}, "rope_parameters: one entry per kind of layer"),
    ("llama", LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5 is not supp"),
    ("llama", LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config: .* is not supported"),
    ("qwen2", LLAMA | {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
    ("qwen3", LLAMA | {"layer_types": ["sliding_attention"]}, "layer_types: only full_attention is supported"),
    ("mamba", {}, "model_type: 'mamba' is not supported; supported: gpt2, llama, qwen2, qwen3"),
    (None, {}, "model_type: required, but missing; supported: gpt2"),
    (["llama"], {}, r"model_type: \['llama'\] is not supported"),
]


@pytest.mark.parametrize(("model_type", "fields", "message"), BAD)
def test_a_bad_field_is_one_line_that_names_it(model_type: Any, fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as caught:
        read(model_type, fields)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", READERS)
def test_every_required_field_is_named_when_missing(model_type: str):
    fields = GPT2 if model_type == "gpt2" else LLAMA
    for field in set(fields) - {"num_key_value_heads"}:
        with pytest.raises(UserError, match=f"config.json: {field}: required, but missing"):
            read(model_type, {key: value for key, value in fields.items() if key != field})


def test_files_and_folders(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    assert model_from_file(folder) == model_from_file(folder / "config.json")
    assert model_from_file(folder).name == "my-model"
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match=r"other\.json: a config\.json holds one object, not list"):
        model_from_file(tmp_path / "other.json")
    with pytest.raises(UserError, match="no such file"):
        model_from_file(tmp_path)
