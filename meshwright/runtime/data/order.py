"""The order of samples, and which of them are held out: what all kinds of data share."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import UserError

Split = Literal["train", "held_out"]
Tokens = NDArray[np.integer[Any]]
Inputs = torch.Tensor | tuple[torch.Tensor, ...]

IGNORE_INDEX = -100  # the target that torch's cross-entropy leaves out by default
DEFAULT_HELD_OUT_FRACTION = 0.05
_KEPT_EPOCHS = 2
_SPLIT_SEED = 20_170_706  # any number: the split is drawn once and for all, whatever the run's seed


class Dataset(Protocol):
    """The samples of one split: an endless sequence, epoch after epoch."""

    @property
    def samples_per_epoch(self) -> int: ...
    def batch(self, start: int, count: int) -> tuple[Inputs, torch.Tensor]:
        """Return what the model's first layer takes, and the targets, of samples start .. start + count - 1."""
        ...


class Order:
    """Which item is sample i: each epoch has all items once, in an order drawn from (seed, epoch)."""

    def __init__(self, num_items: int, seed: int) -> None:
        if seed < 0:
            raise UserError(f"seed: must be at least 0, not {seed}")
        self.num_items = num_items
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def find(self, index: int) -> tuple[int, int]:
        """Return the epoch and the item of sample `index`."""
        if index < 0:
            raise IndexError(f"sample {index} is before the first")
        epoch, position = divmod(index, self.num_items)
        if epoch not in self._orders:
            if len(self._orders) >= _KEPT_EPOCHS:
                del self._orders[next(iter(self._orders))]
            order = np.random.default_rng([self._seed, epoch]).permutation(self.num_items)
            self._orders[epoch] = order.astype(np.int64)
        return epoch, int(self._orders[epoch][position])


def split_tokens(tokens: Tokens, split: Split, held_out_fraction: float) -> Tokens:
    """Return a split of a stream: its end is held out as a whole, so that no held-out token is ever trained on."""
    _check_fraction(held_out_fraction)
    cut = len(tokens) - round(len(tokens) * held_out_fraction)
    return tokens[:cut] if split == "train" else tokens[cut:]


def split_items(num_items: int, split: Split, held_out_fraction: float) -> NDArray[np.int64]:
    """Return the items of a split, in rising order: a random share is held out, the same in every run.

    Raises UserError when a split that is asked for is empty.
    """
    _check_fraction(held_out_fraction)
    num_held_out = round(num_items * held_out_fraction)
    order = np.random.default_rng(_SPLIT_SEED).permutation(num_items).astype(np.int64)
    items = np.sort(order[num_held_out:] if split == "train" else order[:num_held_out])
    if not len(items):
        raise UserError(
            f"data: the {split} split of {num_items} samples is empty at held_out_fraction {held_out_fraction}; "
            "give more data, or another share"
        )
    return items


def _check_fraction(held_out_fraction: float) -> None:
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction: must be at least 0 and below 1, not {held_out_fraction}")
