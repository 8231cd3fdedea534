"""Floating-point operations of a layer, once. One multiply-add is two.

A matrix product of (m, k) by (k, n) is 2mkn. Attention scores and their use are counted in full,
not halved for the causal mask nor cut to a sliding window (the convention of PaLM, arXiv 2204.02311, appendix B), so
`mfu` compares with what Megatron and torchtitan print; Swin's windows have the pairs inside a window. Of routed
experts those that a token visits count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from meshwright.spec.base import Spec
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    CustomLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerSpec,
    MergeLayer,
    ModelSpec,
    PatchEmbeddingLayer,
)
from meshwright.spec.parameters import ParameterSpec, layer_parameters
from meshwright.spec.parts import AttentionSpec
from meshwright.spec.tensors import Lengths

_FROM_SOURCE = ("cross_attention.k.weight", "cross_attention.v.weight")


class LayerFlops(Spec):
    """Forward FLOPs of one sample: weight products, and the attention core apart."""

    matmul_flops: int = 0
    attention_flops: int = 0


class WeightProduct(NamedTuple):
    """A weight and how many rows (tokens, mostly) of one sample are multiplied with it."""

    parameter: ParameterSpec
    rows: int


class AttentionCore(NamedTuple):
    """Scores and their use in one sample: `num_queries` tokens, each of which sees `num_keys`."""

    attention: AttentionSpec
    num_queries: int
    num_keys: int

    @property
    def flops(self) -> int:
        latent = self.attention.latent
        value_size = latent.value_size if latent else self.attention.head_size
        width = self.attention.num_heads * (self.attention.head_size + value_size)
        return 2 * self.num_queries * self.num_keys * width


def forward_flops(layer: LayerSpec, lengths: Lengths) -> LayerFlops:
    """Return the forward FLOPs of `layer` for one sample. Backward is twice that."""
    return LayerFlops(
        matmul_flops=sum(2 * p.rows * _elements_met(layer, p.parameter) for p in weight_products(layer, lengths)),
        attention_flops=sum(core.flops for core in attention_cores(layer, lengths)) + custom_flops(layer, lengths),
    )


def num_tokens(layer: LayerSpec, lengths: Lengths) -> int:
    """Return the tokens of one sample that `layer` works on (those that it hands on, where they differ)."""
    match layer:
        case EmbeddingLayer():
            return lengths.seq + (lengths.target_seq if layer.targets else 0)
        case PatchEmbeddingLayer() | MergeLayer():
            return layer.num_tokens
        case BlockLayer() | CustomLayer() | HeadLayer() | ClassifierLayer():
            return lengths.of(layer.length)


@lru_cache(maxsize=4096)
def weight_products(layer: LayerSpec, lengths: Lengths) -> tuple[WeightProduct, ...]:
    """Return every weight product of one sample, in module order."""
    return tuple(
        WeightProduct(parameter, _rows(layer, parameter, lengths))
        for parameter in layer_parameters(layer)
        if parameter.is_product
    )


@lru_cache(maxsize=4096)
def attention_cores(layer: LayerSpec, lengths: Lengths) -> tuple[AttentionCore, ...]:
    """Return the attention cores of one sample."""
    return tuple(_cores(layer, lengths)) if isinstance(layer, BlockLayer) else ()


def custom_flops(layer: LayerSpec, lengths: Lengths) -> int:
    """Return the forward FLOPs of one sample that a block of the user's own has beside its weight products."""
    return layer.split_core_flops * num_tokens(layer, lengths) if isinstance(layer, CustomLayer) else 0


def step_flops(model: ModelSpec, lengths: Lengths, num_samples: int) -> int:
    """Return the model FLOPs of one optimizer step, forward and backward, without recomputation."""
    total = 0
    for group in model.groups:
        flops = forward_flops(group.layer, lengths)
        total += group.num_layers * (flops.matmul_flops + flops.attention_flops)
    return 3 * total * num_samples


def _cores(layer: BlockLayer, lengths: Lengths) -> Iterator[AttentionCore]:
    tokens, windows = lengths.of(layer.length), layer.attention.windows
    yield AttentionCore(layer.attention, tokens, tokens if windows is None else windows.size**2)
    if layer.cross_attention is not None:
        yield AttentionCore(layer.cross_attention, tokens, lengths.seq)


def _rows(layer: LayerSpec, parameter: ParameterSpec, lengths: Lengths) -> int:
    match layer:
        case PatchEmbeddingLayer():
            return layer.num_patches
        case ClassifierLayer():
            return 1
        case BlockLayer() if parameter.name in _FROM_SOURCE:
            return lengths.seq
        case BlockLayer() if parameter.is_of_experts and layer.mlp.experts is not None:
            return num_tokens(layer, lengths) * layer.mlp.experts.top_k
        case _:
            return num_tokens(layer, lengths)


def _elements_met(layer: LayerSpec, parameter: ParameterSpec) -> int:
    """Return the elements that one row is multiplied with: of one expert, where there are several."""
    if isinstance(layer, BlockLayer) and parameter.is_of_experts and layer.mlp.experts is not None:
        return parameter.num_elements // layer.mlp.experts.num_experts
    return parameter.num_elements
