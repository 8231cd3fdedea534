"""From a plan's model and a user's sources to the samples of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from meshwright.errors import UserError
from meshwright.runtime.data.images import DIGITS, ImageDataset, open_images
from meshwright.runtime.data.labelled import TextClassDataset, read_labelled
from meshwright.runtime.data.masked import MaskedDataset, mask_ids
from meshwright.runtime.data.order import IGNORE_INDEX, Dataset, Split, Tokens
from meshwright.runtime.data.sources import STDLIB
from meshwright.runtime.data.spans import SpanDataset, longest_spans, span_ids
from meshwright.runtime.data.task import TaskName, choose_task
from meshwright.runtime.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from meshwright.runtime.data.tokens import TokenStore, build_tokens, is_token_file, open_token_file, unigram_entropy
from meshwright.runtime.data.windows import TokenDataset
from meshwright.runtime.watchdog import Progress
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ClassifierLayer, ModelSpec, PatchEmbeddingLayer

DEFAULT_SOURCES: dict[TaskName, tuple[str, ...]] = {
    "causal": (STDLIB,),
    "masked": (STDLIB,),
    "spans": (STDLIB,),
    "images": (DIGITS,),
    "labelled-text": (),
}
_ENTROPY_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """What a run is trained on: sources as the user wrote them (none: the task's usual ones), and how to split them.

    `task`: None for the usual one of the model. `evaluates`: held-out samples are wanted.
    """

    sources: tuple[str, ...]
    tokenizer: str
    cache_dir: str
    seed: int
    held_out_fraction: float
    evaluates: bool
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The samples of a run; `held_out` is None when nothing is held out. `identity` changes when the samples do.

    `entropy` returns the unigram entropy of what is to be foretold, in nats: the loss of the best model that sees no
    context.
    """

    task: TaskName
    identity: str
    training: Dataset
    held_out: Dataset | None
    entropy: Callable[[], float]


def open_data(model: ModelSpec, job: JobSpec, request: DataRequest, progress: Progress | None = None) -> RunData:
    """Return the data of a run; tokens are made if they are not cached. One process at a time may make them."""
    task = choose_task(model, request.task)
    if not request.sources and not DEFAULT_SOURCES[task]:
        raise UserError(f"data: {model.name} is trained on {task}, for which there are no usual data; give some")
    sources = request.sources or DEFAULT_SOURCES[task]
    if task == "images":
        if request.tokenizer != BYTES:
            raise UserError(f"tokenizer: {model.name} is trained on images, which have none; leave the option out")
        return _image_data(model, sources, request)
    arrays = [source for source in sources if str(source).lower().endswith(".npz")]
    if arrays:
        raise UserError(f"data: {arrays[0]} holds arrays, and {model.name} is trained on {task}; give text or tokens")
    tokenizer = load_tokenizer(request.tokenizer)
    if task == "labelled-text":
        return _labelled_data(model, job, sources, request, tokenizer)
    return _token_data(model, job, task, sources, request, _Counted(tokenizer, progress or Progress()))


class _MakesDataset(Protocol):
    """The constructor of a dataset, all but the split given."""

    def __call__(self, *, split: Split, seed: int, held_out_fraction: float) -> Dataset: ...


def _splits(make: _MakesDataset, request: DataRequest) -> tuple[Dataset, Dataset | None]:
    """Return the training split, and the held-out one where it is wanted."""
    options = {"seed": request.seed, "held_out_fraction": request.held_out_fraction}
    is_held_out = request.held_out_fraction > 0 and request.evaluates
    training = make(split="train", **options)
    return training, make(split="held_out", **options) if is_held_out else None


def _token_data(
    model: ModelSpec,
    job: JobSpec,
    task: TaskName,
    sources: tuple[str, ...],
    request: DataRequest,
    tokenizer: Tokenizer,
) -> RunData:
    store, ids = _tokens(model, sources, request, tokenizer)
    tokens_sha256, seq_len, vocab_size = store.header.tokens_sha256, job.seq_len, model.vocab_size
    if task == "causal":
        make = partial(TokenDataset, store.tokens, seq_len=seq_len, end_of_document=ids.end_of_document)
        training, held_out = _splits(make, request)
        entropy = partial(unigram_entropy, store.tokens)
        return RunData(task=task, identity=tokens_sha256, training=training, held_out=held_out, entropy=entropy)
    if task == "masked":
        special = mask_ids(ids.id_of, ids.num_ids, ids.end_of_document, vocab_size, model.name)
        make = partial(MaskedDataset, store.tokens, seq_len=seq_len, ids=special)
    else:
        target_seq_len = job.lengths.target_seq
        num_spans = longest_spans(seq_len, target_seq_len).spans
        special = span_ids(ids.id_of, ids.num_ids, ids.end_of_document, vocab_size, model.name, num_spans)
        make = partial(SpanDataset, store.tokens, seq_len=seq_len, target_seq_len=target_seq_len, ids=special)
    training, held_out = _splits(make, request)
    identity = hashlib.sha256(f"{task} {tokens_sha256} {special.model_dump_json()}".encode()).hexdigest()
    entropy = partial(targets_entropy, training)
    return RunData(task=task, identity=identity, training=training, held_out=held_out, entropy=entropy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ids:
    """What is known of the ids of a stream of tokens."""

    num_ids: int
    end_of_document: int | None
    id_of: Callable[..., int | None]


def _tokens(
    model: ModelSpec, sources: tuple[str, ...], request: DataRequest, tokenizer: Tokenizer
) -> tuple[TokenStore, _Ids]:
    """Return the tokens of text files, or of one token file, whose ids are a tokenizer's if one is named."""
    files = [source for source in sources if is_token_file(source)]
    if files and len(sources) > 1:
        raise UserError(f"data: {files[0]} holds tokens and must be the only source, not one of {len(sources)}")
    if files:
        store = open_token_file(files[0], request.cache_dir, vocab_size=model.vocab_size)
        if request.tokenizer == BYTES:  # what is used when none is named, which says nothing of these tokens
            return store, _Ids(num_ids=store.header.largest_token + 1, end_of_document=None, id_of=lambda *names: None)
    else:
        store = build_tokens(sources, tokenizer, request.cache_dir, vocab_size=model.vocab_size)
    return store, _Ids(num_ids=tokenizer.vocab_size, end_of_document=tokenizer.end_of_document, id_of=tokenizer.id_of)


def _image_data(model: ModelSpec, sources: tuple[str, ...], request: DataRequest) -> RunData:
    layer, head = model.embedding, model.head
    assert isinstance(layer, PatchEmbeddingLayer)  # noqa: S101 what makes the task
    assert isinstance(head, ClassifierLayer)  # noqa: S101 likewise
    images = open_images(sources)
    training, held_out = _splits(partial(ImageDataset, images, layer=layer, num_classes=head.num_classes), request)
    entropy = partial(unigram_entropy, images.labels)
    return RunData(task="images", identity=images.identity, training=training, held_out=held_out, entropy=entropy)


def _labelled_data(
    model: ModelSpec, job: JobSpec, sources: tuple[str, ...], request: DataRequest, tokenizer: Tokenizer
) -> RunData:
    head = model.head
    assert isinstance(head, ClassifierLayer)  # noqa: S101 what makes the task
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"tokenizer: has {tokenizer.vocab_size} ids, but {model.name} has a vocab_size of {model.vocab_size}; "
            "use the model's own tokenizer"
        )
    texts = read_labelled(sources)
    make = partial(TextClassDataset, texts, tokenizer, seq_len=job.seq_len, num_classes=head.num_classes)
    training, held_out = _splits(make, request)
    identity = hashlib.sha256(f"{texts.identity} {tokenizer.identity}".encode()).hexdigest()
    entropy = partial(unigram_entropy, texts.labels)
    return RunData(task="labelled-text", identity=identity, training=training, held_out=held_out, entropy=entropy)


def targets_entropy(dataset: Dataset) -> float:
    """Return the unigram entropy in nats of the targets that count in the first samples of a split."""
    counted: list[Tokens] = []
    for index in range(min(_ENTROPY_SAMPLES, dataset.samples_per_epoch)):
        targets = dataset.batch(index, 1)[1].numpy()
        counted.append(targets[targets != IGNORE_INDEX])
    return unigram_entropy(np.concatenate(counted))


class LastSamples:
    """The first `num_samples` of a split, then samples of which no target counts.

    So all plans evaluate the same samples, whatever their micro-batches are.
    """

    def __init__(self, dataset: Dataset, num_samples: int) -> None:
        self._dataset, self._num_samples = dataset, num_samples

    def batch(self, start: int, count: int) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], torch.Tensor]:
        inputs, targets = self._dataset.batch(start, count)
        targets[max(0, self._num_samples - start) :] = IGNORE_INDEX
        return inputs, targets


class _Counted:
    """A tokenizer whose every document counts as progress: tokenising may take long."""

    def __init__(self, tokenizer: Tokenizer, progress: Progress) -> None:
        self._tokenizer, self._progress = tokenizer, progress
        self.identity, self.vocab_size = tokenizer.identity, tokenizer.vocab_size
        self.end_of_document, self.id_of = tokenizer.end_of_document, tokenizer.id_of

    def encode(self, text: str) -> Tokens:
        self._progress.begin("tokenising the data")
        return self._tokenizer.encode(text)
