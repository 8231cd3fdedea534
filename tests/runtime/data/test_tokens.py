"""Training data: token files, windows and splits, and the line for whatever is wrong with an input."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.errors import UserError
from meshwright.runtime.data import (
    IGNORE_INDEX,
    ByteTokenizer,
    FileTokenizer,
    TokenDataset,
    build_tokens,
    load_tokenizer,
    unigram_entropy,
)

BYTES = ByteTokenizer()


def tokens_of(*texts: str) -> list[int]:
    """What documents become: their bytes, each followed by the end of a document."""
    return [token for text in texts for token in (*text.encode(), 0)]


def build(sources: list[str | Path], cache: Path, **options):
    return build_tokens(sources, BYTES, cache, vocab_size=256, **options)


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "[UNK]": 3, "far": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


# ---- from text to a token file


def test_files_become_documents_in_the_order_given(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "a.txt").write_text("caf\u00e9")
    store = build([tmp_path / "b.txt", tmp_path / "a.txt"], tmp_path / "cache")
    assert store.tokens.tolist() == tokens_of("bee", "caf\u00e9")
    assert (store.header.num_documents, store.header.num_tokens, store.header.dtype) == (2, 10, "uint16")
    assert store.header.largest_token == max(tokens_of("caf\u00e9"))


def test_folders_are_read_recursively_by_name(tmp_path):
    for name in ("z.txt", "a/two.md", "a/one.txt", "b.py", "a.txt"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert build([tmp_path / "text"], tmp_path / "c").tokens.tolist() == tokens_of(
        "a.txt", "a/one.txt", "a/two.md", "z.txt"
    )
    assert build([tmp_path / "text"], tmp_path / "c", suffixes=(".py",)).tokens.tolist() == tokens_of("b.py")


def test_json_lines(tmp_path):
    lines = [json.dumps({"text": "one", "id": 1}), "", json.dumps({"text": ""}), json.dumps({"text": "t\nwo"})]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    store = build([tmp_path / "d.jsonl"], tmp_path / "cache")
    assert store.tokens.tolist() == tokens_of("one", "t\nwo")  # a document without text counts for nothing
    assert store.header.num_documents == 2


def test_the_standard_library_is_a_source(tmp_path):
    store = build(["stdlib"], tmp_path)
    assert 1_000_000 < store.header.num_tokens < 9_000_000
    text = bytes(store.tokens[:200_000].astype(np.uint8)).decode(errors="replace")
    assert "import" in text


def test_the_cache_is_used_until_an_input_changes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first")
    first = build([path], tmp_path / "cache")
    made = first.path.stat().st_mtime_ns
    assert build([path], tmp_path / "cache").path.stat().st_mtime_ns == made
    path.write_text("second")
    second = build([path], tmp_path / "cache")
    assert second.tokens.tolist() == tokens_of("second")
    assert second.header.inputs_sha256 != first.header.inputs_sha256
    assert first.tokens.tolist() == tokens_of("first")  # a run that still reads the old file is not disturbed
    os.utime(path, ns=(1, 1))
    third = build([path], tmp_path / "cache")
    assert third.header.tokens_sha256 == second.header.tokens_sha256  # same text, so the same tokens


@pytest.mark.parametrize("damage", ["header", "tokens", "short"])
def test_half_a_cache_is_made_again(tmp_path, damage: str):
    (tmp_path / "a.txt").write_text("text")
    path = build([tmp_path / "a.txt"], tmp_path / "cache").path
    if damage == "header":
        path.with_suffix(".json").unlink()
    elif damage == "tokens":
        path.unlink()
    else:
        path.write_bytes(b"\0\0")
    assert build([tmp_path / "a.txt"], tmp_path / "cache").tokens.tolist() == tokens_of("text")
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".bin", ".json"]


def test_a_failed_build_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"b\.txt: not a UTF-8 text file"):
        build([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "ok"}\nnope', r"d\.jsonl: line 2: not JSON"),
        ('{"body": "x"}', r'line 1: needs an object with a field "text"'),
        ('{"text": 3}', r'line 1: needs an object with a field "text"'),
        ("[1]", r'line 1: needs an object with a field "text"'),
        ('{"text": "\\ud800"}', r"line 1: text holds half a surrogate pair"),
        ("", "the sources hold no text"),
        ('{"text": ""}', "the sources hold no text"),
    ],
)
def test_bad_json_lines(tmp_path, text: str, message: str):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        build([tmp_path / "d.jsonl"], tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="no sources"):
        build([], tmp_path)
    with pytest.raises(UserError, match=r"none\.txt: no such file or folder"):
        build([tmp_path / "none.txt"], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: no file in this folder ends in \.txt, \.md, \.jsonl"):
        build([tmp_path / "empty"], tmp_path)
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(UserError, match="hold no text"):
        build([tmp_path / "nothing.txt"], tmp_path / "cache")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="cannot be written"):
        build([tmp_path / "a.txt"], tmp_path / "a.txt")


def test_an_id_that_the_model_lacks(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9")
    for _ in range(2):  # when built, and when found in the cache
        with pytest.raises(UserError, match=r"token id 195 is not below the model's vocab_size \(128\)"):
            build_tokens([tmp_path / "a.txt"], BYTES, tmp_path / "cache", vocab_size=128)


# ---- tokenizers


def test_tokenizer_files(tmp_path, word_tokenizer: Path):
    tokenizer = load_tokenizer(word_tokenizer)
    assert load_tokenizer(word_tokenizer.parent).identity == tokenizer.identity
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (70_001, 0)
    (tmp_path / "a.txt").write_text("a b far what")
    store = build_tokens([tmp_path / "a.txt"], tokenizer, tmp_path / "cache", vocab_size=70_001)
    assert (store.tokens.tolist(), store.header.dtype) == ([1, 2, 70_000, 3, 0], "uint32")
    assert store.header.inputs_sha256 != build([tmp_path / "a.txt"], tmp_path / "cache").header.inputs_sha256


def test_bad_tokenizer_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        FileTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json: "):
        FileTokenizer(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


# ---- samples


def test_targets_are_the_next_inputs():
    dataset = TokenDataset(np.arange(101), seq_len=10, held_out_fraction=0)
    inputs, targets = dataset.sample(0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (10,)
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_has_every_token_as_a_target_once():
    dataset = TokenDataset(np.arange(101), seq_len=10, held_out_fraction=0)
    assert dataset.samples_per_epoch == 10
    for epoch in range(3):
        _, targets = dataset.batch(epoch * 10, 10)
        assert sorted(targets.flatten().tolist()) == list(range(1, 101))


def test_epochs_and_seeds_have_their_own_order():
    def order(seed: int, epoch: int) -> list[int]:
        dataset = TokenDataset(np.arange(1001), seq_len=10, seed=seed, held_out_fraction=0)
        return dataset.batch(epoch * 100, 100)[0][:, 0].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_samples_do_not_depend_on_how_they_are_asked_for():
    """Any rank and any batch size sees the same sample i, whatever was asked before, over epochs too."""
    tokens = np.random.default_rng(0).integers(0, 256, 977)
    whole = TokenDataset(tokens, seq_len=16, seed=3).batch(0, 300)
    other = TokenDataset(tokens, seq_len=16, seed=3)
    for i in (299, 0, 150, 151, 57, 58, 299):
        inputs, targets = other.sample(i)
        assert torch.equal(inputs, whole[0][i])
        assert torch.equal(targets, whole[1][i])
    parts = [other.batch(start, 60) for start in range(0, 300, 60)]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[0])


def test_the_held_out_split_is_the_end_of_the_stream():
    tokens = np.arange(1000)
    train = TokenDataset(tokens, seq_len=9, held_out_fraction=0.1)
    held_out = TokenDataset(tokens, seq_len=9, split="held_out", held_out_fraction=0.1)
    trained = torch.cat([part.flatten() for part in train.batch(0, train.samples_per_epoch)])
    tested = torch.cat([part.flatten() for part in held_out.batch(0, held_out.samples_per_epoch)])
    assert trained.max() < 900 <= tested.min()


def test_the_start_of_a_document_is_no_target():
    tokens = np.array([5, 6, 0, 7, 8, 0, 9])
    inputs, targets = TokenDataset(tokens, seq_len=6, held_out_fraction=0, end_of_document=0).sample(0)
    assert inputs.tolist() == [5, 6, 0, 7, 8, 0]
    assert targets.tolist() == [6, 0, IGNORE_INDEX, 8, 0, IGNORE_INDEX]


def test_a_batch_can_be_changed_without_changing_the_data():
    tokens = np.arange(100)
    dataset = TokenDataset(tokens, seq_len=9, held_out_fraction=0)
    dataset.sample(0)[0].zero_()
    assert torch.equal(dataset.sample(0)[0] + 1, dataset.sample(0)[1])
    assert tokens.tolist() == list(range(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 100}, "the train split has 95 tokens, but one sample of seq_len 100 needs 101"),
        ({"seq_len": 95}, "the train split has 95 tokens, but one sample of seq_len 95 needs 96"),
        ({"seq_len": 5, "split": "held_out"}, "the held_out split has 5 tokens"),
        ({"seq_len": 0}, "seq_len: must be at least 1, not 0"),
        ({"seq_len": 8, "seed": -1}, "seed: must be at least 0, not -1"),
        ({"seq_len": 8, "held_out_fraction": 1.0}, "held_out_fraction: must be at least 0 and below 1, not 1.0"),
        ({"seq_len": 8, "held_out_fraction": math.nan}, "held_out_fraction: must be at least 0 and below 1, not nan"),
    ],
)
def test_splits_that_give_no_sample(options: dict, message: str):
    with pytest.raises(UserError, match=message):
        TokenDataset(np.arange(100), **options)


def test_there_is_no_sample_before_the_first():
    with pytest.raises(IndexError, match="sample -1 is before the first"):
        TokenDataset(np.arange(100), seq_len=8).sample(-1)


# ---- entropy


def test_unigram_entropy():
    assert unigram_entropy(np.array([3, 3, 3])) == 0
    assert unigram_entropy(np.arange(256).repeat(4)) == pytest.approx(math.log(256))
    assert unigram_entropy(np.array([0, 0, 0, 7])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    with pytest.raises(UserError, match="no tokens"):
        unigram_entropy(np.zeros(0, np.uint16))


def test_unigram_entropy_in_pieces(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 50, 1000)
    whole = unigram_entropy(tokens)
    monkeypatch.setattr("meshwright.runtime.data.tokens._CHUNK_TOKENS", 7)
    assert unigram_entropy(tokens) == pytest.approx(whole)
