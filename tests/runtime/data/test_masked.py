"""Masked tokens: how many, by what they are replaced, and what decides it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.errors import UserError
from meshwright.runtime.data import IGNORE_INDEX, MaskedDataset
from meshwright.runtime.data.masked import MaskIds, mask_ids
from tests.runtime.data.slices import check_slices

IDS = MaskIds(mask=50, num_ids=50, end_of_document=0)
TOKENS = np.random.default_rng(0).integers(0, 50, 40_000)


def made(**options) -> MaskedDataset:
    return MaskedDataset(TOKENS, seq_len=40, ids=IDS, **options)


def test_samples_do_not_depend_on_how_they_are_asked_for():
    check_slices(lambda: MaskedDataset(TOKENS[:1000], seq_len=40, ids=IDS, seed=3), 60)


def test_shares():
    inputs, targets = made(held_out_fraction=0).batch(0, 1000)
    assert inputs.shape == targets.shape == (1000, 40)
    chosen = targets != IGNORE_INDEX
    able = np.count_nonzero(TOKENS)
    assert chosen.sum() / able == pytest.approx(0.15, abs=0.003)
    was, now = targets[chosen], inputs[chosen]
    assert (now == IDS.mask).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (now == was).float().mean() == pytest.approx(0.1 + 0.1 / 50, abs=0.015)
    others = now[(now != IDS.mask) & (now != was)]
    assert len(others.unique()) == 50, "random tokens are any of the vocabulary"
    assert not (was == 0).any(), "the end of a document is never chosen"


def test_what_is_not_chosen_stays_and_targets_are_what_was_there():
    dataset = made(held_out_fraction=0)
    inputs, targets = dataset.batch(0, dataset.samples_per_epoch)
    seen = torch.where(targets == IGNORE_INDEX, inputs, targets)
    windows = {tuple(window) for window in TOKENS.reshape(-1, 40).tolist()}
    assert {tuple(window) for window in seen.tolist()} == windows


def test_each_epoch_and_seed_hides_other_tokens_but_held_out_ones_stay_hidden():
    def hidden(index: int, **options) -> dict[tuple[int, ...], list[bool]]:
        """Return what is hidden in each window of an epoch."""
        dataset = made(**options)
        inputs, targets = dataset.batch(index * dataset.samples_per_epoch, dataset.samples_per_epoch)
        seen = torch.where(targets == IGNORE_INDEX, inputs, targets)
        return {tuple(w): t for w, t in zip(seen.tolist(), (targets != IGNORE_INDEX).tolist(), strict=True)}

    assert hidden(0) == hidden(0)
    first, second, other = hidden(0), hidden(1), hidden(0, seed=1)
    assert first.keys() == second.keys() == other.keys()
    assert first != second
    assert first != other
    held_out = [hidden(index, split="held_out", seed=seed) for index, seed in ((0, 0), (1, 0), (0, 1))]
    assert held_out[0] == held_out[1] == held_out[2]


def test_splits_share_no_token():
    dataset, other = made(held_out_fraction=0.1), made(split="held_out", held_out_fraction=0.1)
    assert dataset.samples_per_epoch == 36_000 // 40
    assert other.samples_per_epoch == 4_000 // 40
    tokens = np.arange(2000) % 1000  # every window is different
    ids = MaskIds(mask=2000, num_ids=2000)
    parts = [
        MaskedDataset(tokens, seq_len=10, ids=ids, split=split, held_out_fraction=0.5)
        for split in ("train", "held_out")
    ]
    assert [part.samples_per_epoch for part in parts] == [100, 100]


def test_a_window_of_ends_hides_nothing():
    inputs, targets = MaskedDataset(np.zeros(8, np.int64), seq_len=8, ids=IDS, held_out_fraction=0).batch(0, 1)
    assert not inputs.any()
    assert (targets == IGNORE_INDEX).all()


def test_the_mask_token():
    assert mask_ids(lambda *names: None, 256, 0, 257, "m").mask == 256
    assert mask_ids(lambda *names: 103 if "[MASK]" in names else None, 1000, None, 1000, "m").mask == 103
    with pytest.raises(UserError, match=r"vocab_size: m has 256 ids, but masking needs id 256 .* at least 257"):
        mask_ids(lambda *names: None, 256, 0, 256, "m")


def test_too_few_tokens():
    with pytest.raises(UserError, match="the train split has 5 tokens, but one sample of seq_len 8 needs 8"):
        MaskedDataset(TOKENS[:5], seq_len=8, ids=IDS, held_out_fraction=0)
