"""The constants of the 2022 artefact of Galvatron (arXiv 2211.13878), collected in one profile_constants.json.

For each model: layer types with the numbers that the search scripts had in them, and the
milliseconds that a megabyte of all-reduce traffic takes, by number of stages and group: "4_1" is four
ranks side by side, "4_0" four ranks apart, "8" all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.errors import UserError
from meshwright.files import shorten
from meshwright.imports.galvatron_files import (
    MILLI,
    Data,
    ForwardTime,
    LayerMemory,
    OtherMemory,
    number,
    read_object,
    slowdown,
)
from meshwright.units import MiB

_GROUP = re.compile(r"(\d{1,4})(?:_([01]))?")
_RANGE = re.compile(r"range\((\d{1,6}), ?(\d{1,6}), ?(\d{1,6})\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactLayer:
    """`count` layers of one type. Activations are of a sample, by tensor-parallel degree."""

    name: str
    count: int
    forward_s: float
    parameter_bytes: float
    activation_bytes: Mapping[int, float]
    seq_len: int
    hidden_size: int
    is_decoder: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """One model: its layers, the embedding and head beside them, and what its search was given.

    `seconds_per_byte` is by stages, then by (ranks, whether side by side; None: either).
    `overhead_s` is the fixed cost that its scripts add for data-parallel layers.
    """

    layers: tuple[ArtefactLayer, ...]
    other_states_bytes: float
    other_activation_bytes: float
    backward_factor: float
    overhead_s: float
    overlap_slowdown: float
    seconds_per_byte: Mapping[int, Mapping[tuple[int, bool | None], float]]
    batches: range
    budgets_bytes: tuple[float, ...]

    @property
    def times(self) -> tuple[ForwardTime, ...]:
        """Return forward times, as those of a profile."""
        return tuple(
            ForwardTime(layer_type=kind, batch=None, seq_lens=(layer.seq_len,), seconds_per_sample=layer.forward_s)
            for kind, layer in enumerate(self.layers)
        )

    @property
    def layer_memories(self) -> tuple[LayerMemory, ...]:
        """Return the memory of layers, as that of a profile."""
        return tuple(
            LayerMemory(
                layer_type=kind,
                seq_len=layer.seq_len,
                parameter_bytes=layer.parameter_bytes,
                activation_bytes=layer.activation_bytes,
                recompute_bytes=None,
                sequence_parallel=False,
            )
            for kind, layer in enumerate(self.layers)
        )

    @property
    def other(self) -> OtherMemory:
        """Return the memory beside the layers, as that of a profile."""
        return OtherMemory(
            place="alone",
            seq_lens=tuple(layer.seq_len for layer in self.layers),
            states_bytes={1: self.other_states_bytes},
            activation_bytes={1: self.other_activation_bytes},
            sequence_parallel=False,
        )

    def bus_bytes_per_s(self, num_stages: int) -> Mapping[tuple[int, bool], float]:
        """Return bus bandwidths of groups of several ranks below `num_stages` stages."""
        found: dict[tuple[int, bool], float] = {}
        for (ranks, consecutive), seconds in self.seconds_per_byte[num_stages].items():
            if ranks > 1 and seconds:
                found[ranks, consecutive is not False] = 1 / seconds
        return found


def read_artefact(path: Path) -> dict[str, Artefact]:
    """Return the models in `path` by name."""
    found: dict[str, Artefact] = {}
    for name, data in read_object(path).items():
        if name.startswith("_"):
            continue
        if not isinstance(data, dict):
            raise UserError(f"{path}: {name}: must be an object, not {shorten(data)}")
        found[name] = _model(path, name, cast("dict[str, Any]", data))
    if not found:
        raise UserError(f"{path}: holds no model")
    return found


def _model(path: Path, name: str, data: Data) -> Artefact:
    entries, counts = data.get("layers"), data.get("layer_num")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: {name}: layers: must be a list of layer types")
    layers = cast("list[Any]", entries)
    numbers = cast("list[Any]", counts if isinstance(counts, list) else [counts])
    if len(numbers) != len(layers):
        raise UserError(f"{path}: {name}: layer_num: must have one number for each of the {len(layers)} layer types")
    where = f"{name}: layers[0]"
    first = _entry(path, where, layers[0])

    def figure(key: str) -> float:
        return _positive(path, f"{where}: {key}", first.get(key), may_be_0=True)

    return Artefact(
        layers=tuple(
            _layer(path, f"{name}: layers[{at}]", _entry(path, f"{name}: layers[{at}]", layer), count)
            for at, (layer, count) in enumerate(zip(layers, numbers, strict=True))
        ),
        other_states_bytes=figure("other_model_states_MB") * MiB,
        other_activation_bytes=figure("other_activation_MB_per_sample") * MiB,
        backward_factor=figure("bct_fct_coe"),
        overhead_s=figure("extra_overhead_ms_whole_model") * MILLI,
        overlap_slowdown=slowdown(path, f"{where}: dp_overlap_coe", figure("dp_overlap_coe")),
        seconds_per_byte=_seconds_per_byte(path, name, data.get("comm_coe_dict_ms_per_MB_by_pp")),
        batches=_batches(path, name, data.get("bsz_range")),
        budgets_bytes=_budgets(path, name, data.get("mem_list_GB")),
    )


def _layer(path: Path, where: str, data: Data, count: Any) -> ArtefactLayer:
    def figure(key: str) -> float:
        return _positive(path, f"{where}: {key}", data.get(key))

    name = "tp_activation_MB_per_sample"
    degrees = _entry(path, f"{where}: {name}", data.get(name))
    for degree in degrees:
        if _GROUP.fullmatch(degree) is None:
            raise UserError(f"{path}: {where}: {name}: {shorten(degree)} is not a degree, such as 1 or 8")
    label = str(data.get("name", ""))
    return ArtefactLayer(
        name=label,
        count=int(_positive(path, f"{where}: layer_num", count)),
        forward_s=figure("forward_ms_per_layer_per_sample") * MILLI,
        parameter_bytes=figure("parameter_size_MB_fp32") * MiB,
        activation_bytes={
            int(degree): _positive(path, f"{where}: {name}: {degree}", value) * MiB for degree, value in degrees.items()
        },
        seq_len=int(figure("sequence_length")),
        hidden_size=int(figure("hidden_size")),
        is_decoder="decoder" in label.lower(),
    )


def _seconds_per_byte(path: Path, name: str, value: Any) -> Mapping[int, Mapping[tuple[int, bool | None], float]]:
    where = f"{name}: comm_coe_dict_ms_per_MB_by_pp"
    found: dict[int, dict[tuple[int, bool | None], float]] = {}
    for stages, groups in _entry(path, where, value).items():
        if _GROUP.fullmatch(stages) is None or "_" in stages:
            raise UserError(f"{path}: {where}: {shorten(stages)} is not a number of stages")
        here = found.setdefault(int(stages), {})
        for group, millis in _entry(path, f"{where}: {stages}", groups).items():
            match = _GROUP.fullmatch(group)
            if match is None:
                raise UserError(f"{path}: {where}: {stages}: {shorten(group)} is not a group, such as 8 or 4_1")
            side_by_side = None if match[2] is None else match[2] == "1"
            seconds = _positive(path, f"{where}: {stages}: {group}", millis, may_be_0=True) * MILLI / MiB
            here[int(match[1]), side_by_side] = seconds
    if 1 not in found:
        raise UserError(f"{path}: {where}: 1: required, but missing")
    return found


def _batches(path: Path, name: str, value: Any) -> range:
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[3]) < 1:
        raise UserError(f"{path}: {name}: bsz_range: must be such as range(8, 256, 8), not {shorten(value)}")
    return range(int(match[1]), int(match[2]), int(match[3]))


def _budgets(path: Path, name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise UserError(f"{path}: {name}: mem_list_GB: must be a list, not {shorten(value)}")
    sizes = cast("list[Any]", value)
    return tuple(_positive(path, f"{name}: mem_list_GB", size) * 1024 * MiB for size in sizes)


def _entry(path: Path, where: str, value: Any) -> Data:
    if not isinstance(value, dict):
        raise UserError(f"{path}: {where}: must be an object, not {'missing' if value is None else shorten(value)}")
    return cast("dict[str, Any]", value)


def _positive(path: Path, where: str, value: Any, *, may_be_0: bool = False) -> float:
    found = number(path, where, value)
    if found < 0 or (found == 0 and not may_be_0):
        raise UserError(f"{path}: {where}: must be above 0, not {found:g}")
    return found
