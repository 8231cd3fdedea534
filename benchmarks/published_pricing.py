"""What the cost model says of published records: seconds, bytes of the rank that was measured, need of device memory.

Constants are the shipped ones, or, for leave-one-group-out figures, those of `data/constants_logo.json` and
`data/memory_logo.json`: fitted without the record's own source group. For a group that no file knows the shipped
constants are held out already.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from published_records import FILTERS, Record
from published_statistics import Fit

from meshwright.cost.run_memory import run_memory
from meshwright.cost.run_time import run_time
from meshwright.errors import UserError
from meshwright.files import from_data
from meshwright.spec.constants import Constants, shipped_constants
from meshwright.spec.memory import MemoryConstants, shipped_memory

LOGO_FILE = Path(__file__).parent / "data" / "constants_logo.json"
LOGO_MEMORY_FILE = LOGO_FILE.with_name("memory_logo.json")


@dataclass(frozen=True)
class Priced:
    """One record with its predictions; None where it has no run or could not be priced, and then `problem` says why.

    `memory_bytes` is of the kind and rank that were measured, `device_bytes` what the fullest device needs in all.
    """

    record: Record
    time_s: float | None = None
    held_out_time_s: float | None = None
    memory_bytes: float | None = None
    held_out_memory_bytes: float | None = None
    device_bytes: float | None = None
    problem: str | None = None

    @property
    def time_error(self) -> float | None:
        return _error(self.time_s, self.record.iter_time_s)

    @property
    def held_out_time_error(self) -> float | None:
        return _error(self.held_out_time_s, self.record.iter_time_s)

    @property
    def memory_error(self) -> float | None:
        """Return the error against the middle of the readings of the printed value."""
        return _error(self.memory_bytes, self.record.memory_bytes)

    @property
    def held_out_memory_error(self) -> float | None:
        return _error(self.held_out_memory_bytes, self.record.memory_bytes)

    @property
    def memory_range_error(self) -> float | None:
        """Return the error against the nearest reading of the printed value: 0 inside the range."""
        if self.memory_bytes is None or self.record.memory_bytes_range is None:
            return None
        low, high = self.record.memory_bytes_range
        return self.memory_bytes / min(max(self.memory_bytes, low), high) - 1

    @property
    def share(self) -> float | None:
        """Return the need of memory as a share of what the device nominally has."""
        if self.device_bytes is None or self.record.run is None:
            return None
        return self.device_bytes / self.record.run.cluster.device.memory_bytes


def price_all(records: Iterable[Record]) -> list[Priced]:
    """Return every record with its predictions."""
    return [price(record) for record in records]


def price(record: Record) -> Priced:
    """Return the predictions for one record."""
    if record.run is None:
        return Priced(record, problem=record.skipped)
    shipped, held_out = shipped_constants(), held_out_constants(record.group)
    kind = record.memory_kind
    has_memory = kind is not None and record.memory_bytes_range is not None
    try:
        return Priced(
            record,
            time_s=run_time(record.run, shipped).step_s,
            held_out_time_s=run_time(record.run, held_out).step_s,
            memory_bytes=_memory_bytes(record, shipped_memory()) if has_memory else None,
            held_out_memory_bytes=_memory_bytes(record, held_out_memory(record.group)) if has_memory else None,
            device_bytes=run_memory(record.run, "device", held_out_memory(record.group)).peak_bytes,
        )
    except (UserError, ArithmeticError, ValueError, LookupError) as error:  # one odd record must not end the report
        return Priced(record, problem=f"not priced: {error}")


@cache
def held_out_constants(group: str) -> Constants:
    """Return the constants that were fitted without `group`."""
    values = _held_out_values(LOGO_FILE).get(group)
    if values is None:
        return shipped_constants()
    if "devices" in values:
        return from_data(Constants, dict(values), where=f"{LOGO_FILE.name}: {group}")
    from fit_constants import with_values  # the file may hold only what was fitted

    return with_values(shipped_constants(), values)


@cache
def held_out_memory(group: str) -> MemoryConstants:
    """Return the constants of memory that were fitted without `group`."""
    values = _held_out_values(LOGO_MEMORY_FILE).get(group)
    if values is None:
        return shipped_memory()
    known = {name: value for name, value in values.items() if name in MemoryConstants.model_fields}
    return shipped_memory().model_copy(update=known)


def has_held_out_constants() -> bool:
    """Return whether leave-one-group-out constants are there at all."""
    return bool(_held_out_values(LOGO_FILE))


@cache
def _held_out_values(file: Path) -> Mapping[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _memory_bytes(record: Record, constants: MemoryConstants) -> float:
    assert record.run is not None
    assert record.memory_kind is not None
    found = run_memory(record.run, record.memory_kind, constants)
    stages = [stage.total_bytes for stage in found.stages]
    match record.memory_rank:
        case "first":
            return stages[0]
        case "last":
            return stages[-1]
        case "ends":
            return max(stages[0], stages[-1])
        case _:
            return max(stages)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def fits_of(priced: Iterable[Priced]) -> list[Fit]:
    """Return the need of memory of every dense run that is known to fit, or not to."""
    found = []
    for one in priced:
        raw, norm = one.record.raw, one.record.raw["norm"]
        is_known = (
            one.record.kind == "end_to_end"
            and raw["trust"] in ("A", "B")
            and raw["primary"]
            and norm["recompute_known"]
            and norm["degrees_multiply_to_gpus"]
            and (norm["plan_complete"] or one.record.is_oom)
            and not raw["model"]["n_experts"]
        )
        if is_known and one.share is not None:
            found.append(Fit(one.record.id, one.share, one.record.is_oom))
    return found


def matches(record: Record, expression: str) -> bool:
    """Return whether `record` is chosen by `expression`: a subset (T1) or field=pattern; a leading ! turns it round."""
    if expression.startswith("!"):
        return not matches(record, expression[1:])
    if expression in FILTERS:
        return FILTERS[expression](record.raw)
    field, separator, pattern = expression.partition("=")
    values = {"id": record.id, "group": record.group, "gpu": record.gpu, "kind": record.kind}
    values["framework"] = record.run.framework if record.run else ""
    values["device"] = record.run.cluster.device.name if record.run else ""
    if not separator or field not in values:
        known = ", ".join((*FILTERS, *(f"{name}=PATTERN" for name in values)))
        raise UserError(f"--filter {expression}: not one of {known}")
    return fnmatch.fnmatchcase(values[field], pattern)


def device_type(record: Record) -> str:
    """Return the type of device whose constants price `record`, or the device's own name."""
    if record.run is None:
        return record.gpu
    name = record.run.cluster.device.name
    return next((kind.name for kind in shipped_constants().devices if name.startswith(kind.prefixes)), name)
