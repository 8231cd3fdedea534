"""Dropout whose mask depends on what is dropped and on nothing else, so that every plan drops the same elements.

An element is dropped by a hash of (seed, step, layer, site, sample of the global batch, place in the sample): slices of
the batch, micro-batches, tensor parallelism and recomputation change nothing, and no random state is kept. The mask is
made again in backward. After Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", whose generators hash
a counter likewise; the hash here is the 32-bit one of C. Wellons' "Prospecting for hash functions" (2018), with a
second key between its rounds.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)  # of the hash, as signed numbers
_LOWEST, _VALUES = -(1 << 31), 1 << 32


class Place(NamedTuple):
    """Where a layer runs in a training: what its masks depend on, and the `rate` of dropped elements.

    `first_sample` is the place of the layer's first sample in the global batch.
    """

    seed: int
    step: int
    layer: int
    first_sample: int
    rate: float


def drop(x: Tensor, at: Place | None, site: int) -> Tensor:
    """Return `x` [B, ...] with elements set to 0 at the rate of `at` and the others scaled up; None drops nothing.

    `site` tells apart the places in one layer that drop.
    """
    return x if at is None or at.rate == 0.0 else _Drop.apply(x, at, site)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Place, site: int) -> Tensor:
        ctx.at, ctx.site = at, site
        return _dropped(x, at, site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _dropped(gradient, ctx.at, ctx.site), None, None


def _dropped(x: Tensor, at: Place, site: int) -> Tensor:
    goes = _hashes(x, at, site) < _LOWEST + round(at.rate * _VALUES)
    return (x * (1.0 / (1.0 - at.rate))).masked_fill_(goes.view(x.shape), 0.0)


def _hashes(x: Tensor, at: Place, site: int) -> Tensor:
    """Return int32 hashes [B, elements of a sample], even over all values."""
    digest = hashlib.blake2b(f"{at.seed}:{at.step}:{at.layer}:{site}".encode(), digest_size=12).digest()
    first, second, between = (int.from_bytes(digest[i : i + 4], "big", signed=True) for i in (0, 4, 8))
    samples = torch.arange(at.first_sample, at.first_sample + len(x), dtype=torch.int32, device=x.device)[:, None]
    keys = _mixed(samples ^ first, between), _mixed(samples ^ second, between)
    elements = torch.arange(x[0].numel(), dtype=torch.int32, device=x.device)
    return _mixed(elements ^ keys[0], keys[1])


def _mixed(x: Tensor, key: Tensor | int) -> Tensor:
    """Return the hash of int32 `x`, which is overwritten; products wrap around, and shifts bring in zeros."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _FIRST_FACTOR
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x ^= key
    x *= _SECOND_FACTOR
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
