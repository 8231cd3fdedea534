"""The tokens of a run: one flat array of ids, made from text and cached, or read from a file of the user's own.

Made tokens are written once and memory-mapped; documents follow each other, each with its end token.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from meshwright.errors import UserError
from meshwright.files import read_spec, sha256, write_spec
from meshwright.runtime.data.order import Tokens
from meshwright.runtime.data.sources import Input, InputStat, documents, find_inputs, input_stat
from meshwright.runtime.data.tokenizer import Tokenizer
from meshwright.spec.base import NonNegativeInt, PositiveInt, Spec

DEFAULT_SUFFIXES = (".txt", ".md", ".jsonl")
_NUMPY, _BINARY = ".npy", {".bin": np.dtype("<u2"), ".u16": np.dtype("<u2"), ".u32": np.dtype("<u4")}
_CHUNK_TOKENS = 1 << 24


class TokenHeader(Spec):
    """What a token file holds. It is written after the tokens: where it is, they are whole."""

    schema_version: Literal[1] = 1
    inputs_sha256: str
    tokens_sha256: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: PositiveInt
    num_documents: PositiveInt
    largest_token: NonNegativeInt


class TokenFileHeader(Spec):
    """What was found in a token file of the user's own, so that it is read through once only."""

    schema_version: Literal[1] = 1
    tokens_sha256: str
    num_tokens: PositiveInt
    largest_token: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """A flat array of token ids on disk, memory-mapped."""

    header: TokenHeader | TokenFileHeader
    path: Path
    tokens: Tokens


class _Request(Spec):
    """All that decides the tokens: a change makes another file."""

    tokenizer: str
    inputs: tuple[InputStat, ...]


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
    inputs = find_inputs(sources, tuple(suffixes))
    request = _Request(tokenizer=tokenizer.identity, inputs=tuple(input_stat(file) for file in inputs))
    inputs_sha256 = sha256(request)
    stem = Path(cache_dir) / f"tokens-{inputs_sha256[:16]}"
    header_path, tokens_path = stem.with_suffix(".json"), stem.with_suffix(".bin")
    header = _read_header(header_path, tokens_path)
    if header is None:
        header = _write_tokens(inputs, tokenizer, inputs_sha256, tokens_path, vocab_size)
        write_spec(header, header_path)
    _check_vocabulary(header.largest_token, vocab_size)
    return TokenStore(header=header, path=tokens_path, tokens=np.memmap(tokens_path, header.dtype, mode="r"))


def is_token_file(source: str | Path) -> bool:
    """Return whether a source holds token ids instead of text, by its ending."""
    return Path(source).suffix in (_NUMPY, *_BINARY)


def open_token_file(path: str | Path, cache_dir: str | Path, *, vocab_size: int) -> TokenStore:
    """Return the tokens in a file of ids: `.npy` (one dimension), or bare `.u16`, `.u32` or `.bin` (which is uint16).

    It is memory-mapped where it lies. What it holds is noted in `cache_dir`, by its name, size and modification time.
    """
    path = Path(path)
    tokens = _map_file(path)
    inputs_sha256 = sha256(input_stat(Input(path=path, label=str(path.absolute()))))
    header_path = Path(cache_dir) / f"tokens-{inputs_sha256[:16]}.json"
    try:
        header = read_spec(TokenFileHeader, header_path) if header_path.exists() else None
    except OSError as error:
        raise UserError(f"{cache_dir}: cannot be read: {error.strerror}; choose another folder") from None
    if header is None:
        header = _read_through(tokens, path)
        write_spec(header, header_path)
    _check_vocabulary(header.largest_token, vocab_size)
    return TokenStore(header=header, path=path, tokens=tokens)


def _map_file(path: Path) -> Tokens:
    try:
        if path.suffix == _NUMPY:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            dtype = _BINARY[path.suffix]
            num_bytes = path.stat().st_size
            if num_bytes == 0 or num_bytes % dtype.itemsize:
                raise UserError(f"data: {path}: {num_bytes} bytes are no {dtype.name} tokens; .u32 means uint32")
            tokens = np.memmap(path, dtype, mode="r")
    except FileNotFoundError:
        raise UserError(f"data: {path}: no such file or folder") from None
    except (ValueError, EOFError) as error:  # no array, a pickle, or cut short
        raise UserError(f"data: {path}: not a .npy array: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UserError(f"data: {path}: cannot be read: {error.strerror}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        shape = " x ".join(map(str, tokens.shape))
        raise UserError(f"data: {path}: tokens must be one row of integers, not {shape} of {tokens.dtype}")
    return tokens


def _read_through(tokens: Tokens, path: Path) -> TokenFileHeader:
    digest = hashlib.sha256()
    largest = 0
    for chunk in _chunks(tokens):
        if chunk.min() < 0:
            raise UserError(f"data: {path}: token id {chunk.min()} is below 0")
        digest.update(np.ascontiguousarray(chunk, "<u4").tobytes())  # the same tokens are the same in any file
        largest = max(largest, int(chunk.max()))
    return TokenFileHeader(tokens_sha256=digest.hexdigest(), num_tokens=len(tokens), largest_token=largest)


def _chunks(tokens: Tokens) -> Iterator[Tokens]:
    return (tokens[start : start + _CHUNK_TOKENS] for start in range(0, len(tokens), _CHUNK_TOKENS))


def unigram_entropy(tokens: Tokens) -> float:
    """Return the entropy in nats of the token frequencies: the loss of the best model without context."""
    if not len(tokens):
        raise UserError("data: no tokens, so there is no entropy")
    counts = np.zeros(0, np.int64)
    for chunk in _chunks(tokens):
        more = np.bincount(chunk.astype(np.int64), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


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
    inputs: Iterable[Input], tokenizer: Tokenizer, inputs_sha256: str, path: Path, vocab_size: int
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
    inputs: Iterable[Input], tokenizer: Tokenizer, inputs_sha256: str, out: IO[bytes], vocab_size: int
) -> TokenHeader:
    """Write the tokens of each document to `out`. A wrong tokenizer shows at its first token, not after hours."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= np.iinfo(np.uint16).max + 1 else "uint32"
    digest = hashlib.sha256()
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    num_documents = num_tokens = largest = 0
    for document in documents(inputs):
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
