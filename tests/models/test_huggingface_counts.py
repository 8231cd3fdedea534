"""Parameters and forward FLOPs of every layer against transformers' modules, which are run and watched.

Their eager attention forms every product as a matrix product that torch's counter sees, over all pairs of tokens
(those inside a window in Swin), and their eager experts run each expert on the tokens that were sent to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from meshwright.spec.families import READERS, model_from_config
from meshwright.spec.flops import forward_flops
from meshwright.spec.model import AnyLayer, EmbeddingLayer, HeadLayer, ModelSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.tensors import Lengths

NUM_SAMPLES = 2
SEEDS = range(3)
Names = tuple[str, ...]


class Case(NamedTuple):
    """How configurations of a family are drawn, which class of theirs is built, and the modules of each layer."""

    model_type: str
    draw: Callable[[random.Random], dict[str, Any]]
    build: Any
    layers: Callable[[Any], Iterator[Names]]


class Both(NamedTuple):
    """Our description, and their module with the names of what each of our layers is there."""

    spec: ModelSpec
    module: nn.Module
    names: tuple[Names, ...]


def draw_heads(rng: random.Random) -> tuple[int, int]:
    """Return heads and their size."""
    return rng.choice([2, 4, 6]), rng.choice([4, 8, 10])


def draw_decoder(rng: random.Random) -> dict[str, Any]:
    heads, size = draw_heads(rng)
    return {
        "hidden_size": heads * size,
        "intermediate_size": rng.randrange(20, 90),
        "num_hidden_layers": rng.randrange(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "head_dim": rng.choice([size, size + 2]),
        "max_position_embeddings": 64,
        "vocab_size": rng.randrange(100, 400),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def draw_llama(rng: random.Random) -> dict[str, Any]:
    return draw_decoder(rng) | {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}


def draw_qwen2(rng: random.Random) -> dict[str, Any]:
    return {key: value for key, value in draw_decoder(rng).items() if key != "head_dim"}


def draw_qwen3(rng: random.Random) -> dict[str, Any]:
    return draw_decoder(rng) | {"attention_bias": rng.random() < 0.5}


def draw_mistral(rng: random.Random) -> dict[str, Any]:
    return draw_decoder(rng) | {"sliding_window": rng.choice([None, 3, 8])}


def draw_mixtral(rng: random.Random) -> dict[str, Any]:
    num_experts = rng.randrange(2, 6)
    return draw_decoder(rng) | {
        "num_local_experts": num_experts,
        "num_experts_per_tok": rng.randrange(1, num_experts + 1),
        "experts_implementation": "eager",
    }


def draw_gpt2(rng: random.Random) -> dict[str, Any]:
    heads, size = draw_heads(rng)
    return {
        "n_embd": heads * size,
        "n_head": heads,
        "n_layer": rng.randrange(1, 4),
        "n_positions": 64,
        "n_inner": rng.choice([None, 50]),
        "vocab_size": rng.randrange(100, 400),
    }


def draw_bert(rng: random.Random) -> dict[str, Any]:
    heads, size = draw_heads(rng)
    return {
        "hidden_size": heads * size,
        "intermediate_size": rng.randrange(20, 90),
        "num_hidden_layers": rng.randrange(1, 4),
        "num_attention_heads": heads,
        "max_position_embeddings": rng.randrange(32, 64),
        "type_vocab_size": rng.randrange(1, 4),
        "vocab_size": rng.randrange(100, 400),
    }


def draw_bert_classifier(rng: random.Random) -> dict[str, Any]:
    name = "BertForSequenceClassification"
    return draw_bert(rng) | {"architectures": [name], "num_labels": rng.randrange(2, 9)}


def draw_t5(rng: random.Random) -> dict[str, Any]:
    heads, size = draw_heads(rng)
    return {
        "d_model": rng.randrange(20, 60),
        "d_kv": size,
        "d_ff": rng.randrange(20, 90),
        "num_heads": heads,
        "num_layers": rng.randrange(1, 4),
        "num_decoder_layers": rng.choice([None, 1, 3]),
        "relative_attention_num_buckets": rng.choice([8, 32]),
        "vocab_size": rng.randrange(100, 400),
    }


def draw_newer_t5(rng: random.Random) -> dict[str, Any]:
    return draw_t5(rng) | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def draw_vit(rng: random.Random) -> dict[str, Any]:
    heads, size = draw_heads(rng)
    return {
        "hidden_size": heads * size,
        "intermediate_size": rng.randrange(20, 90),
        "num_hidden_layers": rng.randrange(1, 4),
        "num_attention_heads": heads,
        "image_size": 24,
        "patch_size": rng.choice([3, 4, 6]),
        "num_channels": rng.choice([1, 3]),
        "qkv_bias": rng.random() < 0.5,
        "num_labels": rng.randrange(2, 9),
    }


def draw_swin(rng: random.Random) -> dict[str, Any]:
    window, num_stages, (heads, size) = rng.choice([2, 3]), rng.randrange(1, 4), draw_heads(rng)
    patch = rng.choice([1, 2])
    return {
        "embed_dim": heads * size,
        "depths": [rng.randrange(1, 4) for _ in range(num_stages)],
        "num_heads": [heads] * num_stages,
        "window_size": window,
        "image_size": patch * window * 2 ** rng.randrange(num_stages - 1, num_stages + 1),
        "patch_size": patch,
        "num_channels": rng.choice([1, 3]),
        "mlp_ratio": rng.choice([1.5, 4]),
        "qkv_bias": rng.random() < 0.5,
        "num_labels": rng.randrange(2, 9),
    }


def llama_layers(config: Any) -> Iterator[Names]:
    yield ("model.embed_tokens",)
    yield from ((f"model.layers.{index}",) for index in range(config.num_hidden_layers))
    yield ("model.norm", "lm_head")


def gpt2_layers(config: Any) -> Iterator[Names]:
    yield ("transformer.wte", "transformer.wpe")
    yield from ((f"transformer.h.{index}",) for index in range(config.n_layer))
    yield ("transformer.ln_f", "lm_head")


def bert_layers(config: Any) -> Iterator[Names]:
    yield ("bert.embeddings",)
    yield from ((f"bert.encoder.layer.{index}",) for index in range(config.num_hidden_layers))
    yield ("bert.pooler", "classifier") if "architectures" in config.to_diff_dict() else ("cls",)


def t5_layers(config: Any) -> Iterator[Names]:
    """Yield their modules: the encoder's last norm belongs to its last block, the decoder's to the head."""
    yield ("shared",)
    for index in range(config.num_layers):
        is_last = index == config.num_layers - 1
        yield (f"encoder.block.{index}", "encoder.final_layer_norm") if is_last else (f"encoder.block.{index}",)
    yield from ((f"decoder.block.{index}",) for index in range(config.num_decoder_layers))
    yield ("decoder.final_layer_norm", "lm_head")


def vit_layers(config: Any) -> Iterator[Names]:
    yield ("vit.embeddings",)
    yield from ((f"vit.layers.{index}",) for index in range(config.num_hidden_layers))
    yield ("vit.layernorm", "classifier")


def swin_layers(config: Any) -> Iterator[Names]:
    yield ("swin.embeddings",)
    for stage, depth in enumerate(config.depths):
        yield from ((f"swin.encoder.layers.{stage}.blocks.{index}",) for index in range(depth))
        if stage < len(config.depths) - 1:
            yield (f"swin.encoder.layers.{stage}.downsample",)
    yield ("swin.layernorm", "classifier")


CASES = {
    "gpt2": Case("gpt2", draw_gpt2, AutoModelForCausalLM, gpt2_layers),
    "llama": Case("llama", draw_llama, AutoModelForCausalLM, llama_layers),
    "qwen2": Case("qwen2", draw_qwen2, AutoModelForCausalLM, llama_layers),
    "qwen3": Case("qwen3", draw_qwen3, AutoModelForCausalLM, llama_layers),
    "mistral": Case("mistral", draw_mistral, AutoModelForCausalLM, llama_layers),
    "mixtral": Case("mixtral", draw_mixtral, AutoModelForCausalLM, llama_layers),
    "bert": Case("bert", draw_bert, AutoModelForMaskedLM, bert_layers),
    "bert-classes": Case("bert", draw_bert_classifier, AutoModelForSequenceClassification, bert_layers),
    "t5": Case("t5", draw_t5, AutoModelForSeq2SeqLM, t5_layers),
    "t5-1.1": Case("t5", draw_newer_t5, AutoModelForSeq2SeqLM, t5_layers),
    "vit": Case("vit", draw_vit, AutoModelForImageClassification, vit_layers),
    "swin": Case("swin", draw_swin, AutoModelForImageClassification, swin_layers),
}
DRAWN = [(name, seed) for name in CASES for seed in SEEDS]


@cache
def both(name: str, seed: int) -> Both:
    """Return a drawn configuration in our words and as their module."""
    case = CASES[name]
    fields = case.draw(random.Random(f"{name} {seed}"))
    config = AutoConfig.for_model(case.model_type, **fields)
    torch.manual_seed(seed)
    module = case.build.from_config(config, attn_implementation="eager").eval()
    spec = model_from_config({"model_type": case.model_type, **fields}, name=name, where="config.json")
    return Both(spec, module, tuple(case.layers(config)))


def inputs_of(spec: ModelSpec, rng: random.Random) -> tuple[dict[str, Tensor], Lengths]:
    """Return what their module reads, and how long a sample of it is."""
    if isinstance(spec.embedding, EmbeddingLayer):
        lengths = Lengths(rng.randrange(4, 20), rng.randrange(20, 30) if spec.has_targets else 0)
        ids = {"input_ids": torch.randint(0, spec.vocab_size, (NUM_SAMPLES, lengths.seq))}
        if spec.has_targets:
            ids["decoder_input_ids"] = torch.randint(0, spec.vocab_size, (NUM_SAMPLES, lengths.target_seq))
        return ids, lengths
    side = spec.embedding.image_size
    pixels = torch.randn(NUM_SAMPLES, spec.embedding.num_channels, side, side)
    return {"pixel_values": pixels}, Lengths(spec.fixed_seq_len)


def without_padding(layer: AnyLayer) -> AnyLayer:
    """Return `layer` without unused rows of the vocabulary, which are ours alone."""
    if isinstance(layer, EmbeddingLayer | HeadLayer):
        return layer.model_copy(update={"padded_vocab_size": layer.vocab_size})
    return layer


def our_parameters(layer: AnyLayer) -> int:
    return sum(parameter.num_elements for parameter in layer_parameters(without_padding(layer)))


def our_flops(layer: AnyLayer, lengths: Lengths) -> int:
    flops = forward_flops(without_padding(layer), lengths)
    return NUM_SAMPLES * (flops.matmul_flops + flops.attention_flops)


def test_every_family_is_here():
    assert {case.model_type for case in CASES.values()} == READERS.keys()


@pytest.mark.parametrize(("name", "seed"), DRAWN)
def test_parameters_of_every_layer(name: str, seed: int):
    spec, module, names = both(name, seed)
    theirs = [sum(p.numel() for part in parts for p in module.get_submodule(part).parameters()) for parts in names]
    assert [our_parameters(layer) for layer in spec.layers] == theirs


@pytest.mark.parametrize(("name", "seed"), DRAWN)
def test_their_layers_are_the_whole_model(name: str, seed: int):
    _, module, names = both(name, seed)
    found = {id(p) for parts in names for part in parts for p in module.get_submodule(part).parameters()}
    assert found == {id(p) for p in module.parameters()}


@pytest.mark.parametrize(("name", "seed"), DRAWN)
def test_forward_flops_of_every_layer(name: str, seed: int):
    spec, module, names = both(name, seed)
    inputs, lengths = inputs_of(spec, random.Random(seed))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(**inputs)
    counts, root = counter.get_flop_counts(), type(module).__name__
    # A module without products, such as a norm, has no entry.
    theirs = [sum(sum(counts.get(f"{root}.{part}", {}).values()) for part in parts) for parts in names]
    assert [our_flops(layer, lengths) for layer in spec.layers] == theirs
