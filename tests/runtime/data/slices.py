"""What every kind of data must keep: sample i is the same however it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.runtime.data import Dataset


def flat(batch: tuple[torch.Tensor | tuple[torch.Tensor, ...], torch.Tensor]) -> list[torch.Tensor]:
    """Return inputs and targets in a row."""
    inputs, targets = batch
    return [*(inputs if isinstance(inputs, tuple) else (inputs,)), targets]


def check_slices(make: Callable[[], Dataset], num_samples: int) -> None:
    """Ask for samples in one go, one by one out of order, and in parts, over epochs: the same come."""
    whole = flat(make().batch(0, num_samples))
    other = make()
    for i in (num_samples - 1, 0, num_samples // 2, other.samples_per_epoch, 1):
        for got, want in zip(flat(other.batch(i, 1)), whole, strict=True):
            assert torch.equal(got[0], want[i])
    parts = [flat(other.batch(start, num_samples // 4)) for start in range(0, num_samples // 4 * 4, num_samples // 4)]
    for got, want in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(got), want[: num_samples // 4 * 4])
