"""Labelled texts: labels, cutting and padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.runtime.data import ByteTokenizer, TextClassDataset, read_labelled
from tests.runtime.data.slices import check_slices


class Framed(ByteTokenizer):
    """Bytes with a start, a separator and a pad token."""

    def id_of(self, *names: str) -> int | None:
        return {"[CLS]": 1, "[SEP]": 2, "[PAD]": 3}.get(names[0])


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    return write(tmp_path / "n.jsonl", *({"text": f"{i}" * (i % 9 + 1), "label": i % 3} for i in range(40)))


def rows(path: Path, tokenizer: ByteTokenizer, seq_len: int) -> list[list[int]]:
    dataset = TextClassDataset(read_labelled([path]), tokenizer, seq_len=seq_len, num_classes=3, held_out_fraction=0)
    ids, classes = dataset.batch(0, dataset.samples_per_epoch)
    assert classes.shape == (dataset.samples_per_epoch,)
    return sorted(ids.tolist())


def test_samples_do_not_depend_on_how_they_are_asked_for(numbers: Path):
    texts = read_labelled([numbers])
    check_slices(lambda: TextClassDataset(texts, ByteTokenizer(), seq_len=12, num_classes=3, seed=3), 100)


def test_texts_keep_their_labels(numbers: Path):
    dataset = TextClassDataset(read_labelled([numbers]), ByteTokenizer(), seq_len=20, num_classes=3)
    ids, classes = dataset.batch(0, 60)
    for row, label in zip(ids.tolist(), classes.tolist(), strict=True):
        text = bytes(token for token in row if token).decode()
        number = next(i for i in range(40) if f"{i}" * (i % 9 + 1) == text)
        assert number % 3 == label


def test_texts_are_padded_and_cut(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", {"text": "ab", "label": 0}, {"text": "abcdef", "label": 1})
    assert rows(path, ByteTokenizer(), 4) == [[97, 98, 0, 0], [97, 98, 99, 100]]
    assert rows(path, Framed(), 5) == [[1, 97, 98, 2, 3], [1, 97, 98, 99, 2]]


def test_names_are_numbered_by_the_alphabet(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", *({"text": "x", "label": label} for label in ("no", "yes", "maybe", "no")))
    texts = read_labelled([path])
    assert texts.names == ("maybe", "no", "yes")
    assert texts.labels.tolist() == [1, 2, 0, 1]


def test_identity(tmp_path: Path):
    def identity(*pairs: tuple[str, int]) -> str:
        return read_labelled([write(tmp_path / "t.jsonl", *({"text": t, "label": n} for t, n in pairs))]).identity

    assert identity(("a", 1)) == identity(("a", 1))
    assert len({identity(("a", 1)), identity(("a", 0)), identity(("b", 1)), identity(("a", 1), ("a", 1))}) == 4


def test_splits_share_no_text(numbers: Path):
    texts = read_labelled([numbers])
    parts = [
        TextClassDataset(texts, ByteTokenizer(), seq_len=20, num_classes=3, split=split, held_out_fraction=0.25)
        for split in ("train", "held_out")
    ]
    assert [part.samples_per_epoch for part in parts] == [30, 10]
    assert not np.intersect1d(parts[0].items, parts[1].items).size


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "a"}], 'line 1: needs an object with a field "text"|needs a field "label"'),
        ([{"label": 1}], 'line 1: needs an object with a field "text"'),
        ([{"text": "a", "label": 1.5}], 'line 1: needs a field "label" that holds a class number or a name, not 1.5'),
        ([{"text": "a", "label": True}], 'needs a field "label"'),
        ([{"text": "a", "label": 10**30}], 'needs a field "label"'),
        ([{"text": "a", "label": 1}, {"text": "b", "label": "x"}], "line 2: label 'x': labels must be all numbers or"),
        ([{"text": "a", "label": 3}], "label 3 is not one of the model's classes, 0 to 2"),
        ([{"text": "a", "label": -1}], "label -1 is not one of the model's classes, 0 to 2"),
        ([], "no labelled texts; give .jsonl files"),
    ],
)
def test_what_cannot_be(tmp_path: Path, records: list[Any], message: str):
    path = write(tmp_path / "t.jsonl", *records)
    with pytest.raises(UserError, match=message):
        TextClassDataset(read_labelled([path]), ByteTokenizer(), seq_len=4, num_classes=3, held_out_fraction=0)


def test_other_files(tmp_path: Path):
    with pytest.raises(UserError, match=r"'stdlib' is not a .jsonl file"):
        read_labelled(["stdlib"])
    with pytest.raises(UserError, match=r"none.jsonl: cannot be read: No such file"):
        read_labelled([tmp_path / "none.jsonl"])
