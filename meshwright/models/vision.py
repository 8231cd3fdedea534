"""Images to hidden states, and Swin's merging of patches. Every tensor-parallel rank does all of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.dropout import Place, drop
from meshwright.models.norms import make_norm
from meshwright.models.tensor_parallel import Linear, Table
from meshwright.spec.model import MergeLayer, PatchEmbeddingLayer


class PatchEmbedding(nn.Module):
    """Hidden states of square patches, row by row, after those of a learned class token where there is one.

    The projection is a convolution whose stride is its width: the rows of `projection.weight` hold a patch as
    (channel, row, column).
    """

    def __init__(self, spec: PatchEmbeddingLayer) -> None:
        super().__init__()
        self.spec = spec
        self.projection = Linear(spec.patch_elements, spec.hidden_size, bias=True)
        self.class_token = nn.Parameter(torch.empty(spec.hidden_size)) if spec.class_token else None
        self.position = Table(spec.num_tokens, spec.hidden_size) if spec.positions else None
        self.norm = None if spec.norm is None else make_norm(spec.norm, spec.hidden_size, spec.norm_eps)

    def forward(self, images: Tensor, *, at: Place | None = None) -> Tensor:
        """Return hidden states [B, T, H] of `images` [B, C, height, width]."""
        x = self.projection(self._patches(images).to(self.projection.weight.dtype))
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)
        if self.position is not None:
            x = x + self.position.weight
        return drop(x if self.norm is None else self.norm(x), at, 0)

    def _patches(self, images: Tensor) -> Tensor:
        """Return the colours [B, patches, C x size x size] of every patch."""
        size, across = self.spec.patch_size, self.spec.image_size // self.spec.patch_size
        squares = images.view(len(images), -1, across, size, across, size).permute(0, 2, 4, 1, 3, 5)
        return squares.reshape(len(images), across * across, -1)


class Merge(nn.Module):
    """2 x 2 neighbours to one token of twice the width."""

    def __init__(self, spec: MergeLayer) -> None:
        super().__init__()
        self.spec = spec
        self.norm = make_norm(spec.norm, spec.merged_size, spec.norm_eps)
        self.reduction = Linear(spec.merged_size, 2 * spec.hidden_size, bias=False)

    def forward(self, x: Tensor, *, at: Place | None = None) -> Tensor:
        """Return [B, T / 4, 2 H] of `x` [B, T, H], a grid row by row. Nothing is dropped here."""
        half = self.spec.grid // 2
        # Neighbours in the order of the published weights: down first, then right.
        squares = x.view(len(x), half, 2, half, 2, -1).permute(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(squares.reshape(len(x), half * half, -1)))
