"""Fit the constants of memory to published peaks and show how far off predictions are.

    python benchmarks/fit_memory.py --data DEV.jsonl [--write] [--all]

Of reserved peaks one constant is fitted, the allocator's slack: the median of measured / predicted over the medians of
groups. What a device takes beside them (context, communicators) comes from the literature and is not fitted, because
there are too few sources. Every figure of reserved and device peaks is given with constants fitted without its own
group ("held out"), and M3 once more with two constants of its own source and type of GPU.
`--write` stores the constants and the quantiles of what runs used above predictions in
`meshwright/spec/data/memory.yaml` and the held-out constants in `benchmarks/data/memory_logo.json`; `--all` lists every
record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from published_records import FILTERS, Record, read_records
from published_slopes import slopes_of
from published_statistics import Fit, Summary, confusion, grouped, percentile, summarise

from meshwright.cost.run_memory import RunBytes, run_memory
from meshwright.errors import UserError
from meshwright.spec.memory import CONFIDENCES, MemoryConstants, shipped_memory
from meshwright.spec.run import MemoryKind
from meshwright.units import GiB

LOGO_FILE = Path(__file__).parent / "data" / "memory_logo.json"
MEMORY_YAML = Path(__file__).parent.parent / "meshwright" / "spec" / "data" / "memory.yaml"
THRESHOLD = 0.98  # of nominal memory
_LEAST_FOR_QUANTILES = 10
_LEAST_FOR_GROUP = 2


@dataclass(frozen=True)
class Point:
    """One measured peak and what is predicted for it."""

    record: Record
    kind: MemoryKind
    measured_bytes: float
    measured_range: tuple[float, float]

    def predicted_bytes(self, constants: MemoryConstants) -> float:
        return of_rank(predicted(self.record, self.kind, constants), self.record.memory_rank)

    def error(self, constants: MemoryConstants) -> float:
        return self.predicted_bytes(constants) / self.measured_bytes - 1

    def range_error(self, constants: MemoryConstants) -> float:
        return _to_nearest(self.error(constants), self)


def of_rank(found: RunBytes, rank: str) -> float:
    """Return the bytes of the rank that was measured."""
    stages = [stage.total_bytes for stage in found.stages]
    choices = {"first": stages[0], "last": stages[-1], "ends": max(stages[0], stages[-1])}
    return choices.get(rank, max(stages))


def predicted(record: Record, kind: MemoryKind, constants: MemoryConstants) -> RunBytes:
    """Return the memory of the record's run."""
    assert record.run is not None
    return run_memory(record.run, kind, constants)


def points_of(records: Iterable[Record]) -> list[Point]:
    """Return the measured peaks that can be priced; a source that prints reserved beside allocated gives two."""
    found = []
    for record in records:
        if record.run is None or record.memory_kind is None or record.memory_bytes_range is None:
            continue
        if record.kind == "component_memory":
            continue
        assert record.memory_bytes is not None
        found.append(Point(record, record.memory_kind, record.memory_bytes, record.memory_bytes_range))
        extra = record.raw["measured"].get("extra") or {}
        if record.memory_kind == "allocated" and extra.get("real_reserved_gib"):
            reserved = extra["real_reserved_gib"] * GiB
            found.append(Point(record, "reserved", reserved, (reserved, reserved)))
    return found


def fitted_factor(points: Sequence[Point], base: MemoryConstants) -> float:
    """Return reserved over allocated: the median over groups of the median over their runs."""
    plain = base.model_copy(update={"reserved_factor": 1.0})
    chosen = [p for p in points if p.kind == "reserved" and FILTERS["base"](p.record.raw)]
    by_group = grouped(chosen, lambda p: p.record.group)
    ratios = [
        median(p.measured_bytes / p.predicted_bytes(plain) for p in some)
        for some in by_group.values()
        if len(some) >= _LEAST_FOR_GROUP
    ]
    return max(1.0, round(median(ratios), 3))


class HeldOut:
    """Constants fitted without one group each."""

    def __init__(self, points: Sequence[Point], base: MemoryConstants) -> None:
        self.all = base.model_copy(update={"reserved_factor": fitted_factor(points, base)})
        self._without = {
            group: base.model_copy(
                update={"reserved_factor": fitted_factor([p for p in points if p.record.group != group], base)}
            )
            for group in {p.record.group for p in points if p.kind == "reserved"}
        }

    @property
    def factors(self) -> dict[str, float]:
        return {group: constants.reserved_factor for group, constants in sorted(self._without.items())}

    def without(self, group: str) -> MemoryConstants:
        return self._without.get(group, self.all)


def calibrated_errors(
    points: Sequence[Point], constants: MemoryConstants, *, leave_out: bool
) -> list[tuple[float, Point]]:
    """Return the errors with two constants of each source and type of GPU, a factor and a sum.

    They are fitted on all of its records, or without the one that they are tried on (`leave_out`).
    """
    found = []
    for some in grouped(points, lambda p: (p.record.group, p.record.gpu.split("-")[0])).values():
        pairs = [(p.predicted_bytes(constants), p.measured_bytes) for p in some]
        for place, (point, (predicted_bytes, measured_bytes)) in enumerate(zip(some, pairs, strict=True)):
            factor, constant = _line(pairs[:place] + pairs[place + 1 :] if leave_out else pairs)
            found.append(((factor * predicted_bytes + constant) / measured_bytes - 1, point))
    return found


def _to_nearest(error: float, point: Point) -> float:
    """Return the error against the nearest reading, of one against the middle."""
    found = (1 + error) * point.measured_bytes
    low, high = point.measured_range
    return found / min(max(found, low), high) - 1


def _line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return factor and sum of the line through (allocated, measured) with the least absolute relative errors."""
    x, y = np.array([a for a, _ in pairs]), np.array([m for _, m in pairs])
    weights = np.ones(len(x))
    factor, constant = 1.0, 0.0
    for _ in range(50):  # iteratively reweighted towards absolute errors
        rows = np.stack([x / y, 1 / y], axis=1) * weights[:, None] ** 0.5
        (factor, constant), *_ = np.linalg.lstsq(rows, weights**0.5, rcond=None)
        residual = np.abs((factor * x + constant) / y - 1)
        weights = 1 / np.maximum(residual, 0.01)
    return float(factor), float(constant)


def fits_of(records: Iterable[Record], held_out: HeldOut) -> list[Fit]:
    """Return the need of device memory of every dense run that is known to fit, or not to."""
    found = []
    for record in records:
        raw, norm = record.raw, record.raw["norm"]
        is_known = (
            record.kind == "end_to_end"
            and raw["trust"] in ("A", "B")
            and raw["primary"]
            and norm["recompute_known"]
            and norm["degrees_multiply_to_gpus"]
            and (norm["plan_complete"] or record.is_oom)
            and not raw["model"]["n_experts"]
        )
        if is_known and record.run is not None:
            need = predicted(record, "device", held_out.without(record.group)).peak_bytes
            found.append(Fit(record.id, need / record.run.cluster.device.memory_bytes, record.is_oom))
    return found


def quantiles_of(points: Sequence[Point], held_out: HeldOut) -> list[dict[str, Any]]:
    """Return the quantiles of measured / predicted - 1 by kind and framework, and by kind; repeated figures once."""
    found = []
    distinct = {(p.record.group, p.kind, p.measured_bytes, round(p.predicted_bytes(held_out.all))): p for p in points}
    chosen = [p for p in distinct.values() if FILTERS["base"](p.record.raw)]
    for kind, of_kind in sorted(grouped(chosen, lambda p: p.kind).items()):
        for framework, some in [
            *sorted(grouped(of_kind, lambda p: _run(p).framework).items()),
            (None, of_kind),
        ]:
            if len(some) < _LEAST_FOR_QUANTILES:
                continue
            excess = sorted(1 / (1 + p.error(held_out.without(p.record.group))) - 1 for p in some)
            quantiles = [round(percentile(excess, 100 * share), 4) for share in CONFIDENCES]
            entry: dict[str, Any] = {"kind": kind, "num_runs": len(some), "quantiles": quantiles}
            found.append({**entry, "framework": framework} if framework else entry)
    return found


def _run(point: Point) -> Any:
    assert point.record.run is not None
    return point.record.run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="store constants and quantiles in memory.yaml")
    parser.add_argument("--all", action="store_true", help="list every record")
    arguments = parser.parse_args()
    records = read_records(arguments.data)
    points = points_of(records)
    held_out = HeldOut(points, shipped_memory())
    print(f"reserved over allocated: {held_out.all.reserved_factor}, without one group:")
    for group, factor in held_out.factors.items():
        print(f"  {group:20s} {factor}")
    if arguments.all:
        _list(points, held_out)
    _show_groups(points, held_out)
    _show_subsets(records, points, held_out)
    _show_fits(records, held_out)
    if arguments.write:
        _write(points, held_out)


def _list(points: Sequence[Point], held_out: HeldOut) -> None:
    for p in sorted(points, key=lambda one: one.record.id):
        constants = held_out.without(p.record.group)
        found = predicted(p.record, p.kind, constants)
        peak = found.peak
        print(
            f"{p.record.id:60s} {p.kind:9s} {p.measured_bytes / GiB:8.2f} {p.predicted_bytes(constants) / GiB:8.2f} "
            f"{100 * p.error(constants):+6.1f} %  stage {found.peak_stage} {peak.phase}: {peak.moment}"
        )


def _show_groups(points: Sequence[Point], held_out: HeldOut) -> None:
    print("\nby group, GPU and kind, constants held out: n, median, p90, bias in %; of these in `base`")
    for (group, gpu, kind), some in sorted(grouped(points, lambda p: (p.record.group, p.record.gpu, p.kind)).items()):
        base = [p for p in some if FILTERS["base"](p.record.raw)]
        texts = _text(_errors(some, held_out)), _text(_errors(base, held_out))
        print(f"  {group:18s} {gpu:12s} {kind:9s} {texts[0]}   base {texts[1]}")


def _errors(points: Iterable[Point], held_out: HeldOut) -> list[float]:
    return [p.error(held_out.without(p.record.group)) for p in points]


def _show_subsets(records: Sequence[Record], points: Sequence[Point], held_out: HeldOut) -> None:
    print("\nsubsets: against the middle of the readings; against the nearest one")
    for name, kind in (("M1", "allocated"), ("M2", "reserved"), ("M3", "device"), ("moe", None)):
        some = [p for p in points if FILTERS[name](p.record.raw) and kind in (None, p.kind)]
        nearest = [p.range_error(held_out.without(p.record.group)) for p in some]
        print(f"  {name:5s} {_text(_errors(some, held_out))}   nearest {_text(nearest)}")
        if name == "M3":
            for leave_out in (False, True):
                errors = calibrated_errors(some, held_out.all, leave_out=leave_out)
                title = f"two constants by GPU{', record left out' if leave_out else ''}"
                nearest = [_to_nearest(error, point) for error, point in errors]
                print(f"        {title}: {_text([error for error, _ in errors])}   nearest {_text(nearest)}")
    slopes = slopes_of([one for one in records if FILTERS["M4"](one.raw)])
    print(f"  M4    {_text(Summary(**slopes['all']))}")
    print(f"        {'nothing recomputed':30s} {_text(Summary(**slopes['nothing_recomputed']))}")
    for name, some in slopes["by_model"].items():
        print(f"        {name:30s} {_text(Summary(**some))}")


def _text(found: Summary | list[float]) -> str:
    summary = summarise(found) if isinstance(found, list) else found
    if summary.median is None or summary.p90 is None or summary.bias is None:
        return f"n {summary.num:3d}"
    worst = "" if summary.largest is None else f" max {100 * summary.largest:5.1f}"
    middle, high, bias = (100 * value for value in (summary.median, summary.p90, summary.bias))
    return f"n {summary.num:3d} {middle:5.1f} /{high:5.1f} bias {bias:+5.1f}{worst}"


def _show_fits(records: Sequence[Record], held_out: HeldOut) -> None:
    found = confusion(fits_of(records, held_out), THRESHOLD)
    num_alarms, num_fit = found["num_false_alarms"], found["num_fit"]
    print(f"\nout of memory: {found['num_found']} of {found['num_oom']} found, {num_alarms} false alarms in {num_fit}")
    for name in ("misses", "false_alarms"):
        for one in found[name]:
            print(f"  {name:12s} {one['id']:50s} {one['share']:.3f} of nominal, margin {one['margin']:+.3f}")


def _write(points: Sequence[Point], held_out: HeldOut) -> None:
    constants = held_out.all
    groups = sorted({p.record.group for p in points if p.kind == "reserved" and FILTERS["base"](p.record.raw)})
    lines = [
        "# Constants of memory that no shape gives; MemoryConstants in spec/memory.py says what the fields mean.",
        "# Written by benchmarks/fit_memory.py --write.",
        f"workspace_bytes: {constants.workspace_bytes}",
        f"reserved_factor: {constants.reserved_factor}",
        f"context_bytes: {constants.context_bytes}",
        f"communicator_bytes: {constants.communicator_bytes}",
        "excess:",
        *(f"  - {json.dumps(one)}" for one in quantiles_of(points, held_out)),
        f"source: {json.dumps(constants.source)}",
        f"fitted_on: {json.dumps(groups)}",
    ]
    LOGO_FILE.parent.mkdir(exist_ok=True)
    factors = {group: {"reserved_factor": factor} for group, factor in held_out.factors.items()}
    LOGO_FILE.write_text(json.dumps(factors, indent=2) + "\n", encoding="utf-8")
    MEMORY_YAML.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
