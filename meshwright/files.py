"""Read and write spec types: YAML for what people write, JSON for what the tool writes.

Files are strict (unknown keys, wrong types and non-finite numbers are errors that name the key)
and canonical (sorted keys, no time stamps), so equal values are equal bytes and can be hashed.
A file is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from meshwright.errors import UserError

T = TypeVar("T", bound=BaseModel)
_YAML_ENDINGS = {".yaml", ".yml"}
_MAX_VALUE_CHARS = 60


class _Loader(yaml.SafeLoader):
    """Reads 3e-4 as a number, as YAML 1.2 does; the YAML 1.1 of PyYAML wants 3.0e-4 and takes the rest for text."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType] PyYAML has no annotations
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


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
    text = read_text(path)
    try:
        return yaml.load(text, _Loader) if path.suffix in _YAML_ENDINGS else json.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "YAML" if path.suffix in _YAML_ENDINGS else "JSON"
        raise UserError(f"{path}: not readable as {kind}: {_one_line(error)}") from None


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects in a file of one JSON object a line. Raises UserError that names the line."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number}: not readable as JSON: {_one_line(error)}") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number}: is not a JSON object")
        records.append(cast("dict[str, Any]", record))
    return records


def read_text(path: str | Path) -> str:
    """Return the text of `path`, or raise UserError that says why not."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a UTF-8 text file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one."""
    path = Path(path)
    temporary = None
    try:
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


def from_data(kind: type[T], data: Any, *, where: str) -> T:
    """Return plain `data` as a `kind`; `where` names its origin in the error line."""
    if isinstance(data, dict) and "schema_version" in kind.model_fields:
        _check_schema_version(kind, cast("dict[str, Any]", data).get("schema_version"), where)
    try:
        # Through JSON text, because only then does strict mode take lists for tuples.
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error)}") from None
    except (TypeError, ValueError, RecursionError) as error:
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
    field = _field(first["loc"])
    reason = str(first["msg"]).removeprefix("Value error, ")
    line = f"{field}: {reason}" if field else reason
    if first["type"] == "extra_forbidden":
        line = f"{field}: unknown key"
    elif first["type"] == "missing":
        line = f"{field}: required, but missing"
    elif first["type"] != "value_error" and not isinstance(first["input"], dict | list | BaseModel):
        line += f", not {_shorten(first['input'])}"
    if len(problems) > 1:
        line += f" (and {len(problems) - 1} more)"
    return line


def _check_schema_version(kind: type[BaseModel], given: Any, where: str) -> None:
    known = kind.model_fields["schema_version"].default
    if isinstance(given, int) and given > known:
        raise UserError(
            f"{where}: schema_version: {given} is newer than this meshwright reads ({known}); upgrade meshwright"
        )


def _field(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
