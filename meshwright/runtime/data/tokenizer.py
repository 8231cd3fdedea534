"""Text to token ids: bytes, or a tokenizer of the tokenizers package read from its file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from meshwright.errors import UserError
from meshwright.files import is_folder, read_data, read_text
from meshwright.runtime.data.order import Tokens

BYTES = "bytes"
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
_WORD_PIECES = "vocab.txt"
_UNKNOWN = "[UNK]"


class Tokenizer(Protocol):
    """Text to token ids. `identity` changes when the ids would; `end_of_document` follows every document."""

    @property
    def identity(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int | None: ...
    def encode(self, text: str) -> Tokens: ...
    def id_of(self, *names: str) -> int | None:
        """Return the id of the first special token of these names that there is."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255; id 0, which text does not hold, ends a document."""

    identity = "bytes-1"
    vocab_size = 256
    end_of_document: int | None = 0

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), np.uint8)

    def id_of(self, *names: str) -> int | None:
        return None


class FileTokenizer:
    """A `tokenizer.json`, or a `vocab.txt` of word pieces, without its own start and end tokens."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        text = read_text(path)
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"{path}: needs the tokenizers package; pip install 'meshwright[train]'") from None
        self._tokenizer: Any
        if path.name == _WORD_PIECES:
            lowercase = _lowercases(path.parent)
            self._tokenizer = _word_pieces(tokenizers, text, path, lowercase=lowercase)
            text += f"\nlowercase {lowercase}"
        else:
            try:
                self._tokenizer = tokenizers.Tokenizer.from_str(text)
            except Exception as error:  # the package raises bare Exception
                raise UserError(f"{path}: not a tokenizer.json: {' '.join(str(error).split())}") from None
        # A tokenizer.json may say that texts are cut or padded: here documents stay whole.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # 2: [SEP] ends documents too. 3: documents are never cut.
        self.identity = "file-3-" + hashlib.sha256(text.encode()).hexdigest()
        # The largest id counts, not the number of entries: ids may have gaps.
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.end_of_document: int | None = self.id_of(*_END_NAMES)

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def id_of(self, *names: str) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((found for found in ids if found is not None), None)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Return the tokenizer that `bytes`, the path of a `tokenizer.json` or `vocab.txt`, or their folder means."""
    if str(name_or_path) == BYTES:
        return ByteTokenizer()
    path = Path(name_or_path)
    if not is_folder(path):
        return FileTokenizer(path)
    has_pieces_only = (path / _WORD_PIECES).exists() and not (path / "tokenizer.json").exists()
    return FileTokenizer(path / (_WORD_PIECES if has_pieces_only else "tokenizer.json"))


def _lowercases(folder: Path) -> bool:
    """Return what the `tokenizer_config.json` beside a vocab.txt says of lower case; by default it is wanted."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return True
    config = read_data(path)
    lowercase = config.get("do_lower_case", True) if isinstance(config, dict) else None
    if not isinstance(lowercase, bool):
        raise UserError(f"{path}: do_lower_case must be true or false, not {lowercase!r}")
    return lowercase


def _word_pieces(tokenizers: ModuleType, text: str, path: Path, *, lowercase: bool) -> Any:
    """Return BERT's tokenizer for a vocabulary of one word piece a line."""
    pieces = text.removesuffix("\n").split("\n")
    vocabulary = {piece.removesuffix("\r"): number for number, piece in enumerate(pieces)}
    if _UNKNOWN not in vocabulary:
        raise UserError(f"{path}: has no line {_UNKNOWN}, so it is no vocabulary of word pieces")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token=_UNKNOWN))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    specials = [name for name in ("[PAD]", _UNKNOWN, "[CLS]", "[SEP]", "[MASK]") if name in vocabulary]
    made.add_special_tokens(specials)
    return made
