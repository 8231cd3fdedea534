"""Text classification: labelled texts, each cut or padded to seq_len tokens.

The models have no mask for padding: they attend to the pad tokens, as they learn to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.files import shorten
from meshwright.runtime.data.classes import ClassDataset
from meshwright.runtime.data.order import DEFAULT_HELD_OUT_FRACTION, Split
from meshwright.runtime.data.sources import read_records, text_of
from meshwright.runtime.data.tokenizer import Tokenizer

START_NAMES, END_NAMES, PAD_NAMES = ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[PAD]", "<pad>")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTexts:
    """Texts and their classes; names, if the labels were names, in the order of the classes."""

    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    names: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        digest = hashlib.sha256()
        for text, label in zip(self.texts, self.labels.tolist(), strict=True):
            data = text.encode()
            digest.update(f"{label} {len(data)} ".encode())
            digest.update(data)
        return digest.hexdigest()


def read_labelled(sources: Sequence[str | Path]) -> LabelledTexts:
    """Return the texts of `.jsonl` files, one object a line with "text" and "label".

    Labels are all numbers, which are the classes, or all names, whose classes are their places in alphabetical order.
    """
    texts: list[str] = []
    labels: list[int | str] = []
    for source in sources:
        path = Path(source)
        if path.suffix != ".jsonl":
            raise UserError(
                f'data: {str(source)!r} is not a .jsonl file; labelled texts are lines of {{"text": .., "label": ..}}'
            )
        for where, record in read_records(path):
            texts.append(text_of(record, where))
            labels.append(_label_of(record, where, labels))
    if not texts:
        raise UserError(f"data: {' '.join(map(str, sources)) or 'nothing'}: no labelled texts; give .jsonl files")
    names = sorted({label for label in labels if isinstance(label, str)})
    places = {name: place for place, name in enumerate(names)}
    numbers = [places[label] if isinstance(label, str) else label for label in labels]
    return LabelledTexts(texts=tuple(texts), labels=np.array(numbers, np.int64), names=tuple(names))


def _label_of(record: dict[str, Any], where: str, before: list[int | str]) -> int | str:
    label = record.get("label")
    if isinstance(label, bool) or not isinstance(label, int | str) or (isinstance(label, int) and abs(label) >> 31):
        raise UserError(f'{where}: needs a field "label" that holds a class number or a name, not {shorten(label)}')
    if before and type(before[0]) is not type(label):
        raise UserError(f"{where}: label {shorten(label)}: labels must be all numbers or all names")
    return label


class TextClassDataset(ClassDataset):
    """Texts and their classes.

    A sample begins with the tokenizer's start token and ends with its separator, where it has them.
    """

    def __init__(
        self,
        texts: LabelledTexts,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        num_classes: int,
        split: Split = "train",
        seed: int = 0,
        held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    ) -> None:
        super().__init__(
            texts.labels, num_classes=num_classes, split=split, seed=seed, held_out_fraction=held_out_fraction
        )
        self._texts, self._tokenizer, self._seq_len = texts, tokenizer, seq_len
        self._start = _tokens(tokenizer.id_of(*START_NAMES))
        self._end = _tokens(tokenizer.id_of(*END_NAMES))
        self._pad = tokenizer.id_of(*PAD_NAMES) or 0

    def batch(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 [count, seq_len] and classes int64 [count] of samples from `start` on."""
        items = self._taken(start, count)
        ids = np.full((count, self._seq_len), self._pad, np.int64)
        for row, item in enumerate(items):
            tokens = [*self._start, *self._tokenizer.encode(self._texts.texts[item]).tolist()]
            tokens = [*tokens[: max(0, self._seq_len - len(self._end))], *self._end][: self._seq_len]
            ids[row, : len(tokens)] = tokens
        return torch.from_numpy(ids), torch.from_numpy(self._texts.labels[items])


def _tokens(token: int | None) -> list[int]:
    return [] if token is None else [token]
