"""Read and write spec types: YAML for what people write, JSON for what the tool writes.

Files are strict (unknown keys, wrong types and non-finite numbers are errors that name the key)
and canonical (sorted keys, no time stamps), so equal values are equal bytes and can be hashed.
A file is written whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from meshwright.errors import UserError

T = TypeVar("T", bound=BaseModel)
_YAML_ENDINGS = {".yaml", ".yml"}
_MAX_VALUE_CHARS = 60
_SAY_WHAT_WAS_GIVEN = {"value_error", "json_invalid", "union_tag_invalid"}  # errors of pydantic
_BYTE_ORDER_MARK = "\ufeff"


class _Loader(yaml.SafeLoader):
    """Reads plain data only: no aliases, no key twice, and a date is text.

    A few lines of aliases can stand for more data than memory holds. 3e-4 is a number, as in YAML
    1.2; the YAML 1.1 of PyYAML wants 3.0e-4 and takes the rest for text.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        events: Any = self  # PyYAML has no annotations
        if events.check_event(yaml.AliasEvent):
            event = events.peek_event()
            raise yaml.MarkedYAMLError(problem="an alias is not supported; write it out", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key {name!r} is there twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType] PyYAML has no annotations
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_spec(kind: type[T], path: str | Path) -> T:
    """Return the `kind` that the YAML or JSON file `path` holds. Raises UserError in one line."""
    return from_data(kind, read_data(path), where=str(path))


def write_spec(value: BaseModel, path: str | Path) -> None:
    """Write `value` to `path` as canonical JSON (or YAML by its ending), atomically."""
    text = canonical_json(value)
    if Path(path).suffix in _YAML_ENDINGS:
        text = yaml.dump(json.loads(text), Dumper=_Dumper, sort_keys=False)
    write_text(path, text)


def read_data(path: str | Path) -> Any:
    """Return the plain data in the YAML or JSON file `path`."""
    path = Path(path)
    text = read_text(path).removeprefix(_BYTE_ORDER_MARK)
    try:
        return yaml.load(text, _Loader) if path.suffix in _YAML_ENDINGS else _from_json(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "YAML" if path.suffix in _YAML_ENDINGS else "JSON"
        raise UserError(f"{path}: not readable as {kind}: {_one_line(error)}") from None


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects in a file of one JSON object a line. Raises UserError that names the line."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            record = _from_json(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number}: not readable as JSON: {_one_line(error)}") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number}: is not a JSON object")
        records.append(cast("dict[str, Any]", record))
    return records


def read_text(path: str | Path) -> str:
    """Return the text of `path`, or raise UserError that says why not."""
    path = Path(path)
    try:
        if stat.S_ISCHR(path.stat().st_mode) or stat.S_ISBLK(path.stat().st_mode):
            raise UserError(f"{path}: is a device, not a file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder that can be reached. What cannot is told by whoever reads it."""
    try:
        return path.is_dir()
    except OSError:  # too long for a name, or below a folder that is closed to us
        return False


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one."""
    path = Path(path)
    temporary = None
    try:
        path = path.resolve()  # what a link leads to is written, not the link replaced
        _refuse_special(path)
        _refuse_read_only(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as out:
            temporary = Path(out.name)
            out.write(text)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def put_folder(partial: Path, path: Path, replaced: Path) -> None:
    """Rename the folder `partial` to `path`; an older one there is `replaced` and goes only after that."""
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def check_writable(path: str | Path) -> None:
    """Raise UserError when a file cannot be written at `path`: to be asked before long work, so that it is not lost."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _refuse_special(path)
        _refuse_read_only(path)
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def from_data(kind: type[T], data: Any, *, where: str) -> T:
    """Return plain `data` as a `kind`; `where` names its origin in the error line."""
    if isinstance(data, dict):
        fields = cast("dict[Any, Any]", data)
        if "schema_version" in kind.model_fields:
            _check_schema_version(kind, fields.get("schema_version"), where)
        _refuse_another_kind(kind, fields, where)
    try:
        # Through JSON text, because only then does strict mode take lists for tuples.
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error)}") from None
    except TypeError as error:
        raise UserError(f"{where}: holds more than text, numbers, lists and objects ({_one_line(error)})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {_one_line(error)}") from None


def make_spec(kind: type[T], **fields: Any) -> T:
    """Return a `kind` with these fields, or raise UserError that names the first bad one."""
    try:
        return kind(**fields)
    except ValidationError as error:
        raise UserError(explain(error)) from None


def canonical_json(value: BaseModel) -> str:
    """Return `value` as JSON text with sorted keys: equal values give equal text."""
    return json.dumps(value.model_dump(mode="json"), indent=2, sort_keys=True, allow_nan=False) + "\n"


def sha256(*values: BaseModel | None) -> str:
    """Return one hash over the canonical JSON of `values`."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(b"-" if value is None else canonical_json(value).encode())
    return digest.hexdigest()


def explain(error: ValidationError) -> str:
    """Return a pydantic error as one line: field, reason, what was given."""
    problems = error.errors(include_url=False)
    first = problems[0]
    field = _field(first["loc"], is_user_key=first["type"] == "extra_forbidden")
    reason = str(first["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    line = f"{field}: {reason}" if field else reason
    if first["type"] == "extra_forbidden":
        line = f"{field}: unknown key"
    elif first["type"] == "missing":
        line = f"{field}: required, but missing"
    elif first["type"] not in _SAY_WHAT_WAS_GIVEN:
        line += f", not {shorten(first['input'])}"
    if len(problems) > 1:
        line += f" (and {len(problems) - 1} more)"
    return line


def _check_schema_version(kind: type[BaseModel], given: Any, where: str) -> None:
    known = kind.model_fields["schema_version"].default
    if isinstance(given, int) and given > known:
        raise UserError(
            f"{where}: schema_version: {given} is newer than this meshwright reads ({known}); upgrade meshwright"
        )


def _refuse_another_kind(kind: type[BaseModel], data: dict[Any, Any], where: str) -> None:
    """Raise UserError when `data` is the content of quite another file: it has none of the keys that a `kind` must."""
    needed = [name for name, field in kind.model_fields.items() if field.is_required()]
    if len(needed) > 1 and data and not any(name in data for name in needed):
        raise UserError(f"{where}: is another kind of file: it has none of the keys {', '.join(needed)}")


def _field(location: tuple[int | str, ...], *, is_user_key: bool) -> str:
    """Return the place of an error, without the names that pydantic gives to the choices of a union.

    The last name is as the user wrote it when the key itself is what is wrong.
    """
    text = ""
    for position, part in enumerate(location, start=1):
        if isinstance(part, int):
            text += f"[{part}]"
        elif (part.isidentifier() and part.islower()) or (is_user_key and position == len(location)):
            text += f".{part}"
    return text.removeprefix(".")


def shorten(value: Any) -> str:
    """Return what was given, for an error line: short, whatever it is."""
    if isinstance(value, dict | BaseModel):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _from_json(text: str) -> Any:
    """Return the data in JSON `text`. A key that is there twice is an error, since one of its values would be lost."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in pairs:
            if name in data:
                raise ValueError(f"key {name!r} is there twice")
            data[name] = value
        return data

    return json.loads(text, object_pairs_hook=once)


def _refuse_special(path: Path) -> None:
    """Raise OSError for a device, pipe or socket, which a file in its place would destroy."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file")


def _refuse_read_only(path: Path) -> None:
    """Raise when `path` is a file that nobody may write: replacing it would be possible, but not meant."""
    if path.exists() and not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EACCES, "it is marked read-only")


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        text = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    text = text.partition("; use sys.set_int_max_str_digits")[0]  # Python's advice to programmers
    return " ".join(text.split()) or type(error).__name__


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
