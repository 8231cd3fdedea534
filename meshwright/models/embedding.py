"""Token ids to hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models.dropout import Place, drop
from meshwright.models.norms import make_norm
from meshwright.models.tensor_parallel import SINGLE, Table, TensorParallel, local_part, sum_over_ranks
from meshwright.spec.model import EmbeddingLayer

_SOURCE, _TARGETS = range(2)  # where an embedding drops


class Embedding(nn.Module):
    """Hidden states of tokens, plus learned positions and kinds of tokens where the model has them."""

    def __init__(self, spec: EmbeddingLayer) -> None:
        super().__init__()
        self.spec = spec
        self.tp: TensorParallel = SINGLE
        self.token = Table(spec.padded_vocab_size, spec.hidden_size)
        self.position = Table(spec.max_positions, spec.hidden_size) if spec.max_positions else None
        self.token_type = Table(spec.token_types, spec.hidden_size) if spec.token_types else None
        self.norm = None if spec.norm is None else make_norm(spec.norm, spec.hidden_size, spec.norm_eps)

    def forward(
        self, ids: Tensor, beside: Tensor | None = None, *, at: Place | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return hidden states [B, S, H] of `ids` [B, S] int64.

        `beside`: with `targets`, a decoder's ids [B, T], whose hidden states [B, T, H] are returned too; otherwise the
        kinds of the tokens [B, S], all of kind 0 when it is None.
        """
        if not self.spec.targets:
            return drop(self._summed(self._tokens(ids), beside), at, _SOURCE)
        assert beside is not None  # noqa: S101 the caller's duty
        # One lookup, and so one sum over ranks, for both; then copies, of which none keeps the other alive.
        hidden = self._tokens(torch.cat((ids.flatten(), beside.flatten())))
        source, target = (
            self._summed(part.view(*of.shape, hidden.shape[-1]).clone(), None)
            for part, of in zip(hidden.split((ids.numel(), beside.numel())), (ids, beside), strict=True)
        )
        return drop(source, at, _SOURCE), drop(target, at, _TARGETS)

    def _tokens(self, ids: Tensor) -> Tensor:
        """Return the tokens' rows, [..., H] of `ids` [...]."""
        weight = local_part(self.token.weight)
        if self.tp.size == 1:
            return functional.embedding(ids, weight)
        ids = ids - self.tp.index * len(weight)
        elsewhere = (ids < 0) | (ids >= len(weight))
        x = functional.embedding(ids.masked_fill_(elsewhere, 0), weight)
        return sum_over_ranks(x.masked_fill(elsewhere[..., None], 0.0), self.tp)

    def _summed(self, x: Tensor, kinds: Tensor | None) -> Tensor:
        if self.position is not None:
            x = x + self.position.weight[: x.shape[1]]
        if self.token_type is not None:
            weight = self.token_type.weight
            x = x + (weight[0] if kinds is None else functional.embedding(kinds, weight))
        return x if self.norm is None else self.norm(x)
