"""What image and text classification share: labels that a model has classes for, and the samples of one split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.runtime.data.order import DEFAULT_HELD_OUT_FRACTION, Order, Split, split_items

Labels = NDArray[np.int64]


class ClassDataset:
    """The samples of one split of labelled items: a fixed random share of them is held out."""

    def __init__(
        self,
        labels: Labels,
        *,
        num_classes: int,
        split: Split = "train",
        seed: int = 0,
        held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    ) -> None:
        check_classes(labels, num_classes)
        self.items = split_items(len(labels), split, held_out_fraction)
        self._all_labels = labels
        self._order = Order(len(self.items), seed)

    @property
    def samples_per_epoch(self) -> int:
        return self._order.num_items

    @property
    def labels(self) -> Labels:
        """The classes of the split's samples."""
        return self._all_labels[self.items]

    def _taken(self, start: int, count: int) -> list[int]:
        """Return the items that samples from `start` on are."""
        return [int(self.items[self._order.find(start + row)[1]]) for row in range(count)]


def check_classes(labels: Labels, num_classes: int) -> None:
    """Raise UserError for labels that the model has no class for. Classes without a sample are fine."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"data: label {wrong} is not one of the model's classes, 0 to {num_classes - 1} (num_labels)")
