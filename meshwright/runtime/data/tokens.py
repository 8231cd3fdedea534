"""Training data as one global sequence of samples that knows nothing of plans or ranks.

Sample i is the same on every plan and any number of ranks: a step takes the samples
step * global_batch_size .. (step + 1) * global_batch_size - 1, and each rank asks for its slice.

Text becomes one flat array of token ids, written once and memory-mapped. Its last
`held_out_fraction` is the held-out split, cut off the stream as a whole, so that no held-out token
is ever trained on. A split is cut into windows of seq_len tokens and the token after them;
neighbouring windows share that one token, so that every token but the first is a target once an
epoch. Each epoch visits the windows in an order drawn from (seed, epoch).
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import UserError
from meshwright.files import is_folder, read_spec, read_text, sha256, write_spec
from meshwright.spec.base import NonNegativeInt, PositiveInt, Spec

Split = Literal["train", "held_out"]
Tokens = NDArray[np.integer[Any]]

IGNORE_INDEX = -100  # the target that torch's cross-entropy leaves out by default
STDLIB = "stdlib"
DEFAULT_SUFFIXES = (".txt", ".md", ".jsonl")
DEFAULT_HELD_OUT_FRACTION = 0.05
_STDLIB_MAX_BYTES = 8_000_000
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written when Python was built, so they differ by machine
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>")
_KEPT_EPOCHS = 2
_ENTROPY_CHUNK = 1 << 24


class Tokenizer(Protocol):
    """Text to token ids. `identity` changes when the ids would; `end_of_document` follows every document."""

    @property
    def identity(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int | None: ...
    def encode(self, text: str) -> Tokens: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; id 0, which text does not hold, ends a document."""

    identity = "bytes-1"
    vocab_size = 256
    end_of_document: int | None = 0

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8)


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers package, without its own start and end tokens."""

    def __init__(self, path: str | Path) -> None:
        text = read_text(path)
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{path}: needs the tokenizers package; pip install 'meshwright[train]'") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise UserError(f"{path}: not a tokenizer.json: {' '.join(str(error).split())}") from None
        self.identity = "file-" + hashlib.sha256(text.encode()).hexdigest()
        # The largest id counts, not the number of entries: ids may have gaps.
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        ends = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        self.end_of_document: int | None = next((end for end in ends if end is not None), None)

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Return the tokenizer that `bytes`, the path of a `tokenizer.json` or its folder means."""
    if str(name_or_path) == "bytes":
        return ByteTokenizer()
    path = Path(name_or_path)
    return FileTokenizer(path / "tokenizer.json" if is_folder(path) else path)


class TokenHeader(Spec):
    """What a token file holds. It is written after the tokens: where it is, they are whole."""

    schema_version: Literal[1] = 1
    inputs_sha256: str
    tokens_sha256: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: PositiveInt
    num_documents: PositiveInt
    largest_token: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """A flat array of token ids on disk, memory-mapped."""

    header: TokenHeader
    path: Path
    tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """A text file, and what it is called whatever folder its source lies in."""

    path: Path
    label: str


class _InputStat(Spec):
    label: str
    size_bytes: NonNegativeInt
    modified_ns: int


class _Request(Spec):
    """All that decides the tokens: a change makes another file."""

    tokenizer: str
    inputs: tuple[_InputStat, ...]


def build_tokens(
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    *,
    vocab_size: int,
    suffixes: Sequence[str] = DEFAULT_SUFFIXES,
) -> TokenStore:
    """Return the tokens of `sources`, from `cache_dir` or newly made there.

    A source is a text file (one document), a `.jsonl` file (one document a line, in its field
    "text"), a folder (its files with one of `suffixes`, recursively, in the order of their names)
    or "stdlib" (the running Python's own library, about 8 MB). An input counts as changed when its
    name, size or modification time does; changed inputs get a new file and the old one stays.

    The files appear whole or not at all. With several ranks let rank 0 call this first, then pass
    a barrier, then let the others call it. `vocab_size` is the model's: an id that it does not
    have raises UserError, as does data that is missing, empty or not text.
    """
    inputs = _find_inputs(sources, tuple(suffixes))
    request = _Request(tokenizer=tokenizer.identity, inputs=tuple(_stat(file) for file in inputs))
    inputs_sha256 = sha256(request)
    stem = Path(cache_dir) / f"tokens-{inputs_sha256[:16]}"
    header_path, tokens_path = stem.with_suffix(".json"), stem.with_suffix(".bin")
    header = _read_header(header_path, tokens_path)
    if header is None:
        header = _write_tokens(inputs, tokenizer, inputs_sha256, tokens_path, vocab_size)
        write_spec(header, header_path)
    _check_vocabulary(header.largest_token, vocab_size)
    return TokenStore(header=header, path=tokens_path, tokens=np.memmap(tokens_path, header.dtype, mode="r"))


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
        if seq_len < 1:
            raise UserError(f"seq_len: must be at least 1, not {seq_len}")
        if seed < 0:
            raise UserError(f"seed: must be at least 0, not {seed}")
        self._tokens = _split_tokens(tokens, split, held_out_fraction)
        if len(self._tokens) <= seq_len:
            raise UserError(
                f"data: the {split} split has {len(self._tokens)} tokens, "
                f"but one sample of seq_len {seq_len} needs {seq_len + 1}; give more text, or plan shorter samples"
            )
        self._seq_len = seq_len
        self._seed = seed
        self._end_of_document = end_of_document
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def samples_per_epoch(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def sample(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets, int64 [seq_len] each, of global sample `index`."""
        inputs, targets = self.batch(index, 1)
        return inputs[0], targets[0]

    def batch(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets, int64 [count, seq_len], of global samples start .. start + count - 1."""
        windows = np.empty((count, self._seq_len + 1), np.int64)
        for row in range(count):
            first = self._window(start + row) * self._seq_len
            windows[row] = self._tokens[first : first + self._seq_len + 1]
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        if self._end_of_document is not None:
            targets[inputs == self._end_of_document] = IGNORE_INDEX
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _window(self, index: int) -> int:
        if index < 0:
            raise IndexError(f"sample {index} is before the first")
        epoch, position = divmod(index, self.samples_per_epoch)
        if epoch not in self._orders:
            if len(self._orders) >= _KEPT_EPOCHS:
                del self._orders[next(iter(self._orders))]
            order = np.random.default_rng([self._seed, epoch]).permutation(self.samples_per_epoch)
            self._orders[epoch] = order.astype(np.int64)
        return int(self._orders[epoch][position])


def unigram_entropy(tokens: Tokens) -> float:
    """Return the entropy in nats of the token frequencies: the loss of the best model without context."""
    if not len(tokens):
        raise UserError("data: no tokens, so there is no entropy")
    counts = np.zeros(0, np.int64)
    for start in range(0, len(tokens), _ENTROPY_CHUNK):
        chunk = np.bincount(tokens[start : start + _ENTROPY_CHUNK], minlength=len(counts))
        chunk[: len(counts)] += counts
        counts = chunk
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def _split_tokens(tokens: Tokens, split: Split, held_out_fraction: float) -> Tokens:
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held_out_fraction: must be at least 0 and below 1, not {held_out_fraction}")
    cut = len(tokens) - round(len(tokens) * held_out_fraction)
    return tokens[:cut] if split == "train" else tokens[cut:]


def _find_inputs(sources: Sequence[str | Path], suffixes: tuple[str, ...]) -> list[_Input]:
    if not sources:
        raise UserError("data: no sources; give text files, .jsonl files, folders or stdlib")
    inputs: list[_Input] = []
    for source in sources:
        if not str(source):
            raise UserError("data: '' is not a source; give a text file, a .jsonl file, a folder or stdlib")
        try:
            inputs += _stdlib_inputs() if str(source) == STDLIB else _inputs_of(Path(source), suffixes)
        except OSError as error:
            raise UserError(f"data: {source}: cannot be read: {error.strerror}") from None
    return inputs


def _inputs_of(path: Path, suffixes: tuple[str, ...]) -> list[_Input]:
    if path.is_dir():
        found = [_Input(path=file, label=label) for label, file in _files_below(path) if file.suffix in suffixes]
        if not found:
            raise UserError(f"data: {path}: no file in this folder ends in {', '.join(suffixes)}")
        return found
    if not path.exists():
        raise UserError(f"data: {path}: no such file or folder")
    return [_Input(path=path, label=path.name)]


def _files_below(folder: Path, skipped: Container[str] = ()) -> list[tuple[str, Path]]:
    """Return (relative name, path) of all files below `folder` that lie in no `skipped` folder, by name.

    The order of names, not of the file system, so that it is the same on every machine.
    """
    found: list[tuple[str, Path]] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        for path in (Path(root) / name for name in names):
            if path.is_file():
                found.append((path.relative_to(folder).as_posix(), path))
    return sorted(found)


def _stdlib_inputs() -> list[_Input]:
    inputs: list[_Input] = []
    num_bytes = 0
    for label, path in _files_below(Path(sysconfig.get_path("stdlib")), _STDLIB_SKIPPED):
        if path.suffix != ".py" or any(part.startswith(_STDLIB_SKIPPED_PREFIXES) for part in label.split("/")):
            continue
        num_bytes += path.stat().st_size
        if num_bytes > _STDLIB_MAX_BYTES:
            break
        inputs.append(_Input(path=path, label=label))
    if not inputs:
        raise UserError("data: stdlib: this Python has no library sources; give text files instead")
    return inputs


def _stat(file: _Input) -> _InputStat:
    try:
        stat = file.path.stat()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror}") from None
    return _InputStat(label=file.label, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)


def _read_header(header_path: Path, tokens_path: Path) -> TokenHeader | None:
    """Return the header of a token file that is there and as long as it says, else None."""
    try:
        if not header_path.exists() or not tokens_path.exists():
            return None
        header = read_spec(TokenHeader, header_path)
        num_bytes = header.num_tokens * np.dtype(header.dtype).itemsize
        return header if tokens_path.stat().st_size == num_bytes else None
    except OSError as error:
        raise UserError(f"{header_path.parent}: cannot be read: {error.strerror}; choose another folder") from None


def _check_vocabulary(largest_token: int, vocab_size: int) -> None:
    if largest_token >= vocab_size:
        raise UserError(
            f"data: token id {largest_token} is not below the model's vocab_size ({vocab_size}); "
            "use the model's own tokenizer"
        )


def _write_tokens(
    inputs: Iterable[_Input], tokenizer: Tokenizer, inputs_sha256: str, path: Path, vocab_size: int
) -> TokenHeader:
    """Write the tokens of `inputs` to `path`, atomically, and return their header."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as out:
            temporary = Path(out.name)
            header = _append_documents(inputs, tokenizer, inputs_sha256, out.file, vocab_size)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return header


def _append_documents(
    inputs: Iterable[_Input], tokenizer: Tokenizer, inputs_sha256: str, out: IO[bytes], vocab_size: int
) -> TokenHeader:
    """Write the tokens of each document to `out`. A wrong tokenizer shows at its first token, not after hours."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= np.iinfo(np.uint16).max + 1 else "uint32"
    digest = hashlib.sha256()
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    num_documents = num_tokens = largest = 0
    for document in _documents(inputs):
        tokens = tokenizer.encode(document)
        if not len(tokens):
            continue
        tokens = np.concatenate([tokens, end]).astype(dtype)
        largest = max(largest, int(tokens.max()))
        _check_vocabulary(largest, vocab_size)
        data = tokens.tobytes()
        out.write(data)
        digest.update(data)
        num_documents += 1
        num_tokens += len(tokens)
    if not num_tokens:
        raise UserError("data: the sources hold no text")
    return TokenHeader(
        inputs_sha256=inputs_sha256,
        tokens_sha256=digest.hexdigest(),
        dtype=dtype,
        num_tokens=num_tokens,
        num_documents=num_documents,
        largest_token=largest,
    )


def _documents(inputs: Iterable[_Input]) -> Iterator[str]:
    for file in inputs:
        if file.path.suffix == ".jsonl":
            yield from _jsonl_documents(file.path)
        else:
            yield read_text(file.path)


def _jsonl_documents(path: Path) -> Iterator[str]:
    """Yield the field "text" of each line, without reading the file as a whole."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, f"{path}: line {number}")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {' '.join(str(error).split())}") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where}: needs an object with a field "text" that holds a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: text holds half a surrogate pair, which is no Unicode character") from None
    return text
