"""One Transformer block with all that its specification can ask for."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.attention import Attention
from meshwright.models.dropout import Place, drop
from meshwright.models.norms import make_norm
from meshwright.models.tensor_parallel import SINGLE, Linear, RowParallelLinear, TensorParallel, copy_to_ranks
from meshwright.spec.model import BlockLayer
from meshwright.spec.parts import Activation, MlpSpec

_AFTER_ATTENTION, _AFTER_CROSS_ATTENTION, _AFTER_MLP = range(3)  # where a block drops


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
        """Return [B, T, H] of `x` [B, T, H]."""
        x = copy_to_ranks(x, self.tp)
        if self.gate is not None:
            return self.down(activate(self.gate(x), self.spec.activation) * self.up(x), self.tp)
        return self.down(activate(self.up(x), self.spec.activation), self.tp)


class Block(nn.Module):
    """Self-attention, attention to a source where there is one, and the feed-forward part, each added to its input."""

    def __init__(self, spec: BlockLayer) -> None:
        super().__init__()
        self.spec = spec

        def norm() -> nn.Module:
            return make_norm(spec.norm, spec.hidden_size, spec.norm_eps)

        self.norm1 = norm()
        self.attention = Attention(spec.attention, spec.hidden_size, spec.norm_eps)
        self.cross_norm = self.cross_attention = None
        if spec.cross_attention is not None:
            self.cross_norm = norm()
            self.cross_attention = Attention(spec.cross_attention, spec.hidden_size, spec.norm_eps)
        self.norm2 = norm()
        self.mlp = Mlp(spec.mlp, spec.hidden_size)
        self.closing_norm = norm() if spec.closing_norm else None

    def forward(self, x: Tensor, *beside: Tensor, at: Place | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return hidden states [B, T, H] and, beside them, what the specification `carries`.

        `beside` come an encoder's targets or a decoder's source states [B, S, H], and the table of relative
        positions [B, buckets, heads] that the first block of the stack owns.
        """
        if starts_decoder(self.spec):
            x, beside = beside[0], (x,)
        relative, table = self.spec.attention.relative, None
        if relative is not None:
            if relative.owns_table:
                beside = (*beside, self.attention.handed_table(len(x)))
            table = beside[-1][0]
        x = self._attend(x, table, beside[0] if self.cross_attention is not None else None, at)
        if not self.spec.carries:
            return x
        return x, *beside[: len(self.spec.carries)]

    def _attend(self, x: Tensor, table: Tensor | None, source: Tensor | None, at: Place | None) -> Tensor:
        if self.spec.post_norm:
            x = self.norm1(x + drop(self.attention(x, table=table), at, _AFTER_ATTENTION))
            return self.norm2(x + drop(self.mlp(x), at, _AFTER_MLP))
        x = x + drop(self.attention(self.norm1(x), table=table), at, _AFTER_ATTENTION)
        if self.cross_norm is not None and self.cross_attention is not None:
            x = x + drop(self.cross_attention(self.cross_norm(x), source), at, _AFTER_CROSS_ATTENTION)
        x = x + drop(self.mlp(self.norm2(x)), at, _AFTER_MLP)
        return x if self.closing_norm is None else self.closing_norm(x)


def starts_decoder(spec: BlockLayer) -> bool:
    """Return whether an encoder's states end before this block, and become the source of embedded targets."""
    relative = spec.attention.relative
    return spec.cross_attention is not None and relative is not None and relative.owns_table


def activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
