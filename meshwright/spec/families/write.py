"""A ModelSpec as the `config.json` that transformers and our readers take it back from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.spec.difference import first_difference
from meshwright.spec.families import model_from_config
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    HeadLayer,
    ModelSpec,
    PatchEmbeddingLayer,
)
from meshwright.spec.parts import Activation

_ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
_T5_FEED_FORWARD: dict[tuple[bool, Activation], str] = {
    (False, "relu"): "relu",
    (False, "gelu"): "gelu",
    (False, "silu"): "silu",
    (True, "relu"): "gated-relu",
    (True, "gelu_tanh"): "gated-gelu",  # as the files of version 1.1 mean it
    (True, "silu"): "gated-silu",
}
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "swin": "SwinForImageClassification",
}


def config_of(model: ModelSpec) -> dict[str, Any]:
    """Return the plain data of a `config.json` of `model`.

    Reading it gives `model` again; one for which no such file can be (layers of the user's own, unequal blocks) is
    refused with what would be lost. Token ids and dropout, which a ModelSpec does not have, are left to defaults.
    """
    writer = _WRITERS.get(model.family)
    if writer is None:
        raise UserError(f"{model.name}: no config.json is known of family {model.family!r}")
    if not all(isinstance(layer, BlockLayer) for layer in _blocks_and_own(model)):
        raise UserError(f"{model.name}: has layers of its own, which no config.json can describe")
    config = {"model_type": model.family, "architectures": [architecture(model)], **writer(model)}
    back = model_from_config(config, name=model.name, where=f"config.json of {model.name}")
    if difference := first_difference(model, back):
        raise UserError(f"{model.name}: no config.json of family {model.family!r} can say {difference}")
    return config


def config_like(source: Mapping[str, Any] | None, model: ModelSpec) -> dict[str, Any]:
    """Return a `config.json` of `model` that keeps what `source`, the one that it began from, says beside.

    Where `source` describes `model`, that is all of it; a changed head replaces its fields.
    """
    if source is None:
        return config_of(model)
    kept = {**source, "architectures": [architecture(model)]}
    if _describes(kept, model):
        return kept
    written = config_of(model)
    merged = {**source, **written}
    return merged if _describes(merged, model) else written


def _describes(config: dict[str, Any], model: ModelSpec) -> bool:
    try:
        return first_difference(model_from_config(config, name=model.name, where="config.json"), model) is None
    except UserError:
        return False


def architecture(model: ModelSpec) -> str:
    """Return the class of transformers whose weights a model of its family and head has."""
    if model.family == "bert" and isinstance(model.head, ClassifierLayer):
        return "BertForSequenceClassification"
    return _ARCHITECTURES[model.family]


def _blocks_and_own(model: ModelSpec) -> list[Any]:
    return [group.layer for group in model.groups[1:-1] if group.layer.kind != "merge"]


def _block(model: ModelSpec) -> BlockLayer:
    block = model.groups[1].layer
    assert isinstance(block, BlockLayer)  # noqa: S101 checked by config_of
    return block


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    block = _block(model)
    return {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_seq_len,
        "n_embd": block.hidden_size,
        "n_layer": model.num_blocks,
        "n_head": block.attention.num_heads,
        "n_inner": block.mlp.ffn_size,
        # Of the names of one function, the one that GPT-2's files have: its arithmetic rounds in another order.
        "activation_function": {**_ACTIVATIONS, "gelu_tanh": "gelu_new"}[block.mlp.activation],
        "layer_norm_epsilon": block.norm_eps,
        "tie_word_embeddings": model.tied_embedding,
    }


def _llama(model: ModelSpec) -> dict[str, Any]:
    block = _block(model)
    attention, scaling = block.attention, block.attention.rope_scaling
    config: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.mlp.ffn_size,
        "num_hidden_layers": model.num_blocks,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_size,
        "hidden_act": _ACTIVATIONS[block.mlp.activation],
        "rms_norm_eps": block.norm_eps,
        # The older pair of fields, which versions before and after rope_parameters read.
        "rope_theta": attention.rope_theta,
        "tie_word_embeddings": model.tied_embedding,
    }
    if scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    if model.family in ("llama", "qwen3"):
        config["attention_bias"] = attention.bias
    if model.family == "llama":
        config["mlp_bias"] = block.mlp.bias
    if model.family in ("mistral", "mixtral"):
        config["sliding_window"] = attention.sliding_window or None  # null: no window
    return config


def _mixtral(model: ModelSpec) -> dict[str, Any]:
    experts = _block(model).mlp.experts
    if experts is None:
        raise UserError(f"{model.name}: a Mixtral without experts is a Mistral; set its family")
    return _llama(model) | {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}


def _bert(model: ModelSpec) -> dict[str, Any]:
    embedding = model.token_embedding
    config = {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": embedding.max_positions,
        "type_vocab_size": embedding.token_types,
        **_encoder(model),
    }
    if isinstance(model.head, HeadLayer):
        return config | {"tie_word_embeddings": model.tied_embedding}
    return config | _labels(model)


def _t5(model: ModelSpec) -> dict[str, Any]:
    block = _block(model)
    relative = block.attention.relative
    if relative is None:
        raise UserError(f"{model.name}: a T5 has relative positions")
    kind = _T5_FEED_FORWARD.get((block.mlp.gated, block.mlp.activation))
    if kind is None:
        raise UserError(f"{model.name}: no T5 has a feed-forward part with gated {block.mlp.activation}")
    num_decoder_blocks = sum(isinstance(layer, BlockLayer) and layer.length == "target_seq" for layer in model.layers)
    return {
        "vocab_size": model.vocab_size,
        "d_model": block.hidden_size,
        "d_kv": block.attention.head_size,
        "d_ff": block.mlp.ffn_size,
        "num_layers": model.num_blocks - num_decoder_blocks,
        "num_decoder_layers": num_decoder_blocks,
        "num_heads": block.attention.num_heads,
        "relative_attention_num_buckets": relative.num_buckets,
        "relative_attention_max_distance": relative.max_distance,
        "feed_forward_proj": kind,
        "layer_norm_epsilon": block.norm_eps,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,  # what every T5 begins targets with
        "tie_word_embeddings": model.tied_embedding,
        "n_positions": model.usual_seq_len,
        "target_seq_len": model.usual_target_seq_len,
    }


def _vit(model: ModelSpec) -> dict[str, Any]:
    return {**_images(model), **_encoder(model), "qkv_bias": _block(model).attention.bias, **_labels(model)}


def _swin(model: ModelSpec) -> dict[str, Any]:
    block = _block(model)
    if block.attention.windows is None:
        raise UserError(f"{model.name}: a Swin has windows")
    depths, heads = [0], [0]
    for layer in model.layers:
        if isinstance(layer, BlockLayer):
            depths[-1] += 1
            heads[-1] = layer.attention.num_heads
        elif layer.kind == "merge":
            depths.append(0)
            heads.append(0)
    return {
        **_images(model),
        "embed_dim": block.hidden_size,
        "depths": depths,
        "num_heads": heads,
        "window_size": block.attention.windows.size,
        "mlp_ratio": block.mlp.ffn_size / block.hidden_size,
        "qkv_bias": block.attention.bias,
        "hidden_act": _ACTIVATIONS[block.mlp.activation],
        "layer_norm_eps": block.norm_eps,
        **_labels(model),
    }


def _encoder(model: ModelSpec) -> dict[str, Any]:
    """Return the fields of the blocks of BERT and ViT."""
    block = _block(model)
    return {
        "hidden_size": block.hidden_size,
        "intermediate_size": block.mlp.ffn_size,
        "num_hidden_layers": model.num_blocks,
        "num_attention_heads": block.attention.num_heads,
        "hidden_act": _ACTIVATIONS[block.mlp.activation],
        "layer_norm_eps": block.norm_eps,
    }


def _images(model: ModelSpec) -> dict[str, Any]:
    embedding = model.embedding
    if not isinstance(embedding, PatchEmbeddingLayer):
        raise UserError(f"{model.name}: a model of family {model.family!r} begins with patches of images")
    return {
        "image_size": embedding.image_size,
        "patch_size": embedding.patch_size,
        "num_channels": embedding.num_channels,
    }


def _labels(model: ModelSpec) -> dict[str, Any]:
    """Return the names of classes that transformers gives to those without any."""
    if not isinstance(model.head, ClassifierLayer):
        raise UserError(f"{model.name}: a model of family {model.family!r} ends with a classifier")
    names = [f"LABEL_{index}" for index in range(model.head.num_classes)]
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


_WRITERS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "gpt2": _gpt2,
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), _llama),
    "mixtral": _mixtral,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "swin": _swin,
}
