"""Attention in its kinds: grouped queries, rotary or relative positions, sliding and Swin's windows, another's keys.

Shapes: B samples, T tokens, S tokens of the source, H hidden, N heads and D head size of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.norms import RMSNorm
from meshwright.models.relative import (
    by_rows,
    by_windows,
    causal_mask,
    looked_up,
    relative_buckets,
    window_mask,
    window_positions,
)
from meshwright.models.rotary import rotary_table, rotate
from meshwright.models.tensor_parallel import (
    SINGLE,
    Linear,
    RowParallelLinear,
    Table,
    TensorParallel,
    copy_to_ranks,
    local_part,
)
from meshwright.spec.parts import AttentionSpec


class Attention(nn.Module):
    """Attention of `x` to itself, or to a source; heads are split over tensor-parallel ranks.

    Where a bias is added to the scores they exist as a tensor, and autograd keeps q, k, v, probabilities and output;
    elsewhere a kernel keeps them inside.
    """

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
        self.relative = None
        if spec.relative is not None and spec.relative.owns_table:
            self.relative = Table(spec.relative.num_buckets, spec.num_heads)
        elif spec.windows is not None:
            self.relative = Table(spec.windows.num_positions, spec.num_heads)

    def forward(self, x: Tensor, source: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """Return [B, T, H] of `x` [B, T, H] and `source` [B, S, H], which stands for x where it is None.

        `table` [buckets, all heads]: the stack's biases of relative positions.
        """
        windows = self.spec.windows
        x = copy_to_ranks(x, self.tp)
        if windows is not None:
            x = by_windows(x, windows)
        source = x if source is None else copy_to_ranks(source, self.tp)
        q, k, v = self._heads(self.q(x)), self._heads(self.k(source)), self._heads(self.v(source))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)
        if self.spec.rotary:
            q, k = self._rotated(q), self._rotated(k)
        y = self._biased(q, k, v, table) if self.spec.keeps_scores else self._fused(q, k, v)
        y = y.transpose(-2, -3).reshape(*x.shape[:-1], -1)
        return self.out(y if windows is None else by_rows(y, windows), self.tp)

    def handed_table(self, num_samples: int) -> Tensor:
        """Return the stack's table as it is handed on, [B, buckets, all heads]: the same for every sample.

        A copy, because the weight itself may be gone (ZeRO-3) when a later block looks.
        """
        assert self.relative is not None  # noqa: S101 asked of its owner only
        return self.relative.weight.repeat(num_samples, 1, 1)

    def _heads(self, x: Tensor) -> Tensor:
        """Return [B, T, N, D], or, in windows of W tokens, [B, windows, W, N, D]."""
        windows = self.spec.windows
        tokens = x.shape[1:2] if windows is None else (-1, windows.size**2)
        return x.view(len(x), *tokens, x.shape[-1] // self.spec.head_size, self.spec.head_size)

    def _rotated(self, x: Tensor) -> Tensor:
        spec = self.spec
        cos, sin = rotary_table(x.shape[-2], spec.head_size, spec.rope_theta, spec.rope_scaling, x.device, x.dtype)
        return rotate(x, cos, sin)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec, tokens = self.spec, q.shape[-2]
        slides = 0 < spec.sliding_window < tokens
        grouped = spec.num_kv_heads != spec.num_heads
        if slides and grouped and q.is_cuda:
            # CUDA's kernels for masks want as many keys as queries; the one that does not would keep all scores.
            k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for x in (k, v))
            grouped = False
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=causal_mask(tokens, spec.sliding_window, q.device, q.dtype) if slides else None,
            is_causal=spec.causal and not slides,
            scale=None if spec.scaled else 1.0,
            enable_gqa=grouped,
        )

    def _biased(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        spec = self.spec
        if spec.scaled:
            q = q * spec.head_size**-0.5
        scores = q @ k.transpose(-1, -2)
        # In place: autograd needs the probabilities alone.
        scores += self._bias(q, k, table)
        if spec.windows is not None and spec.windows.shift:
            scores += window_mask(spec.windows, q.device, q.dtype)
        elif spec.causal:
            scores += causal_mask(q.shape[-2], spec.sliding_window, q.device, q.dtype)
        return scores.softmax(-1) @ v

    def _bias(self, q: Tensor, k: Tensor, table: Tensor | None) -> Tensor:
        """Return what this rank's heads add to the scores: [N, Q, K]."""
        spec = self.spec
        if spec.windows is not None:
            assert self.relative is not None  # noqa: S101 as built
            return looked_up(local_part(self.relative.weight), window_positions(spec.windows.size, q.device), q.dtype)
        assert spec.relative is not None  # noqa: S101 the other kind of bias
        assert table is not None  # noqa: S101 the block's duty
        # Every rank uses its own heads' columns; the sum over ranks makes the gradient of all whole on each.
        own = copy_to_ranks(table, self.tp).chunk(self.tp.size, dim=1)[self.tp.index]
        buckets = relative_buckets(q.shape[-2], k.shape[-2], spec.relative, spec.causal, q.device)
        return looked_up(own, buckets, q.dtype)
