"""Span corruption for an encoder-decoder: spans of a text are cut out of the source and are the targets.

After Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text Transformer": 15 % of
the tokens are noise, in spans of 3 tokens on average. In the source each span is one sentinel; the targets are each
sentinel followed by its span. Both end with an end-of-sequence token and are padded. A text begins with what stays and
ends with a span, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.runtime.data.order import DEFAULT_HELD_OUT_FRACTION, IGNORE_INDEX, Order, Split, Tokens
from meshwright.runtime.data.windows import split_windows
from meshwright.spec.base import Spec

NOISE_SHARE, MEAN_SPAN_TOKENS = 0.15, 3.0
PAD_ID = 0  # also what a decoder starts with
_SALT = 0x7370616E  # "span": other numbers than those that order the windows
_SHORTEST = 2  # a token that stays and one that is cut out


class SpanLengths(NamedTuple):
    """How a text of `raw` tokens is corrupted: how many are noise, in how many spans."""

    raw: int
    noise: int
    spans: int

    @property
    def source(self) -> int:
        """Tokens of the source: what stays, the sentinels, the end."""
        return self.raw - self.noise + self.spans + 1

    @property
    def target(self) -> int:
        """Tokens of the targets: the sentinels, the noise, the end."""
        return self.noise + self.spans + 1


def span_lengths(raw: int) -> SpanLengths:
    """Return how a text of `raw` tokens is corrupted."""
    noise = min(max(1, round(raw * NOISE_SHARE)), raw - 1)
    return SpanLengths(raw, noise, max(1, round(noise / MEAN_SPAN_TOKENS)))


def longest_spans(seq_len: int, target_seq_len: int) -> SpanLengths:
    """Return the longest text whose source and targets fit. Raises UserError when not even one span does."""
    best = span_lengths(_SHORTEST)
    for field, given, needed in (("seq_len", seq_len, best.source), ("target_seq_len", target_seq_len, best.target)):
        if given < needed:
            raise UserError(
                f"{field}: {given} is too short for one span with its sentinel and the end; plan at least {needed}"
            )
    while (longer := span_lengths(best.raw + 1)).source <= seq_len and longer.target <= target_seq_len:
        best = longer
    return best


class SpanIds(Spec):
    """What span corruption needs of a vocabulary: a sentinel for each span in turn, and the end of a sequence."""

    sentinels: tuple[int, ...]
    end: int


def span_ids(
    id_of: Callable[..., int | None],
    num_ids: int,
    end: int | None,
    vocab_size: int,
    model: str,
    num_spans: int,
) -> SpanIds:
    """Return the tokenizer's sentinels (<extra_id_0>, ...), or ids from the top of the model's vocabulary down.

    Without an `end` of the tokenizer's own, the id below the sentinels ends a sequence. Raises UserError when there
    are too few.
    """
    named = [id_of(f"<extra_id_{number}>") for number in range(num_spans)]
    sentinels = [sentinel for sentinel in named if sentinel is not None]
    if sentinels and len(sentinels) < num_spans:
        raise UserError(
            f"seq_len: a sample has {num_spans} spans, but the tokenizer has {len(sentinels)} sentinels <extra_id_i>; "
            "plan shorter samples"
        )
    if not sentinels:
        sentinels = [vocab_size - 1 - number for number in range(num_spans)]
    below = vocab_size - 1 - num_spans
    needed = num_spans + (end is None)
    is_own = named[0] is None
    if (is_own and num_ids + needed > vocab_size) or max(sentinels) >= vocab_size:
        raise UserError(
            f"vocab_size: {model} has {vocab_size} ids, but the tokens have {num_ids} and a sample needs {needed} more "
            f"for sentinels; use a model with a vocab_size of at least {max(num_ids + needed, max(sentinels) + 1)}"
        )
    return SpanIds(sentinels=tuple(sentinels), end=below if end is None else end)


class SpanDataset:
    """The samples of one split. Where the spans lie is drawn from (seed, epoch, window).

    In the held-out split it is drawn from the window alone, so that every run is asked the same.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        target_seq_len: int,
        ids: SpanIds,
        split: Split = "train",
        seed: int = 0,
        held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    ) -> None:
        self.lengths = longest_spans(seq_len, target_seq_len)
        self._tokens = split_windows(tokens, split, held_out_fraction, seq_len=seq_len, needed=self.lengths.raw)
        self._seq_len, self._target_seq_len, self._ids = seq_len, target_seq_len, ids
        self._seed, self._is_fixed = seed, split == "held_out"
        self._order = Order(len(self._tokens) // self.lengths.raw, seed)

    @property
    def samples_per_epoch(self) -> int:
        return self._order.num_items

    def batch(self, start: int, count: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return ((source, decoder's inputs), targets) of global samples start .. start + count - 1.

        All int64, [count, seq_len] and twice [count, target_seq_len]; the decoder's inputs are the targets shifted
        right, after the start token.
        """
        source = np.full((count, self._seq_len), PAD_ID, np.int64)
        decoder = np.full((count, self._target_seq_len), PAD_ID, np.int64)
        targets = np.full((count, self._target_seq_len), IGNORE_INDEX, np.int64)
        for row in range(count):
            epoch, window = self._order.find(start + row)
            raw = self._tokens[window * self.lengths.raw : (window + 1) * self.lengths.raw]
            key = [_SALT, window] if self._is_fixed else [_SALT, self._seed, epoch, window]
            stays, noise = self._corrupted(np.asarray(raw, np.int64), np.random.default_rng(key))
            source[row, : len(stays)] = stays
            targets[row, : len(noise)] = noise
            decoder[row, 1 : len(noise)] = noise[:-1]
        return (torch.from_numpy(source), torch.from_numpy(decoder)), torch.from_numpy(targets)

    def _corrupted(self, raw: Tokens, numbers: np.random.Generator) -> tuple[Tokens, Tokens]:
        """Return source and targets of one text, not padded."""
        lengths, ids = self.lengths, self._ids
        stays = _segments(lengths.raw - lengths.noise, lengths.spans, numbers)
        noise = _segments(lengths.noise, lengths.spans, numbers)
        source: list[Tokens] = []
        targets: list[Tokens] = []
        at = 0
        for number in range(lengths.spans):
            sentinel = np.array([ids.sentinels[number]], np.int64)
            cut = at + stays[number]
            source += [raw[at:cut], sentinel]
            at = cut + noise[number]
            targets += [sentinel, raw[cut:at]]
        end = np.array([ids.end], np.int64)
        return np.concatenate([*source, end]), np.concatenate([*targets, end])


def _segments(total: int, parts: int, numbers: np.random.Generator) -> NDArray[np.int64]:
    """Return `parts` random positive lengths that sum to `total`, all ways equally likely."""
    cuts = np.sort(numbers.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)
