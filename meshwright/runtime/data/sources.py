"""The text files that a run's sources are, and the documents in them."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.files import read_text
from meshwright.spec.base import NonNegativeInt, Spec

STDLIB = "stdlib"
_STDLIB_MAX_BYTES = 8_000_000
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written when Python was built, so they differ by machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A text file, and what it is called whatever folder its source lies in."""

    path: Path
    label: str


class InputStat(Spec):
    """What tells whether a file has changed."""

    label: str
    size_bytes: NonNegativeInt
    modified_ns: int


def find_inputs(sources: Sequence[str | Path], suffixes: tuple[str, ...]) -> list[Input]:
    """Return the text files of `sources`, in order. Raises UserError for what is not there."""
    if not sources:
        raise UserError("data: no sources; give text files, .jsonl files, folders or stdlib")
    inputs: list[Input] = []
    for source in sources:
        if not str(source):
            raise UserError("data: '' is not a source; give a text file, a .jsonl file, a folder or stdlib")
        try:
            inputs += _stdlib_inputs() if str(source) == STDLIB else _inputs_of(Path(source), suffixes)
        except OSError as error:
            raise UserError(f"data: {source}: cannot be read: {error.strerror}") from None
    return inputs


def _inputs_of(path: Path, suffixes: tuple[str, ...]) -> list[Input]:
    if path.is_dir():
        found = [Input(path=file, label=label) for label, file in _files_below(path) if file.suffix in suffixes]
        if not found:
            raise UserError(f"data: {path}: no file in this folder ends in {', '.join(suffixes)}")
        return found
    if not path.exists():
        raise UserError(f"data: {path}: no such file or folder")
    return [Input(path=path, label=path.name)]


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


def _stdlib_inputs() -> list[Input]:
    inputs: list[Input] = []
    num_bytes = 0
    for label, path in _files_below(Path(sysconfig.get_path("stdlib")), _STDLIB_SKIPPED):
        if path.suffix != ".py" or any(part.startswith(_STDLIB_SKIPPED_PREFIXES) for part in label.split("/")):
            continue
        num_bytes += path.stat().st_size
        if num_bytes > _STDLIB_MAX_BYTES:
            break
        inputs.append(Input(path=path, label=label))
    if not inputs:
        raise UserError("data: stdlib: this Python has no library sources; give text files instead")
    return inputs


def input_stat(file: Input) -> InputStat:
    """Return what tells whether a file has changed."""
    try:
        stat = file.path.stat()
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror}") from None
    return InputStat(label=file.label, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)


def documents(inputs: Iterable[Input]) -> Iterator[str]:
    """Yield each document: a text file, or a line of a `.jsonl` file."""
    for file in inputs:
        if file.path.suffix == ".jsonl":
            yield from (text_of(record, where) for where, record in read_records(file.path))
        else:
            yield read_text(file.path)


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield where it stands and the JSON of each line of a `.jsonl` file, without reading the file as a whole."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}: line {number}"
                    yield where, _record_of(line, where)
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _record_of(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {' '.join(str(error).split())}") from None


def text_of(record: Any, where: str) -> str:
    """Return the field "text" of a record, or raise UserError that says `where` it lacks."""
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where}: needs an object with a field "text" that holds a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: text holds half a surrogate pair, which is no Unicode character") from None
    return text
