"""What autograd keeps of every layer's forward pass, against transformers' modules, which are run and watched.

A whole model computes its loss; what is saved from the start of one of its layers to the start of the next is that
layer's. Every byte is accounted for: what is theirs alone is written down here, tensor by tensor.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig

from meshwright.cost.activations import saved_bytes
from meshwright.spec.families import model_from_config
from meshwright.spec.job import JobSpec
from meshwright.spec.model import AnyLayer, BlockLayer, ClassifierLayer, EmbeddingLayer, HeadLayer, ModelSpec
from meshwright.spec.tensors import Lengths
from tests.models.test_huggingface_counts import CASES, DRAWN, NUM_SAMPLES, inputs_of, without_padding

FP32, INT64 = 4, 8
# Their decomposed tanh approximation of GELU keeps tensors that one kernel does not need.
FUSED_GELU = {"gpt2": {"activation_function": "gelu_pytorch_tanh"}, "t5-1.1": {"dense_act_fn": "gelu_pytorch_tanh"}}


def built(name: str, seed: int) -> tuple[ModelSpec, nn.Module, list[tuple[str, ...]]]:
    """Return a drawn configuration in our words, as their module, and the names of what each of our layers is there.

    Attention is a flash kernel, but eager where a learned bias is added to the scores.
    """
    case = CASES[name]
    fields = case.draw(random.Random(f"{name} {seed}"))
    config = AutoConfig.for_model(case.model_type, **fields)
    # A cache of keys and values is for inference, and a copy.
    for key, value in ({"use_cache": False} | FUSED_GELU.get(name, {})).items():
        setattr(config, key, value)
    spec = model_from_config({"model_type": case.model_type, **fields}, name=name, where="config.json")
    blocks = [layer for layer in spec.layers if isinstance(layer, BlockLayer)]
    kernel = "eager" if blocks[0].attention.keeps_scores else "sdpa"
    torch.manual_seed(seed)
    module = case.build.from_config(config, attn_implementation=kernel).eval()
    for part, attention in module.named_modules():
        if part.endswith("EncDecAttention"):
            attention.config = deepcopy(attention.config)
            attention.config._attn_implementation = "sdpa"
    return spec, module, list(case.layers(config))


def full_inputs(name: str, spec: ModelSpec, rng: random.Random) -> tuple[dict[str, Tensor], Lengths]:
    """Return what their module reads, with labels, and how long a sample of it is."""
    inputs, lengths = inputs_of(spec, rng)
    if name.startswith("bert"):
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if isinstance(spec.head, ClassifierLayer):
        inputs["labels"] = torch.randint(0, spec.head.num_classes, (NUM_SAMPLES,))
    else:
        assert isinstance(spec.head, HeadLayer)
        inputs["labels"] = torch.randint(0, spec.vocab_size, (NUM_SAMPLES, lengths.of(spec.head.length)))
    return inputs, lengths


def kept_by_layer(module: nn.Module, names: list[tuple[str, ...]], inputs: dict[str, Any]) -> list[int]:
    """Return the bytes of distinct storages that autograd keeps from one layer's start to the next one's.

    Parameters are left out, and buffers, which are constant.
    """
    skip = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    kept: dict[int, dict[int, int]] = defaultdict(dict)
    alive: list[Tensor] = []
    at = 0

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        alive.append(x)  # or else its address may be another's
        if storage.data_ptr() not in skip:
            kept[at][storage.data_ptr()] = storage.nbytes()
        return x

    def start(index: int) -> None:
        nonlocal at
        at = index

    # T5's shared embedding is called by each stack under another name.
    starts = [(0, part) for part in ("encoder.embed_tokens", "decoder.embed_tokens") if "shared" in names[0]]
    for index, part in (*starts, *((index, parts[0]) for index, parts in enumerate(names))):
        module.get_submodule(part).register_forward_pre_hook(lambda *_, index=index: start(index))
    with saved_tensors_hooks(note, lambda x: x):
        module(**inputs)
    return [sum(kept[index].values()) for index in range(len(names))]


def constants(layer: AnyLayer, lengths: Lengths) -> Iterator[int]:
    """Yield the bytes of tables that are the same for every sample, which layers could share."""
    match layer:
        case EmbeddingLayer():
            # Positions; where there are kinds of tokens too, a buffer.
            yield lengths.seq * INT64 if layer.max_positions and not layer.token_types else 0
        case BlockLayer():
            attention, tokens = layer.attention, lengths.of(layer.length)
            yield 2 * tokens * attention.head_size * FP32 if attention.rotary else 0  # cosines and sines
            owns_table = attention.relative is not None and attention.relative.owns_table
            yield tokens**2 * INT64 if owns_table else 0  # buckets of distance
            if layer.cross_attention is not None:  # a bias of zeros
                yield layer.cross_attention.num_heads * tokens * lengths.seq * FP32
        case HeadLayer() | ClassifierLayer():
            yield FP32  # the weight of all targets, of which the loss is the mean
        case _:
            pass


def theirs_alone(layer: AnyLayer, lengths: Lengths) -> Iterator[int]:
    """Yield the bytes of one sample that their modules keep, and ours need not; below 0 the other way round."""
    match layer:
        case BlockLayer():
            experts, attention, tokens = layer.mlp.experts, layer.attention, lengths.of(layer.length)
            if experts is not None:
                # Adding each expert's outputs to the sum keeps them once more, and each visit's rank.
                yield tokens * experts.top_k * (layer.hidden_size * FP32 + INT64)
            if 0 < attention.sliding_window < tokens:
                yield tokens**2 * FP32  # each sample's own mask
                if attention.num_kv_heads > 1:  # keys and values, repeated for every query head
                    yield 2 * tokens * (attention.num_heads - attention.num_kv_heads) * attention.head_size * FP32
        case HeadLayer():
            # Log-probabilities instead of logits and their log-sum-exp.
            yield -lengths.of(layer.length) * FP32
        case ClassifierLayer():
            yield -FP32
            if layer.pooling == "first":  # a view of the first token, which keeps all tokens
                yield (lengths.of(layer.length) - 1) * layer.hidden_size * FP32
        case _:
            pass


@pytest.mark.parametrize(("name", "seed"), DRAWN)
def test_saved_bytes_of_every_layer(name: str, seed: int):
    spec, module, names = built(name, seed)
    inputs, lengths = full_inputs(name, spec, random.Random(seed))
    found = kept_by_layer(module, names, inputs)
    job = JobSpec(
        global_batch_size=NUM_SAMPLES,
        seq_len=lengths.seq,
        target_seq_len=lengths.target_seq or None,
        param_dtype="fp32",
    )
    assert len(found) == len(spec.layers)
    for index, (layer, theirs) in enumerate(zip(spec.layers, found, strict=True)):
        ours = NUM_SAMPLES * saved_bytes(without_padding(layer), 1, job, "cpu_stock")
        comparable = theirs - sum(constants(layer, lengths)) - NUM_SAMPLES * sum(theirs_alone(layer, lengths))
        assert ours == comparable, (index, layer.kind)
