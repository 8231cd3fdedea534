"""Masked language modelling: windows of which some tokens are hidden, and those are the targets.

After Devlin et al. 2019, "BERT": 15 % of the tokens are chosen; of these 80 % become the mask token, 10 % a random one,
and 10 % stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from meshwright.errors import UserError
from meshwright.runtime.data.order import DEFAULT_HELD_OUT_FRACTION, IGNORE_INDEX, Order, Split, Tokens
from meshwright.runtime.data.windows import split_windows
from meshwright.spec.base import Spec

CHOSEN_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
MASK_NAMES = ("[MASK]", "<mask>")
_SALT = 0x6D61736B  # "mask": other numbers than those that order the windows


class MaskIds(Spec):
    """What masking needs of a vocabulary: the mask token, and how many ids random tokens are drawn from.

    An `end_of_document` is never chosen.
    """

    mask: int
    num_ids: int
    end_of_document: int | None = None


def mask_ids(
    id_of: Callable[..., int | None], num_ids: int, end_of_document: int | None, vocab_size: int, model: str
) -> MaskIds:
    """Return the ids for masking: the tokenizer's mask token, or the id after its `num_ids` ones.

    Raises UserError when the model has no room for it.
    """
    named = id_of(*MASK_NAMES)
    mask = num_ids if named is None else named
    if mask >= vocab_size:
        raise UserError(
            f"vocab_size: {model} has {vocab_size} ids, but masking needs id {mask} for the mask token, after the "
            f"{num_ids} of the tokens; use a model with a vocab_size of at least {mask + 1}"
        )
    return MaskIds(mask=mask, num_ids=num_ids, end_of_document=end_of_document)


class MaskedDataset:
    """The samples of one split. What is hidden is drawn from (seed, epoch, window).

    In the held-out split it is drawn from the window alone, so that every run is asked the same.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        ids: MaskIds,
        split: Split = "train",
        seed: int = 0,
        held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    ) -> None:
        self._tokens = split_windows(tokens, split, held_out_fraction, seq_len=seq_len, needed=seq_len)
        self._seq_len, self._ids, self._seed, self._is_fixed = seq_len, ids, seed, split == "held_out"
        self._order = Order(len(self._tokens) // seq_len, seed)

    @property
    def samples_per_epoch(self) -> int:
        return self._order.num_items

    def batch(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets, int64 [count, seq_len], of global samples start .. start + count - 1."""
        inputs = np.empty((count, self._seq_len), np.int64)
        targets = np.full((count, self._seq_len), IGNORE_INDEX, np.int64)
        for row in range(count):
            epoch, window = self._order.find(start + row)
            inputs[row] = self._tokens[window * self._seq_len : (window + 1) * self._seq_len]
            key = [_SALT, window] if self._is_fixed else [_SALT, self._seed, epoch, window]
            self._hide(inputs[row], targets[row], np.random.default_rng(key))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _hide(self, tokens: Tokens, targets: Tokens, numbers: np.random.Generator) -> None:
        """Hide some of `tokens` in place, and put what they were into `targets`."""
        ids = self._ids
        able = np.arange(len(tokens))
        if ids.end_of_document is not None:
            able = able[tokens != ids.end_of_document]
        if not len(able):
            return
        chosen = numbers.permutation(able)[: max(1, round(CHOSEN_SHARE * len(able)))]
        targets[chosen] = tokens[chosen]
        draw = numbers.random(len(chosen))
        others = numbers.integers(0, ids.num_ids, len(chosen))
        tokens[chosen[draw < MASK_SHARE]] = ids.mask
        is_random = (draw >= MASK_SHARE) & (draw < MASK_SHARE + RANDOM_SHARE)
        tokens[chosen[is_random]] = others[is_random]
