"""Weights from and to folders of Hugging Face checkpoints, one tensor at a time.

`open_weights` looks at the headers of the safetensors files alone, and refuses there what does not fit; a tensor is
read when it is asked for. `save_weights` writes files of the same kind: whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import UserError
from meshwright.files import put_folder, read_data, shorten, write_text
from meshwright.models.names import CheckpointTensor, checkpoint_tensors, is_of_head, names_in_file
from meshwright.spec.model import ModelSpec

FullParameter = Callable[[str], Tensor]  # name -> the whole fp32 parameter
SavedDtype = Literal["fp32", "bf16", "fp16"]

CONFIG = "config.json"
MARK = "meshwright.json"  # tells an export from a folder that somebody else made
MAX_SHARD_BYTES = 5_000_000_000  # what transformers wrote by default up to version 4
_ONE, _INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
_READABLE = ("F32", "BF16", "F16")
_DTYPES: dict[SavedDtype, tuple[torch.dtype, str, str]] = {
    "fp32": (torch.float32, "F32", "float32"),
    "bf16": (torch.bfloat16, "BF16", "bfloat16"),
    "fp16": (torch.float16, "F16", "float16"),
}
_HEADER_ALIGNMENT = 8  # of the tensors' first byte, as the format asks


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a file, and what its header says of it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class OpenWeights:
    """The whole fp32 parameters of a model by our names, read from a folder when they are asked for.

    `new`: the checkpoint's tensors that the folder lacks, whose parameters are drawn.
    """

    def __init__(
        self,
        tensors: tuple[CheckpointTensor, ...],
        places: Mapping[str, _Place],
        new_head: FullParameter | None,
    ) -> None:
        self.new = tuple(tensor.name for tensor in tensors if tensor.name not in places)
        self._places, self._new_head = places, new_head
        self._holders = {ours: tensor for tensor in tensors for ours in tensor.ours if tensor.name in places}
        self._files: dict[Path, Any] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __call__(self, name: str) -> Tensor:
        """Return the whole parameter `name`. It may be a view of what was read, not to be changed."""
        holder = self._holders.get(name)
        if holder is None:
            assert self._new_head is not None  # noqa: S101 else open_weights has raised
            return self._new_head(name)
        if self._last[0] != holder.name:  # GPT-2 has queries, keys and values in one tensor: read it once
            read = holder.to_ours(self._read(self._places[holder.name]))
            self._last = (holder.name, dict(zip(holder.ours, read, strict=True)))
        return self._last[1][name]

    def _read(self, place: _Place) -> Tensor:
        if place.file not in self._files:
            self._files[place.file] = safe_open(str(place.file), framework="pt")
        return self._files[place.file].get_tensor(place.name).float()


def open_weights(folder: str | Path, model: ModelSpec, *, new_head: FullParameter | None = None) -> OpenWeights:
    """Return the weights of `model` in a Hugging Face `folder`; raise UserError when they are not all there.

    With `new_head`, which draws initial values, tensors of a head that are missing or of another shape are taken from
    that.
    """
    folder = Path(folder)
    places = _places(folder)
    names = names_in_file(model, places, new_head=new_head is not None, where=str(folder))
    tensors = checkpoint_tensors(model)
    found: dict[str, _Place] = {}
    for tensor in tensors:
        if tensor.name not in names:
            continue
        place = places[names[tensor.name]]
        if place.shape != tensor.shape:
            if is_of_head(tensor.name) and new_head is not None:
                continue
            hint = "; --new-head begins with a new one" if is_of_head(tensor.name) else ""
            raise UserError(
                f"{place.file}: {place.name} has shape {place.shape}, but that of {model.name} is {tensor.shape}{hint}"
            )
        if place.dtype not in _READABLE:
            raise UserError(
                f"{place.file}: {place.name} is stored as {place.dtype}; only {', '.join(_READABLE)} can be read"
            )
        found[tensor.name] = place
    return OpenWeights(tensors, found, new_head)


def fingerprint(folder: str | Path) -> str:
    """Return what tells most other checkpoints from this one without reading it: file sizes and tensors."""
    places = _places(Path(folder))
    files = sorted({place.file for place in places.values()})
    sizes = [(file.name, file.stat().st_size) for file in files]
    return json.dumps([sizes, sorted((name, place.shape, place.dtype) for name, place in places.items())])


def save_weights(
    folder: str | Path,
    model: ModelSpec,
    parameter: FullParameter,
    *,
    config: Mapping[str, Any],
    dtype: SavedDtype = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    about: Mapping[str, Any] | None = None,
) -> tuple[Path, ...]:
    """Write `model` with the values of `parameter` as a folder that transformers loads; return its files.

    `config` is the data of its config.json, in which dtype is set. `about` says in a file of its own where the
    weights are from. One tensor at a time is in memory. A folder that is there is replaced when it is an earlier
    export, and refused otherwise.
    """
    folder = Path(folder).absolute()
    refuse_foreign(folder)
    beside: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        partial = beside / "new"
        partial.mkdir()
        shards = list(_shards(model, dtype, max_shard_bytes))
        names = [_shard_name(index, len(shards)) for index in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            _write_shard(partial / name, shard, parameter, dtype)
        if len(shards) > 1:
            _write_json(partial / _INDEX, _index(names, shards, dtype))
        _write_json(partial / CONFIG, _with_dtype(config, dtype))
        files = sorted(path.name for path in partial.iterdir())
        _write_json(partial / MARK, {**(about or {}), "files": [*files, MARK]})
        put_folder(partial, folder, beside / "old")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return tuple(folder / name for name in (*files, MARK))


def refuse_foreign(folder: Path) -> None:
    """Raise UserError when `folder` holds anything that no export has written."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder")
    there = sorted(path.name for path in folder.iterdir())
    if not there:
        return
    if MARK not in there:
        raise UserError(f"{folder}: holds files that are not of an earlier export ({there[0]}); name another folder")
    ours = cast("dict[str, Any]", read_data(folder / MARK)).get("files", [])
    if others := [name for name in there if name not in ours]:
        raise UserError(f"{folder}: holds {others[0]}, which is not of the earlier export; move it, or name another")


def _places(folder: Path) -> dict[str, _Place]:
    """Return every tensor of the safetensors files of `folder`, from their headers."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one with config.json and {_ONE}")
    if (folder / _INDEX).is_file():
        return _indexed(folder)
    if not (folder / _ONE).is_file():
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        hint = (
            f"{pickled[0]} is pickled, and so can run code: load it with transformers and save_pretrained() it"
            if pickled
            else f"weights are read from {_ONE}, or from shards that {_INDEX} names"
        )
        raise UserError(f"{folder}: holds no {_ONE}; {hint}")
    return {place.name: place for place in _header(folder / _ONE)}


def _indexed(folder: Path) -> dict[str, _Place]:
    index = read_data(folder / _INDEX)
    shards = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise UserError(f"{folder / _INDEX}: weight_map: must be an object of tensors and their files")
    places: dict[str, _Place] = {}
    weight_map = cast("dict[str, Any]", shards)
    for name in sorted({str(file) for file in weight_map.values()}):
        if Path(name).name != name or Path(name).suffix != _SUFFIX:
            raise UserError(f"{folder / _INDEX}: weight_map: {shorten(name)} is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing, which {_INDEX} names; fetch the whole folder again")
        places |= {place.name: place for place in _header(folder / name) if weight_map.get(place.name) == name}
    if missing := sorted(weight_map.keys() - places.keys()):
        raise UserError(
            f"{folder / weight_map[missing[0]]}: {missing[0]} is not in it, where {_INDEX} has it; "
            "fetch the whole folder again"
        )
    return places


def _header(file: Path) -> Iterator[_Place]:
    """Yield the tensors of a safetensors file. Its header accounts for every byte, so a torn one is known."""
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                entry = opened.get_slice(name)
                yield _Place(file, name, tuple(entry.get_shape()), entry.get_dtype())
    except SafetensorError as error:
        raise UserError(
            f"{file}: is not a whole safetensors file ({' '.join(str(error).split())}); fetch it again"
        ) from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor that is written under `name`."""

    name: str
    tensor: CheckpointTensor


def _shards(model: ModelSpec, dtype: SavedDtype, max_shard_bytes: int) -> Iterator[list[_Entry]]:
    """Yield the tensors of each file: as many as fit, and at least one."""
    shard: list[_Entry] = []
    used = 0
    for tensor in checkpoint_tensors(model):
        num_bytes = _num_bytes(tensor, dtype)
        for name in (tensor.name, *tensor.copies):
            if shard and used + num_bytes > max_shard_bytes:
                yield shard
                shard, used = [], 0
            shard.append(_Entry(name, tensor))
            used += num_bytes
    yield shard


def _shard_name(index: int, count: int) -> str:
    return _ONE if count == 1 else f"model-{index:05d}-of-{count:05d}{_SUFFIX}"


def _num_bytes(tensor: CheckpointTensor, dtype: SavedDtype) -> int:
    return prod(tensor.shape) * _DTYPES[dtype][0].itemsize


def _index(names: list[str], shards: list[list[_Entry]], dtype: SavedDtype) -> dict[str, Any]:
    total_bytes = sum(_num_bytes(entry.tensor, dtype) for shard in shards for entry in shard)
    where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    return {"metadata": {"total_size": total_bytes}, "weight_map": where}


def _write_shard(file: Path, shard: list[_Entry], parameter: FullParameter, dtype: SavedDtype) -> None:
    """Write a safetensors file: length of the header, header, then the tensors one after the other.

    By hand, since the library's writer wants all tensors of a file in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in shard:
        end = at + _num_bytes(entry.tensor, dtype)
        header[entry.name] = {"dtype": _DTYPES[dtype][1], "shape": entry.tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for entry in shard:
            _write_tensor(out, entry.tensor, parameter, dtype)


def _write_tensor(out: BinaryIO, tensor: CheckpointTensor, parameter: FullParameter, dtype: SavedDtype) -> None:
    values = tensor.to_theirs([parameter(name) for name in tensor.ours])
    if tuple(values.shape) != tensor.shape:
        raise UserError(f"{tensor.name}: has shape {tuple(values.shape)}, but the model's is {tensor.shape}")
    stored = values.detach().to("cpu", _DTYPES[dtype][0])
    out.write(stored.reshape(-1).view(torch.uint8).numpy().data)


def _with_dtype(config: Mapping[str, Any], dtype: SavedDtype) -> dict[str, Any]:
    """Return `config` with the stored dtype, under the name that it has there (older files: torch_dtype)."""
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, name: _DTYPES[dtype][2]}


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=2) + "\n")
