"""Span corruption: lengths, sentinels, and that source and targets together are the text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.errors import UserError
from meshwright.runtime.data import IGNORE_INDEX, SpanDataset
from meshwright.runtime.data.spans import PAD_ID, SpanIds, longest_spans, span_ids, span_lengths
from tests.runtime.data.slices import check_slices

NUM_IDS = 100
TOKENS = np.random.default_rng(0).integers(2, NUM_IDS, 5000)
IDS = SpanIds(sentinels=tuple(range(149, 129, -1)), end=1)


def made(tokens=TOKENS, seq_len=60, target_seq_len=20, **options) -> SpanDataset:
    return SpanDataset(tokens, seq_len=seq_len, target_seq_len=target_seq_len, ids=IDS, **options)


def joined(source: list[int], targets: list[int]) -> list[int]:
    """Put the spans of the targets where their sentinels stand in the source."""
    spans: dict[int, list[int]] = {}
    for token in targets[: targets.index(IDS.end)]:
        if token in IDS.sentinels:
            assert token not in spans
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    assert list(spans) == list(IDS.sentinels[: len(spans)])
    return [t for token in source[: source.index(IDS.end)] for t in spans.get(token, [token])]


def test_samples_do_not_depend_on_how_they_are_asked_for():
    check_slices(lambda: made(TOKENS[:1000], seed=3), 60)


@pytest.mark.parametrize(("seq_len", "target_seq_len"), [(60, 20), (60, 60), (60, 9), (3, 3), (100, 5)])
def test_source_and_targets_are_the_text(seq_len: int, target_seq_len: int):
    dataset = made(seq_len=seq_len, target_seq_len=target_seq_len, held_out_fraction=0)
    raw = dataset.lengths.raw
    (source, decoder), targets = dataset.batch(0, dataset.samples_per_epoch)
    assert source.shape == (dataset.samples_per_epoch, seq_len)
    assert decoder.shape == targets.shape == (dataset.samples_per_epoch, target_seq_len)
    texts = {tuple(joined(s, t)) for s, t in zip(source.tolist(), targets.tolist(), strict=True)}
    assert texts == {tuple(TOKENS[i * raw : (i + 1) * raw].tolist()) for i in range(dataset.samples_per_epoch)}


def test_padding_and_the_decoders_inputs():
    dataset = made(seq_len=60, target_seq_len=40)
    (source, decoder), targets = dataset.batch(0, 50)
    counted = targets != IGNORE_INDEX
    assert (counted.sum(1) == dataset.lengths.target).all()
    assert (source != PAD_ID).sum(1).eq(dataset.lengths.source).all()
    assert (decoder[:, 0] == PAD_ID).all()
    shifted = torch.where(counted, targets, PAD_ID)[:, :-1]
    shifted = torch.where(counted[:, 1:], shifted, PAD_ID)
    assert torch.equal(decoder[:, 1:], shifted)
    assert (targets.gather(1, counted.sum(1, keepdim=True) - 1) == IDS.end).all()


def test_shares_are_those_of_the_paper():
    lengths = span_lengths(512)
    assert (lengths.noise, lengths.spans) == (77, 26)
    # The published pretraining makes 512 source and 114 target tokens of 568.
    assert longest_spans(512, 114).raw == 568
    assert longest_spans(512, 114).source == 512
    assert longest_spans(512, 114).target == 114


@pytest.mark.parametrize("seq_len", [3, 4, 10, 37, 64, 200])
@pytest.mark.parametrize("target_seq_len", [3, 4, 5, 13, 64])
def test_the_text_is_the_longest_that_fits(seq_len: int, target_seq_len: int):
    found = longest_spans(seq_len, target_seq_len)
    fitting = [
        raw
        for raw in range(2, 600)
        if span_lengths(raw).source <= seq_len and span_lengths(raw).target <= target_seq_len
    ]
    assert found.raw == max(fitting)


def test_spans_are_elsewhere_each_epoch_but_not_held_out():
    dataset = made(TOKENS[:100], held_out_fraction=0)
    assert dataset.samples_per_epoch == 1
    (first, _), _ = dataset.batch(0, 1)
    (second, _), _ = dataset.batch(1, 1)
    assert not torch.equal(first, second)
    held_out = [made(TOKENS[:100], split="held_out", held_out_fraction=0.9, seed=seed).batch(0, 2) for seed in (0, 1)]
    assert torch.equal(held_out[0][0][0][0], held_out[0][0][0][1])
    assert torch.equal(held_out[0][1], held_out[1][1])


def test_ids():
    by_bytes = span_ids(lambda *names: None, 256, 0, 272, "m", 4)
    assert by_bytes == SpanIds(sentinels=(271, 270, 269, 268), end=0)
    assert span_ids(lambda *names: None, 250, None, 256, "m", 4).end == 251
    names = {f"<extra_id_{i}>": 199 - i for i in range(5)}
    own = span_ids(lambda name: names.get(name), 200, 1, 200, "m", 4)
    assert own == SpanIds(sentinels=(199, 198, 197, 196), end=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: longest_spans(60, 2), "target_seq_len: 2 is too short for one span .* at least 3"),
        (lambda: longest_spans(2, 60), "seq_len: 2 is too short for one span .* at least 3"),
        (lambda: span_ids(lambda *_: None, 256, 0, 256, "m", 4), r"vocab_size: m has 256 ids, .* at least 260"),
        (lambda: span_ids(lambda *_: None, 256, None, 260, "m", 4), "needs 5 more .* at least 261"),
        (
            lambda: span_ids({"<extra_id_0>": 9}.get, 10, 1, 10, "m", 4),
            "seq_len: a sample has 4 spans, but the tokenizer has 1 sentinels",
        ),
        (lambda: made(TOKENS[:30], held_out_fraction=0), "the train split has 30 tokens, but one sample of seq_len 60"),
    ],
)
def test_what_cannot_be(make, message: str):
    with pytest.raises(UserError, match=message):
        make()
