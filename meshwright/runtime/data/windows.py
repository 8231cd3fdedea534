"""Causal language modelling: windows of a stream of tokens, each token's target the next one.

A split is cut into windows of seq_len tokens and the token after them; neighbouring windows share that one token, so
that every token but the first is a target once an epoch.
"""

from __future__ import annotations

import numpy as np
import torch

from meshwright.errors import UserError
from meshwright.runtime.data.order import DEFAULT_HELD_OUT_FRACTION, IGNORE_INDEX, Order, Split, Tokens, split_tokens


class TokenDataset:
    """The samples of one split: an endless sequence, epoch after epoch.

    With `end_of_document`, the target after such a token is IGNORE_INDEX, since nothing in one
    document tells how the next begins.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        split: Split = "train",
        seed: int = 0,
        held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
        end_of_document: int | None = None,
    ) -> None:
        self._tokens = split_windows(tokens, split, held_out_fraction, seq_len=seq_len, needed=seq_len + 1)
        self._seq_len = seq_len
        self._end_of_document = end_of_document
        self._order = Order((len(self._tokens) - 1) // seq_len, seed)

    @property
    def samples_per_epoch(self) -> int:
        return self._order.num_items

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets, int64 [seq_len] each, of global sample `index`."""
        inputs, targets = self.batch(index, 1)
        return inputs[0], targets[0]

    def batch(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets, int64 [count, seq_len], of global samples start .. start + count - 1."""
        windows = np.empty((count, self._seq_len + 1), np.int64)
        for row in range(count):
            first = self._order.find(start + row)[1] * self._seq_len
            windows[row] = self._tokens[first : first + self._seq_len + 1]
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        if self._end_of_document is not None:
            targets[inputs == self._end_of_document] = IGNORE_INDEX
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def split_windows(tokens: Tokens, split: Split, held_out_fraction: float, *, seq_len: int, needed: int) -> Tokens:
    """Return the tokens of a split, or raise UserError when they are fewer than the `needed` ones of one sample."""
    if seq_len < 1:
        raise UserError(f"seq_len: must be at least 1, not {seq_len}")
    part = split_tokens(tokens, split, held_out_fraction)
    if len(part) < needed:
        raise UserError(
            f"data: the {split} split has {len(part)} tokens, "
            f"but one sample of seq_len {seq_len} needs {needed}; give more text, or plan shorter samples"
        )
    return part
