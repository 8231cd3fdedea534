"""Floating-point operations of a layer, once. One multiply-add is two.

A matrix product of (m, k) by (k, n) is 2mkn. Attention scores and their use are counted in full,
not halved for the causal mask (the convention of PaLM, arXiv 2204.02311, appendix B), so `mfu`
compares with what Megatron and torchtitan print. Of routed experts those that a token visits count.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.spec.base import Spec
from meshwright.spec.model import BlockLayer, EmbeddingLayer, HeadLayer, LayerSpec, ModelSpec
from meshwright.spec.parameters import layer_parameters


class LayerFlops(Spec):
    """Forward FLOPs of one sample: weight products, and the attention core apart."""

    matmul_flops: int = 0
    attention_flops: int = 0


def forward_flops(layer: LayerSpec, seq_len: int) -> LayerFlops:
    """Return the forward FLOPs of `layer` for one sample of `seq_len` tokens. Backward is twice that."""
    match layer:
        case EmbeddingLayer():
            return LayerFlops()
        case HeadLayer():
            return LayerFlops(matmul_flops=2 * seq_len * layer.hidden_size * layer.padded_vocab_size)
        case BlockLayer():
            attention = layer.attention
            value_size = attention.latent.value_size if attention.latent else attention.head_size
            scores = attention.num_heads * (attention.head_size + value_size)
            return LayerFlops(
                matmul_flops=2 * seq_len * _weights_a_token_meets(layer), attention_flops=2 * seq_len**2 * scores
            )


@lru_cache(maxsize=4096)
def _weights_a_token_meets(layer: BlockLayer) -> int:
    experts = layer.mlp.experts
    total = 0
    for parameter in layer_parameters(layer):
        if parameter.is_of_experts and experts is not None:
            total += parameter.num_elements // experts.num_experts * experts.top_k
        elif len(parameter.shape) == 2:  # noqa: PLR2004 a matrix
            total += parameter.num_elements
    return total


def step_flops(model: ModelSpec, seq_len: int, num_samples: int) -> int:
    """Return the model FLOPs of one optimizer step, forward and backward, without recomputation."""
    total = 0
    for group in model.groups:
        flops = forward_flops(group.layer, seq_len)
        total += group.num_layers * (flops.matmul_flops + flops.attention_flops)
    return 3 * total * num_samples
