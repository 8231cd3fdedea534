"""Rotary positions (arXiv 2104.09864)."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from meshwright.models.tables import shared
from meshwright.spec.parts import RopeScaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [B, N, T, D] rotated by position: halves of D form the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@shared
def rotary_table(
    num_tokens: int,
    head_size: int,
    theta: float,
    scaling: RopeScaling | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return cos and sin [T, D] of the rotation angles."""
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
