"""Files of Hetu-Galvatron's profilers, one at a time, as values in bytes and seconds.

Its megabytes are 2**20 bytes and its bandwidths megabytes a millisecond. Derived keys are read,
and raw runs of two numbers of layers where there are no derived ones:

    computation   layertype_<i>[_bsz<b>][_seq<s>]: forward milliseconds of a layer and sample; other: of all else
                  layernum[2]_bsz8_seq2048 or layernum2_bsz8_seq2048: of a whole run (several types: [2,2] or 2_2)
    memory        layertype_<i>[_sp]: parameters in fp32, saved activations of a sample by tensor-parallel degree
                  other_memory_pp_{off,on_first,on_last}[_sp]: the rest on the only, the first and the last stage
    hardware      allreduce_size_<n>_consec_<0|1>, pp_size_<n>, overlap_coe, {allreduce,all2all}_size_<n>_<m>MB_time

The oldest files have no lengths. Layers measured in halves (..._attention, ..._mlp) are not layers and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from meshwright.errors import UserError
from meshwright.files import read_data, shorten
from meshwright.units import MiB

MILLI = 1e-3
Place = Literal["alone", "first", "last"]
Data = Mapping[str, Any]

_LENGTHS = r"(\[\d+(?:,\d+)*\]|\d+(?:_\d+)*)"
_HALF = r"(_attention|_mlp)?"
_DERIVED = re.compile(rf"layertype_(\d+|other(?:_0)?)(?:_bsz(\d+))?(?:_seq{_LENGTHS})?{_HALF}")
_RAW = re.compile(rf"layernum{_LENGTHS}_bsz(\d+)(?:_seq{_LENGTHS})?{_HALF}")
_LAYER_MEMORY = re.compile(r"layertype_(\d+)(_sp)?")
_OTHER_MEMORY = re.compile(r"other_memory_pp_(off|on_first|on_last)(_sp)?")
_ALL_REDUCE = re.compile(r"allreduce_size_([1-9]\d*)_consec_([01])")
_P2P = re.compile(r"pp_size_([1-9]\d*)")
_COLLECTIVE = re.compile(r"(allreduce|all2all)_size_([1-9]\d*)_([1-9]\d*)MB_time")
_PLACES: dict[str, Place] = {"off": "alone", "on_first": "first", "on_last": "last"}
_MOST_DIGITS = 9  # of a count in a key
# Milliseconds, megabytes and megabytes a millisecond: beyond these a file is broken.
_SMALLEST, _LARGEST = 1e-6, 1e8
_MOST_SLOWDOWN = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """Forward seconds a sample of one layer of a type, or of everything else (`layer_type` None).

    `batch` is the number of samples that ran at once, and `seq_lens` the length for each type of
    layer; None and () where the file does not say.
    """

    layer_type: int | None
    batch: int | None
    seq_lens: tuple[int, ...]
    seconds_per_sample: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """One layer: bytes of its parameters in fp32, and what a sample leaves on a rank by tensor-parallel degree.

    `recompute_bytes` is what remains of a sample under activation checkpointing, at degree 1.
    `sequence_parallel`: degrees above 1 also split the sequence (Megatron-SP).
    """

    layer_type: int
    seq_len: int | None
    parameter_bytes: float
    activation_bytes: Mapping[int, float]
    recompute_bytes: float | None
    sequence_parallel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMemory:
    """Embedding, head and loss where they are: model states, and a sample's peak, in bytes by vocabulary degree."""

    place: Place
    seq_lens: tuple[int, ...]
    states_bytes: Mapping[int, float]
    activation_bytes: Mapping[int, float]
    sequence_parallel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Forward times of a model; `dropped` are keys whose time was not above zero (noise)."""

    times: tuple[ForwardTime, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory tables of a model, without raw runs."""

    layers: tuple[LayerMemory, ...]
    others: tuple[OtherMemory, ...]


def read_object(path: Path) -> Data:
    """Return the JSON object in `path`."""
    data = read_data(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold one JSON object, not {shorten(data)}")
    return cast("dict[str, Any]", data)


def read_computation(path: Path) -> Computation:
    """Return the forward times in `path`."""
    data = read_object(path)
    times: list[ForwardTime] = []
    dropped: list[str] = []
    raw: list[tuple[str, re.Match[str], float]] = []
    for key, value in data.items():
        derived, run = _DERIVED.fullmatch(key), _RAW.fullmatch(key)
        if derived is None and run is None:
            _refuse_unknown(path, key, ("layertype", "layernum"))
            continue
        millis = number(path, key, value)
        if run is not None:
            raw.append((key, run, millis))
        elif derived is not None and derived[4] is None:
            kind = None if derived[1].startswith("other") else _count(path, key, derived[1])
            if millis <= 0 and kind is not None:
                dropped.append(key)
                continue
            batch = None if derived[2] is None else _count(path, key, derived[2], least=1)
            lengths = _lengths(path, key, derived[3])
            times.append(
                ForwardTime(layer_type=kind, batch=batch, seq_lens=lengths, seconds_per_sample=max(0.0, millis) * MILLI)
            )
    if not any(time.layer_type is not None for time in times) and not dropped:
        times = list(_from_raw_runs(path, raw))
    return Computation(times=tuple(times), dropped=tuple(dropped))


def _from_raw_runs(path: Path, raw: list[tuple[str, re.Match[str], float]]) -> Iterator[ForwardTime]:
    """Yield times of layers from runs that differ in the layers of one type, and what is left for all else."""
    settings: dict[tuple[int, tuple[int, ...]], dict[tuple[int, ...], float]] = {}
    for key, run, millis in raw:
        if run[4] is None:
            at = (_count(path, key, run[2], least=1), _lengths(path, key, run[3]))
            settings.setdefault(at, {})[_lengths(path, key, run[1])] = millis
    for (batch, lengths), runs in settings.items():
        fewest = min(runs)
        layer_millis: dict[int, float] = {}
        for counts, millis in sorted(runs.items()):
            more = [kind for kind, (a, b) in enumerate(zip(counts, fewest, strict=False)) if a > b]
            if len(counts) == len(fewest) and len(more) == 1:
                layer_millis[more[0]] = (millis - runs[fewest]) / batch / (counts[more[0]] - fewest[more[0]])
        if len(layer_millis) < len(fewest) or min(layer_millis.values()) <= 0:
            continue
        for kind, millis in layer_millis.items():
            own = lengths[kind : kind + 1] if len(lengths) == len(fewest) else lengths
            yield ForwardTime(layer_type=kind, batch=batch, seq_lens=own, seconds_per_sample=millis * MILLI)
        rest = runs[fewest] / batch - sum(count * layer_millis[kind] for kind, count in enumerate(fewest))
        yield ForwardTime(layer_type=None, batch=batch, seq_lens=lengths, seconds_per_sample=max(0.0, rest) * MILLI)


def read_memory(path: Path) -> Memory:
    """Return the derived tables in `path`; raw runs by strategy are not read."""
    layers: list[LayerMemory] = []
    others: list[OtherMemory] = []
    for key, value in read_object(path).items():
        layer, other = _LAYER_MEMORY.fullmatch(key), _OTHER_MEMORY.fullmatch(key)
        if layer is not None:
            kind, parallel = _count(path, key, layer[1]), layer[2] is not None
            layers += [
                _layer_memory(path, where, kind, parallel, lengths, table)
                for where, lengths, table in _by_length(path, key, value, "parameter_size")
            ]
        elif other is not None:
            place, parallel = _PLACES[other[1]], other[2] is not None
            for where, lengths, table in _by_length(path, key, value, "model_states"):
                others.append(
                    OtherMemory(
                        place=place,
                        seq_lens=lengths,
                        states_bytes=_by_degree(path, where, table, "model_states"),
                        activation_bytes=_by_degree(path, where, table, "activation"),
                        sequence_parallel=parallel,
                    )
                )
        else:
            _refuse_unknown(path, key, ("layertype", "other_memory"))
    return Memory(layers=tuple(layers), others=tuple(others))


def _layer_memory(
    path: Path, where: str, kind: int, parallel: bool, lengths: tuple[int, ...], table: Data
) -> LayerMemory:
    name = "tp_activation_per_bsz_dict"
    entries = _object(path, f"{where}: {name}", table.get(name))
    recompute = entries.get("checkpoint")
    degrees = {key: value for key, value in entries.items() if key != "checkpoint"}
    return LayerMemory(
        layer_type=kind,
        seq_len=lengths[0] if lengths else None,
        parameter_bytes=_size(path, f"{where}: parameter_size", table.get("parameter_size")),
        activation_bytes=_degrees(path, f"{where}: {name}", degrees),
        recompute_bytes=None if recompute is None else _size(path, f"{where}: {name}: checkpoint", recompute),
        sequence_parallel=parallel,
    )


def _by_length(path: Path, key: str, value: Any, marker: str) -> Iterator[tuple[str, tuple[int, ...], Data]]:
    """Yield (where, lengths, table): a table for each length, or in the oldest files one for none."""
    table = _object(path, key, value)
    if marker in table:
        yield key, (), table
        return
    if not table:
        raise UserError(f"{path}: {key}: {marker}: required, but missing")
    for length, entry in table.items():
        where = f"{key}: {length}"
        if re.fullmatch(_LENGTHS, length) is None:
            raise UserError(f"{path}: {where}: must be a length, such as 2048 or [512,512]")
        yield where, _lengths(path, where, length), _object(path, where, entry)


def _by_degree(path: Path, where: str, table: Data, name: str) -> Mapping[int, float]:
    """Return bytes by degree; the oldest files have one number."""
    value = table.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {1: _size(path, f"{where}: {name}", value)}
    return _degrees(path, f"{where}: {name}", _object(path, f"{where}: {name}", value))


def _degrees(path: Path, where: str, entries: Data) -> Mapping[int, float]:
    found: dict[int, float] = {}
    for degree, value in entries.items():
        if re.fullmatch(r"[1-9]\d{0,5}", degree) is None:
            raise UserError(f"{path}: {where}: {shorten(degree)} is not a degree, such as 1 or 8")
        found[int(degree)] = _size(path, f"{where}: {degree}", value)
    if not found:
        raise UserError(f"{path}: {where}: holds no degree")
    return found


def read_all_reduce(path: Path) -> Mapping[tuple[int, bool], float]:
    """Return bus bandwidths, 2 (n-1)/n * bytes / seconds, by (ranks, whether they are consecutive)."""
    found = _matching(path, _ALL_REDUCE, lambda key: (int(key[1]), key[2] == "1"), "allreduce_size_8_consec_1")
    return {at: value * MiB / MILLI for at, value in found.items()}


def read_p2p(path: Path) -> Mapping[int, float]:
    """Return bytes a second between neighbouring stages by number of stages."""
    found = _matching(path, _P2P, lambda key: int(key[1]), "pp_size_2")
    return {at: value * MiB / MILLI for at, value in found.items()}


def read_collective_times(path: Path) -> Mapping[tuple[str, int, int], float]:
    """Return seconds by ("allreduce" or "all2all", ranks, message bytes)."""
    example = "allreduce_size_8_32MB_time"
    found = _matching(path, _COLLECTIVE, lambda key: (key[1], int(key[2]), int(key[3]) * MiB), example)
    return {at: value * MILLI for at, value in found.items()}


def read_overlap(path: Path) -> float:
    """Return the factor by which compute and communication slow down where they overlap."""
    data = read_object(path)
    if "overlap_coe" not in data:
        raise UserError(f"{path}: overlap_coe: required, but missing")
    value = number(path, "overlap_coe", data["overlap_coe"])
    return slowdown(path, "overlap_coe", value)


def slowdown(path: Path, key: str, value: float) -> float:
    """Return a factor by which something is slower, or raise UserError that names file and key."""
    if not 1 <= value <= _MOST_SLOWDOWN:
        raise UserError(f"{path}: {key}: must be a factor of at least 1, not {value:g}")
    return value


def _matching(path: Path, pattern: re.Pattern[str], at: Callable[[re.Match[str]], Any], example: str) -> dict[Any, Any]:
    """Return positive numbers by what their keys say."""
    found: dict[Any, float] = {}
    for key, value in read_object(path).items():
        match = pattern.fullmatch(key)
        if match is None:
            raise UserError(f"{path}: {shorten(key)}: unknown key; they are such as {example}")
        for part in match.groups():
            if part.isdigit():
                _count(path, key, part)
        entry = number(path, key, value)
        if entry <= 0:
            raise UserError(f"{path}: {key}: must be above 0, not {entry:g}")
        found[at(match)] = entry
    if not found:
        raise UserError(f"{path}: holds no key such as {example}")
    return found


def number(path: Path, key: str, value: Any) -> float:
    """Return a finite number, or raise UserError that names file and key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{path}: {key}: must be a number, not {'missing' if value is None else shorten(value)}")
    if not (value == 0 or _SMALLEST <= abs(value) <= _LARGEST):  # so for NaN too
        raise UserError(f"{path}: {key}: must be a finite number of a sensible size, not {shorten(value)}")
    return float(value)


def _size(path: Path, key: str, value: Any) -> float:
    """Return bytes from megabytes."""
    megabytes = number(path, key, value)
    if megabytes < 0:
        raise UserError(f"{path}: {key}: must not be below 0, not {megabytes:g}")
    return megabytes * MiB


def _object(path: Path, key: str, value: Any) -> Data:
    if not isinstance(value, dict):
        raise UserError(f"{path}: {key}: must be an object, not {'missing' if value is None else shorten(value)}")
    return cast("dict[str, Any]", value)


def _lengths(path: Path, key: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = re.split(r"[,_]", text.strip("[]"))
    return tuple(_count(path, key, part, least=1) for part in parts)


def _count(path: Path, key: str, digits: str, *, least: int = 0) -> int:
    if len(digits) > _MOST_DIGITS or int(digits) < least:
        raise UserError(f"{path}: {shorten(key)}: {shorten(digits)} is not a number that a key may have")
    return int(digits)


def _refuse_unknown(path: Path, key: str, beginnings: tuple[str, ...]) -> None:
    """Raise for a key that looks like one of ours and is not; what else a file holds is not for us."""
    if key.startswith(beginnings):
        raise UserError(f"{path}: {shorten(key)}: the key is not understood")
