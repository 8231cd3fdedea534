"""config.json files against the modules that transformers builds from them, and error lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from meshwright.errors import UserError
from meshwright.spec.families import READERS, model_from_config, model_from_file
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    EmbeddingLayer,
    HeadLayer,
    MergeLayer,
    ModelSpec,
    PatchEmbeddingLayer,
    hands_on,
)
from meshwright.spec.parameters import num_parameters
from meshwright.spec.parts import RelativeSpec, RopeScaling, WindowsSpec
from tests.configs import BERT, GPT2, LLAMA, LLAMA3_ROPE, MISTRAL, MIXTRAL, SWIN, T5, VIT

FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "bert": BERT,
    "t5": T5,
    "vit": VIT,
    "swin": SWIN,
}
CLASSES = {"architectures": ["BertForSequenceClassification"]}
AUTO = {
    "bert": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
    "vit": AutoModelForImageClassification,
    "swin": AutoModelForImageClassification,
}

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
    ("mistral", MISTRAL),
    ("mistral", MISTRAL | {"sliding_window": None, "num_key_value_heads": 1}),
    ("mixtral", MIXTRAL),
    ("mixtral", MIXTRAL | {"sliding_window": 8, "tie_word_embeddings": True}),
    ("bert", BERT),
    ("bert", BERT | {"type_vocab_size": 3, "hidden_act": "relu"}),
    ("bert", BERT | CLASSES),
    ("bert", BERT | CLASSES | {"num_labels": 5}),
    ("t5", T5),
    ("t5", T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}),
    ("t5", T5 | {"num_layers": 1, "num_decoder_layers": 4, "relative_attention_num_buckets": 8}),
    ("vit", VIT),
    ("vit", VIT | {"qkv_bias": False, "num_channels": 1, "num_labels": 5, "layer_norm_eps": 1e-6}),
    ("swin", SWIN),
    ("swin", SWIN | {"qkv_bias": False, "mlp_ratio": 2.5, "id2label": {0: "a", 1: "b", 2: "c"}, "num_channels": 1}),
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
    auto = AutoModelForSequenceClassification if CLASSES.items() <= fields.items() else AUTO.get(model_type)
    with torch.device("meta"):
        module = (auto or AutoModelForCausalLM).from_config(config)

    # The file that transformers would save, which leaves some defaults out and moves others.
    model = model_from_config(json.loads(config.to_json_string()), name="m", where="config.json")

    assert num_parameters(model) == sum(p.numel() for p in module.parameters())
    if isinstance(model.head, HeadLayer):
        assert model.tied_embedding == config.tie_word_embeddings
    assert model == read(model_type, fields)


def test_gpt2_fields():
    model = read("gpt2", GPT2)
    assert (model.family, model.tied_embedding, model.max_seq_len) == ("gpt2", True, 32)
    assert isinstance(model.embedding, EmbeddingLayer)
    assert (model.embedding.max_positions, model.embedding.padded_vocab_size) == (32, 384)
    assert (block(model).mlp.activation, block(model).mlp.ffn_size) == ("gelu_tanh", 4 * 48)
    assert (block(model).norm, block(model).norm_eps) == ("layernorm", 1e-5)


def test_llama_fields():
    model = read("llama", LLAMA | {"rms_norm_eps": 1e-5})
    attention = block(model).attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 2, 12)
    assert (attention.rotary, attention.rope_theta, attention.rope_scaling) == (True, 10000.0, None)
    assert isinstance(model.embedding, EmbeddingLayer)
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


def test_mistral_says_by_null_that_it_has_no_window():
    silent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    windows = [block(read("mistral", fields)).attention.sliding_window for fields in (MISTRAL, silent)]
    assert windows == [16, 4096]
    assert block(read("mistral", MISTRAL | {"sliding_window": None})).attention.sliding_window == 0
    assert block(read("mistral", MISTRAL)).norm_eps == 1e-6


def test_mixtral_fields():
    layer = block(read("mixtral", MIXTRAL))
    assert layer.mlp.experts is not None
    assert (layer.mlp.experts.num_experts, layer.mlp.experts.top_k, layer.mlp.ffn_size) == (4, 2, 80)
    assert (layer.attention.sliding_window, layer.attention.rope_theta, layer.norm_eps) == (0, 1e6, 1e-5)
    assert block(read("mixtral", MIXTRAL | {"sliding_window": 8})).attention.sliding_window == 8


def test_bert_fields():
    model = read("bert", BERT)
    embedding, layer, head = model.embedding, block(model), model.head
    assert isinstance(embedding, EmbeddingLayer)
    assert isinstance(head, HeadLayer)
    assert (model.max_seq_len, model.usual_seq_len, model.num_blocks, model.tied_embedding) == (64, 64, 3, True)
    assert (embedding.max_positions, embedding.token_types, embedding.norm, embedding.norm_eps) == (
        64,
        2,
        "layernorm",
        1e-12,
    )
    assert (layer.post_norm, layer.norm, layer.norm_eps, layer.length) == (True, "layernorm", 1e-12, "seq")
    assert (layer.attention.causal, layer.attention.bias, layer.attention.output_bias) == (False, True, True)
    assert (layer.mlp.activation, layer.mlp.bias, layer.mlp.gated) == ("gelu", True, False)
    assert (head.transform, head.norm, head.norm_eps, head.bias) == ("gelu", "layernorm", 1e-12, True)


def test_an_untied_bert():
    """Their untied head has a second bias, which nothing reads."""
    fields = BERT | {"tie_word_embeddings": False}
    with torch.device("meta"):
        module = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **fields))
    used = [p for name, p in module.named_parameters() if name != "cls.predictions.bias"]
    assert not read("bert", fields).tied_embedding
    assert num_parameters(read("bert", fields)) == sum(p.numel() for p in used)


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForPreTraining"])
def test_a_bert_predicts_tokens(name: str):
    assert read("bert", BERT | {"architectures": [name]}) == read("bert", BERT)


def test_a_bert_that_classifies():
    model = read("bert", BERT | CLASSES | {"id2label": {"0": "a", "1": "b", "2": "c"}})
    assert model.head == ClassifierLayer(hidden_size=48, num_classes=3, pooling="first", pooler=True)
    assert not model.tied_embedding
    assert model.layers[:-1] == read("bert", BERT).layers[:-1]


def test_t5_fields():
    model = read("t5", T5 | {"num_decoder_layers": 2})
    embedding, head = model.embedding, model.head
    assert isinstance(embedding, EmbeddingLayer)
    assert isinstance(head, HeadLayer)
    assert (embedding.targets, embedding.max_positions, embedding.norm) == (True, 0, None)
    assert (head.norm, head.norm_eps, head.length, head.logit_scale) == ("rmsnorm", 1e-6, "target_seq", 48**-0.5)
    assert (model.tied_embedding, model.max_seq_len) == (True, 0)
    assert (model.usual_seq_len, model.usual_target_seq_len) == (512, 512)
    blocks = [layer for layer in model.layers if isinstance(layer, BlockLayer)]
    encoder, decoder = blocks[:3], blocks[3:]
    assert [layer.closing_norm for layer in blocks] == [False, False, True, False, False]
    assert [layer.length for layer in blocks] == ["seq"] * 3 + ["target_seq"] * 2
    assert [layer.attention.causal for layer in blocks] == [False] * 3 + [True] * 2
    assert [layer.attention.relative for layer in blocks] == [
        RelativeSpec(num_buckets=32, max_distance=128, owns_table=owns) for owns in (True, False, False, True, False)
    ]
    assert all(layer.cross_attention is None for layer in encoder)
    cross = decoder[0].cross_attention
    assert cross is not None
    assert (cross.causal, cross.scaled, cross.relative, cross.head_size) == (False, False, None, 16)
    assert all(layer.cross_attention == cross for layer in decoder)
    assert not any(layer.attention.scaled or layer.attention.bias or layer.mlp.bias for layer in blocks)
    assert (blocks[0].mlp.activation, blocks[0].mlp.gated, blocks[0].norm) == ("relu", False, "rmsnorm")


def test_what_the_layers_of_a_t5_hand_on():
    model = read("t5", T5 | {"num_decoder_layers": 2})
    names = [[tensor.name for tensor in hands_on(layer)] for layer in model.layers]
    assert names == [
        ["hidden", "target"],
        *[["hidden", "target", "relative"]] * 2,
        ["hidden", "target"],
        ["hidden", "source", "relative"],
        ["hidden"],
        [],
    ]
    shapes = {tensor.name: tensor.shape for layer in model.layers[1:5] for tensor in hands_on(layer)[1:]}
    assert shapes == {"target": ("target_seq", 48), "source": ("seq", 48), "relative": (32, 4)}


def test_a_t5_of_one_block_a_side():
    model = read("t5", T5 | {"num_layers": 1})
    encoder, decoder = model.layers[1:3]
    assert isinstance(encoder, BlockLayer)
    assert isinstance(decoder, BlockLayer)
    assert encoder.closing_norm
    assert not decoder.closing_norm
    assert [tensor.name for tensor in encoder.carries] == ["target"]
    assert decoder.carries == ()
    for layer in (encoder, decoder):
        assert layer.attention.relative is not None
        assert layer.attention.relative.owns_table


def test_a_newer_t5():
    gated = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model = read("t5", gated | {"n_positions": 64, "target_seq_len": 8})
    assert isinstance(model.head, HeadLayer)
    assert (model.tied_embedding, model.head.logit_scale) == (False, 1.0)
    assert (block(model).mlp.activation, block(model).mlp.gated) == ("gelu_tanh", True)
    assert (model.usual_seq_len, model.usual_target_seq_len) == (64, 8)
    assert read("t5", gated | {"n_positions": 64}).usual_target_seq_len == 64
    rewritten = read("t5", T5 | {"tie_word_embeddings": True, "scale_decoder_outputs": False})
    assert isinstance(rewritten.head, HeadLayer)
    assert (rewritten.tied_embedding, rewritten.head.logit_scale) == (True, 1.0)


def test_vit_fields():
    model = read("vit", VIT | {"layer_norm_eps": 1e-6})
    assert model.embedding == PatchEmbeddingLayer(
        hidden_size=48, image_size=32, patch_size=8, num_channels=3, class_token=True, positions=True
    )
    layer = block(model)
    assert (layer.length, model.usual_seq_len, model.fixed_seq_len, model.max_seq_len) == (17, 17, 17, 0)
    assert (layer.post_norm, layer.norm, layer.norm_eps) == (False, "layernorm", 1e-6)
    assert (layer.attention.causal, layer.attention.bias, layer.attention.output_bias) == (False, True, True)
    assert (layer.mlp.activation, layer.mlp.bias) == ("gelu", True)
    assert model.head == ClassifierLayer(
        hidden_size=48, num_classes=2, pooling="first", norm="layernorm", norm_eps=1e-6, length=17
    )
    assert not block(read("vit", VIT | {"qkv_bias": False})).attention.bias
    assert read("vit", VIT | {"image_size": [32, 32], "patch_size": [8, 8], "head_dim": 12}) == read("vit", VIT)
    assert block(read("vit", VIT)).norm_eps == 1e-12


def test_swin_fields():
    """Grids of 16, 8 and 4 tokens a side: the last is one window, which nothing is moved in."""
    model = read("swin", SWIN | {"layer_norm_eps": 1e-6, "num_labels": 7})
    assert model.embedding == PatchEmbeddingLayer(
        hidden_size=16, image_size=32, patch_size=2, num_channels=3, norm="layernorm"
    )
    assert [layer.kind for layer in model.layers[1:-1]] == [
        *["block"] * 2,
        "merge",
        *["block"] * 3,
        "merge",
        "block",
    ]
    merges = [layer for layer in model.layers if isinstance(layer, MergeLayer)]
    assert merges == [MergeLayer(hidden_size=16, grid=16), MergeLayer(hidden_size=32, grid=8)]
    blocks = [layer for layer in model.layers if isinstance(layer, BlockLayer)]
    assert [layer.attention.windows for layer in blocks] == [
        WindowsSpec(size=4, grid=grid, shift=shift)
        for grid, shift in ((16, 0), (16, 2), (8, 0), (8, 2), (8, 0), (4, 0))
    ]
    assert [layer.length for layer in blocks] == [256, 256, 64, 64, 64, 16]
    assert [layer.hidden_size for layer in blocks] == [16, 16, 32, 32, 32, 64]
    assert [layer.attention.num_heads for layer in blocks] == [2, 2, 4, 4, 4, 4]
    assert [layer.mlp.ffn_size for layer in blocks] == [64, 64, 128, 128, 128, 256]
    assert {(layer.norm_eps, layer.attention.causal, layer.attention.output_bias) for layer in blocks} == {
        (1e-6, False, True)
    }
    assert model.head == ClassifierLayer(
        hidden_size=64, num_classes=7, pooling="mean", norm="layernorm", norm_eps=1e-6, length=16
    )
    assert (model.usual_seq_len, model.fixed_seq_len) == (256, 256)


def test_a_last_stage_of_one_window_is_not_moved():
    model = read("swin", SWIN | {"depths": [2, 2, 2]})
    last = [layer.attention.windows for layer in model.layers if isinstance(layer, BlockLayer)][-2:]
    assert last == [WindowsSpec(size=4, grid=4)] * 2


BAD = [
    ("gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True is not supp"),
    ("gpt2", GPT2 | {"scale_attn_weights": False}, "scale_attn_weights: False is not supported"),
    ("gpt2", GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: True is not supported"),
    ("gpt2", GPT2 | {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
    ("gpt2", GPT2 | {"activation_function": "relu6"}, "activation_function: 'relu6' is not supported; allowed: silu, "),
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
    ("qwen2", LLAMA | {"use_sliding_window": True}, "use_sliding_window: True is not supported"),
    ("qwen3", LLAMA | {"layer_types": ["sliding_attention"]}, "layer_types: only full_attention is supported"),
    ("mistral", MISTRAL | {"layer_types": ["full_attention"]}, "layer_types: a list is not supported"),
    ("mistral", MISTRAL | {"sliding_window": 0}, "sliding_window: must be a positive whole number, not 0"),
    ("mixtral", MIXTRAL | {"output_router_logits": True}, "output_router_logits: True is not supported"),
    ("mixtral", MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1 is not supported"),
    ("mixtral", MIXTRAL | {"num_experts_per_tok": 5}, r"num_experts_per_tok: 5 is above num_local_experts \(4\)"),
    ("bert", BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key' is not supp"),
    ("bert", BERT | {"is_decoder": True}, "is_decoder: True is not supported"),
    ("bert", BERT | {"add_cross_attention": True}, "add_cross_attention: True is not supported"),
    ("bert", BERT | {"chunk_size_feed_forward": 8}, "chunk_size_feed_forward: 8 is not supported"),
    ("bert", BERT | {"pruned_heads": {"0": [1]}}, "pruned_heads: an object is not supported"),
    ("bert", BERT | {"num_attention_heads": 5}, r"num_attention_heads: 5 does not divide hidden_size \(48\)"),
    ("bert", BERT | {"hidden_act": "relu6"}, "hidden_act: 'relu6' is not supported; allowed: silu, "),
    (
        "bert",
        BERT | {"architectures": ["BertForQuestionAnswering"]},
        "architectures: 'BertForQuestionAnswering' is not",
    ),
    ("bert", BERT | {"architectures": ["BertModel", "BertModel"]}, "architectures: 'BertModel, BertModel' is not supp"),
    ("bert", BERT | CLASSES | {"num_labels": 1}, "num_labels: one label is a regression"),
    ("bert", BERT | CLASSES | {"id2label": {"0": "a"}}, "id2label: one label is a regression"),
    ("bert", BERT | CLASSES | {"id2label": [1]}, "id2label: must be an object, not a list"),
    ("bert", BERT | CLASSES | {"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, "num_labels: 3, but id2label has 2"),
    ("bert", BERT | CLASSES | {"problem_type": "regression"}, "problem_type: 'regression' is not supported"),
    ("t5", T5 | {"architectures": ["T5EncoderModel"]}, "architectures: 'T5EncoderModel' is not supported"),
    ("t5", T5 | {"is_encoder_decoder": False}, "is_encoder_decoder: False is not supported"),
    ("t5", T5 | {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj: 'gated-tanh' is not supported; allowed: relu"),
    ("t5", T5 | {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets: must be at least 4, not 3"),
    ("t5", T5 | {"relative_attention_max_distance": 16}, "relative_attention_max_distance: must be above half of"),
    ("t5", T5 | {"num_layers": 4000}, "groups: 8002 layers are more than the 4096 that can be planned"),
    ("t5", T5 | {"target_seq_len": 0}, "target_seq_len: must be a positive whole number, not 0"),
    (
        "vit",
        VIT | {"architectures": ["ViTForMaskedImageModeling"]},
        "architectures: 'ViTForMaskedImageModeling' is not",
    ),
    (
        "vit",
        VIT | {"image_size": [32, 64]},
        r"image_size: must be square: one number, or the same twice, not \[32, 64\]",
    ),
    ("vit", VIT | {"image_size": []}, "image_size: must be a list of positive whole numbers, not an empty list"),
    ("vit", VIT | {"patch_size": [8, "8"]}, "patch_size: must be a positive whole number, not '8'"),
    ("vit", VIT | {"patch_size": 7}, r"patch_size: 7 does not divide image_size \(32\)"),
    ("vit", VIT | {"patch_size": 1, "image_size": 8192}, "image_size: 8192 x 8192 patches are more than"),
    ("vit", VIT | {"patch_size": 4096, "image_size": 4096}, "patch_size: a patch has 50331648 colours; at most"),
    ("vit", VIT | {"num_attention_heads": 5}, r"num_attention_heads: 5 does not divide hidden_size \(48\)"),
    ("vit", VIT | {"head_dim": 16}, "head_dim: 16 is not supported"),
    ("swin", SWIN | {"use_absolute_embeddings": True}, "use_absolute_embeddings: True is not supported"),
    ("swin", SWIN | {"depths": 2}, "depths: must be a list of positive whole numbers, not 2"),
    ("swin", SWIN | {"num_heads": [2, 4]}, "num_heads: 2 entries, but depths has 3 stages"),
    ("swin", SWIN | {"num_heads": [2, 3, 4]}, r"num_heads: 3 does not divide hidden size \(32\)"),
    ("swin", SWIN | {"window_size": 8}, r"window_size: 8 does not divide the grid of stage 3 \(4 x 4\)"),
    ("swin", SWIN | {"image_size": 36}, "depths: no stage can follow stage 2, whose grid has an odd side, 9"),
    ("swin", SWIN | {"mlp_ratio": 0.01}, "mlp_ratio: 0.01 makes 0 of 16; from 1 to"),
    ("swin", SWIN | {"architectures": ["SwinBackbone"]}, "architectures: 'SwinBackbone' is not supported"),
    (
        "mamba",
        {},
        (
            "model_type: 'mamba' is not supported; supported: gpt2, llama, qwen2, qwen3, mistral, mixtral, bert, t5, "
            "vit, swin; to add one, write a reader in meshwright/spec/families and enter it in READERS .CONTRIBUTING"
        ),
    ),
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
def test_quantised_weights_are_refused(model_type: str):
    with pytest.raises(UserError, match=r"config\.json: quantization_config: an object is not supported \(quantised"):
        read(model_type, FIELDS[model_type] | {"quantization_config": {"bits": 4}})


@pytest.mark.parametrize("model_type", READERS)
def test_every_required_field_is_named_when_missing(model_type: str):
    fields = FIELDS[model_type]
    has_default = {"sliding_window"} | (set() if model_type in {"mistral", "mixtral"} else {"num_key_value_heads"})
    for field in set(fields) - has_default:
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
