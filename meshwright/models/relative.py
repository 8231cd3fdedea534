"""Who sees whom, and at what relative position: the constant tables behind biases and masks of attention scores.

Masks are added to scores: 0 where a token is seen, minus infinity where it is not.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwright.models.tables import shared
from meshwright.spec.parts import RelativeSpec, WindowsSpec


def looked_up(table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the biases [N, Q, K] that `table` [positions, N] gives to pairs with relative `positions` [Q, K].

    In fp32 up to the last step: many pairs share a row, whose gradient is their sum.
    """
    return functional.embedding(positions, table.float()).to(dtype).permute(2, 0, 1)


@shared
def causal_mask(num_tokens: int, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the mask [T, T] that lets a token see itself and what is before, `window` tokens in all (0: no limit)."""
    back = -_distances(num_tokens, num_tokens, device)
    return _added(back < 0 if not window else (back < 0) | (back >= window), dtype)


@shared
def relative_buckets(
    num_queries: int, num_keys: int, spec: RelativeSpec, is_causal: bool, device: torch.device
) -> Tensor:
    """Return T5's bucket [Q, K] int64 of each pair.

    Half of the buckets are one distance each; the others widen logarithmically up to `max_distance`, beyond which
    all is one. Without causality, tokens before and after have a half of all buckets each.
    """
    ahead = _distances(num_queries, num_keys, device)
    buckets, first = spec.num_buckets, torch.zeros_like(ahead)
    if is_causal:
        distance = (-ahead).clamp(min=0)
    else:
        buckets //= 2
        first = torch.where(ahead > 0, buckets, 0)
        distance = ahead.abs()
    exact = buckets // 2
    beyond = torch.log(distance.clamp(min=1).float() / exact) / log(spec.max_distance / exact) * (buckets - exact)
    wide = (exact + beyond.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, wide)


@shared
def window_positions(size: int, device: torch.device) -> Tensor:
    """Return the row [W, W] int64 of Swin's table for each pair of the W = size x size tokens of a window."""
    row, column = _coordinates(size, device)
    down = row[:, None] - row[None, :] + size - 1
    right = column[:, None] - column[None, :] + size - 1
    return down * (2 * size - 1) + right


@shared
def window_order(spec: WindowsSpec, device: torch.device) -> tuple[Tensor, ...]:
    """Return the order [T] int64 that puts tokens window by window, and its inverse.

    Windows start `shift` tokens down and right; what they lose at one edge they get from the other.
    """
    row, column = _coordinates(spec.grid, device)
    taken = (row + spec.shift) % spec.grid * spec.grid + (column + spec.shift) % spec.grid
    order = _by_window(taken, spec).flatten()
    return order, order.argsort()


@shared
def window_mask(spec: WindowsSpec, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the mask [windows, 1, W, W] that parts tokens which a shifted window has from different edges."""
    row, column = _coordinates(spec.grid, device)
    # Windows of the last row and column hold `size - shift` tokens of their own and `shift` from the other edge.
    wraps = torch.stack([_by_window(at >= spec.grid - spec.shift, spec) for at in (row, column)])
    differ = (wraps[..., :, None] != wraps[..., None, :]).any(0)
    return _added(differ, dtype)[:, None]


def by_windows(x: Tensor, spec: WindowsSpec) -> Tensor:
    """Return `x` [B, T, H] with its tokens window by window."""
    return _Reorder.apply(x, *window_order(spec, x.device))


def by_rows(x: Tensor, spec: WindowsSpec) -> Tensor:
    """Return `x` [B, T, H], whose tokens come window by window, row by row again."""
    order, inverse = window_order(spec, x.device)
    return _Reorder.apply(x, inverse, order)


class _Reorder(torch.autograd.Function):
    """A gather whose backward is a gather too, not the scatter that autograd would make of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.index_select(1, ctx.inverse), None, None


def _distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return how far ahead [Q, K] each key is of each query."""
    return torch.arange(num_keys, device=device)[None, :] - torch.arange(num_queries, device=device)[:, None]


def _coordinates(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and column [side x side] of the tokens of a square."""
    places = torch.arange(side * side, device=device)
    return places // side, places % side


def _by_window(of_tokens: Tensor, spec: WindowsSpec) -> Tensor:
    """Return `of_tokens` [T], row by row, as [windows, W]."""
    across = spec.grid // spec.size
    squares = of_tokens.view(across, spec.size, across, spec.size).transpose(1, 2)
    return squares.reshape(across * across, spec.size * spec.size)


def _added(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill(is_hidden, -torch.inf)
