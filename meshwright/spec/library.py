"""Named models and clusters, shipped as data files, and how a user's text or path becomes one.

Models are `config.json` files in `data/models`; devices with their links are in `data/devices.yaml`,
where each figure has its source.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from meshwright.errors import UserError
from meshwright.files import from_data, is_folder, read_data, shorten
from meshwright.spec.base import Spec
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.spec.constants import shipped_constants
from meshwright.spec.families import READERS, model_from_config, model_from_file
from meshwright.spec.model import ModelSpec
from meshwright.spec.shipped import read_shipped, shipped

_CLUSTER_TEXT = re.compile(r"(?:(?P<nodes>[0-9]{1,9})\s*x\s*)?(?P<devices>[0-9]{1,9})\s*x\s*(?P<kind>[A-Za-z][\w.-]*)")
_FILE_ENDINGS = (".json", ".yaml", ".yml")
_NUM_CLOSE_MATCHES = 3
_OTHER_NAMES = {"rtx-titan-24g": "titan-rtx"}  # as arXiv 2307.02031 calls it
MOST_DEVICES = 1 << 14


class DeviceEntry(Spec):
    """A device with the links that it usually comes with."""

    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models."""
    names = (file.name.removesuffix(".json") for file in shipped("models").iterdir() if file.name.endswith(".json"))
    return tuple(sorted(names))


@cache
def device_names() -> tuple[str, ...]:
    """Return the names of the shipped devices."""
    return tuple(sorted(_devices()))


def model(name_or_path: str | Path) -> ModelSpec:
    """Return a shipped model by its name, or the model in a file or folder.

    A file is a Hugging Face `config.json` or a ModelSpec with `groups`, as YAML or JSON; a folder
    holds a `config.json`. A shipped name wins over a file of the same name: write ./gpt2 for that.
    """
    text = str(name_or_path)
    if text.lower() in model_names():
        return _shipped_model(text.lower())
    if _looks_like_file(text):
        return _model_from_any_file(Path(name_or_path))
    raise UserError(f"model: {shorten(text)} is neither a known model nor a file; {_hint(text, model_names())}")


def cluster(text_or_path: str | Path, *, by_data_sheet: bool = False) -> ClusterSpec:
    """Return the cluster that `[nodes x] devices x kind` means, or the ClusterSpec in a YAML or JSON file.

    "8xa100-sxm-40g" is one node of 8, "128x8xh100-sxm" is 128 nodes of 8. Its devices reach what published runs
    show of their type (spec/constants.py), or, `by_data_sheet`, what the data file says without looking at runs.
    """
    text = str(text_or_path)
    if _looks_like_file(text):
        found = from_data(ClusterSpec, read_data(text), where=text)
    else:
        found = _cluster_from_text(text, by_data_sheet=by_data_sheet)
    if found.num_devices > MOST_DEVICES:
        raise UserError(f"cluster: {text} has {found.num_devices} devices; at most {MOST_DEVICES} can be planned for")
    return found


def device(name: str) -> DeviceSpec:
    """Return the shipped device called `name`."""
    return _device_entry(name.lower()).device


def _cluster_from_text(text: str, *, by_data_sheet: bool) -> ClusterSpec:
    match = _CLUSTER_TEXT.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"cluster: {shorten(text)} is not a cluster; write devices x kind (8xa100-sxm-40g), "
            "nodes x devices x kind (16x8xh100-sxm) or the path of a YAML file"
        )
    num_nodes, devices_per_node = int(match["nodes"] or 1), int(match["devices"])
    if num_nodes < 1 or devices_per_node < 1:
        raise UserError(f"cluster: {shorten(text)} has no devices; nodes and devices must be at least 1")
    kind = match["kind"].lower()
    entry = _device_entry(kind)
    entry = entry if by_data_sheet else _with_fitted(entry)
    return ClusterSpec(
        name=f"{num_nodes}x{devices_per_node}x{kind}" if num_nodes > 1 else f"{devices_per_node}x{kind}",
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=entry.device,
        intra_node=entry.intra_node,
        inter_node=entry.inter_node,
    )


def _hint(text: str, known: Sequence[str]) -> str:
    """Return the known names that are like `text`, or all of them."""
    close = ", ".join(difflib.get_close_matches(text.lower(), known, _NUM_CLOSE_MATCHES, cutoff=0.5))
    return f"did you mean {close}?" if close else f"known: {', '.join(known)}"


def _device_entry(kind: str) -> DeviceEntry:
    devices, kind = _devices(), _OTHER_NAMES.get(kind, kind)
    if kind not in devices:
        raise UserError(f"device: {shorten(kind)} is not known; {_hint(kind, device_names())}")
    return devices[kind]


@cache
def _devices() -> dict[str, DeviceEntry]:
    data = read_shipped(shipped("devices.yaml"))
    for name, entry in data.items():
        entry["device"]["name"] = name
    return {name: from_data(DeviceEntry, entry, where=f"devices.yaml: {name}") for name, entry in data.items()}


def _with_fitted(entry: DeviceEntry) -> DeviceEntry:
    """Return `entry` with the shares of its peaks that published runs show, where its type was fitted."""
    constants, device = shipped_constants(), entry.device
    if not constants.is_fitted(device):
        return entry
    of = constants.of(device)
    reached = {
        "matmul_efficiency": of.matmul_efficiency,
        "attention_efficiency": of.flash2_efficiency,
        "memory_efficiency": of.memory_efficiency,
    }
    shares = ", ".join(f"{name.removesuffix('_efficiency')} {share:.3f}" for name, share in reached.items())
    source = f"{device.source}; shares used: {shares}, fitted together with the cost model's other constants"
    return DeviceEntry(
        device=device.model_copy(update={**reached, "source": source}),
        intra_node=entry.intra_node.model_copy(update={"efficiency": constants.nvlink_efficiency}),
        inter_node=entry.inter_node.model_copy(update={"efficiency": constants.nic_efficiency}),
    )


@cache
def _shipped_model(name: str) -> ModelSpec:
    file = shipped("models", f"{name}.json")
    return model_from_config(read_shipped(file), name=name, where=file.name)


def _model_from_any_file(path: Path) -> ModelSpec:
    if is_folder(path):
        return model_from_file(path)
    data = read_data(path)
    if isinstance(data, dict) and "groups" in data:
        return from_data(ModelSpec, data, where=str(path))
    if isinstance(data, dict) and "model_type" in data:
        return model_from_config(data, name=_name_of(path), where=str(path))
    raise UserError(
        f"{path}: neither a model file (no groups) nor a config.json (no model_type); "
        f"supported model types: {', '.join(READERS)}"
    )


def _name_of(path: Path) -> str:
    """Return what a model is called after its file: the folder's name for config.json."""
    return path.resolve().parent.name or "model" if path.stem == "config" else path.stem


def _looks_like_file(text: str) -> bool:
    if text.endswith(_FILE_ENDINGS) or "/" in text:
        return True
    try:
        return bool(text) and Path(text).exists()
    except OSError:  # too long for a name
        return False
