"""The layers of a decoder-only Transformer: embedding, one parametrised block, head.

Shapes: B samples, T tokens, H hidden, N heads and D head size of this rank. A layer's parameters are
named and shaped as `spec.parameters.layer_parameters` says. `tp` is set by the runtime when it
splits the layer; every layer also runs alone.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.loss import cross_entropy_sum
from meshwright.models.tensor_parallel import (
    SINGLE,
    Linear,
    RowParallelLinear,
    TensorParallel,
    copy_to_ranks,
    local,
    sum_over_ranks,
)
from meshwright.spec.model import BlockLayer, EmbeddingLayer, HeadLayer
from meshwright.spec.parts import AttentionSpec, MlpSpec, Norm, RopeScaling


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(kind: Norm, size: int, eps: float) -> nn.Module:
    return RMSNorm(size, eps) if kind == "rmsnorm" else LayerNorm(size, eps)


class Table(nn.Module):
    """A weight that is looked up by row."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))


class Embedding(nn.Module):
    """Token ids [B, T] to hidden states [B, T, H], plus learned positions where the model has them."""

    def __init__(self, spec: EmbeddingLayer) -> None:
        super().__init__()
        self.spec = spec
        self.tp: TensorParallel = SINGLE
        self.token = Table(spec.padded_vocab_size, spec.hidden_size)
        self.position = Table(spec.max_positions, spec.hidden_size) if spec.max_positions else None

    def forward(self, ids: Tensor) -> Tensor:
        weight = local(self.token.weight)
        assert weight is not None  # noqa: S101 a parameter
        if self.tp.size == 1:
            x = functional.embedding(ids, weight)
        else:
            ids = ids - self.tp.index * len(weight)
            elsewhere = (ids < 0) | (ids >= len(weight))
            x = functional.embedding(ids.masked_fill_(elsewhere, 0), weight)
            x = sum_over_ranks(x.masked_fill(elsewhere[..., None], 0.0), self.tp)
        if self.position is not None:
            x = x + self.position.weight[: ids.shape[1]]
        return x


class Attention(nn.Module):
    """Causal self-attention with grouped queries; heads are split over tensor-parallel ranks."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.tp: TensorParallel = SINGLE
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.q = Linear(hidden_size, queries, bias=spec.bias)
        self.k = Linear(hidden_size, keys, bias=spec.bias)
        self.v = Linear(hidden_size, keys, bias=spec.bias)
        self.out = RowParallelLinear(queries, hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_size, norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_size, norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to_ranks(x, self.tp)
        samples, tokens, _ = x.shape
        q, k, v = (project(x).view(samples, tokens, -1, self.spec.head_size) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.spec.rotary:
            cos, sin = rotary_table(
                tokens, self.spec.head_size, self.spec.rope_theta, self.spec.rope_scaling, x.device, x.dtype
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.spec.num_kv_heads != self.spec.num_heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(samples, tokens, -1), self.tp)


class Mlp(nn.Module):
    """The feed-forward part; its inner width is split over tensor-parallel ranks."""

    def __init__(self, spec: MlpSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.tp: TensorParallel = SINGLE
        self.gate = Linear(hidden_size, spec.ffn_size, bias=spec.bias) if spec.gated else None
        self.up = Linear(hidden_size, spec.ffn_size, bias=spec.bias)
        self.down = RowParallelLinear(spec.ffn_size, hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to_ranks(x, self.tp)
        if self.gate is not None:
            return self.down(self._activate(self.gate(x)) * self.up(x), self.tp)
        return self.down(self._activate(self.up(x)), self.tp)

    def _activate(self, x: Tensor) -> Tensor:
        if self.spec.activation == "silu":
            return functional.silu(x)
        return functional.gelu(x, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); hidden states [B, T, H] in and out."""

    def __init__(self, spec: BlockLayer) -> None:
        super().__init__()
        self.spec = spec
        self.norm1 = make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.attention = Attention(spec.attention, spec.hidden_size, spec.norm_eps)
        self.norm2 = make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec.mlp, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """The last norm and the projection to the vocabulary; with targets, the summed loss."""

    def __init__(self, spec: HeadLayer) -> None:
        super().__init__()
        self.spec = spec
        self.tp: TensorParallel = SINGLE
        self.norm = make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.output = Linear(spec.hidden_size, spec.padded_vocab_size, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the fp32 sum of the cross-entropy of `targets` [B, T], of which -100 counts nothing."""
        logits = self.logits(x)
        return cross_entropy_sum(logits.flatten(0, 1), targets.flatten(), self.spec.vocab_size, self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the logits [B, T, padded vocabulary / tp]."""
        return self.output(copy_to_ranks(self.norm(x), self.tp))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [B, N, T, D] rotated by position: halves of D form the pairs (arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@lru_cache(maxsize=16)
def rotary_table(
    num_tokens: int,
    head_size: int,
    theta: float,
    scaling: RopeScaling | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, D] of the rotation angles. Not a buffer, so nothing is lost on meta devices."""
    with torch.no_grad():
        exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
        frequencies = 1.0 / theta**exponents
        if scaling is not None:
            frequencies = _rescale(frequencies, scaling)
        angles = torch.outer(torch.arange(num_tokens, device=device, dtype=torch.float32), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rescale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return frequencies stretched as Llama 3.1 does: long waves by `factor`, short ones not, blended between."""
    turns = scaling.original_max_positions * frequencies / (2 * pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)
