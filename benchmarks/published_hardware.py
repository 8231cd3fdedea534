"""The hardware of a published record as a ClusterSpec: device preset by GPU name, links from the text fields.

`hardware.gpu` names the preset (with `gpu_mem_gb` and the form factor), `hardware.intra` the link inside a node,
`hardware.inter` the network: "4x 100 Gb/s RoCE per node", "400 Gb/s per GPU", "RoCE 1600 Gbps node-node",
"4x OmniPath per node" (100 Gb/s each). Silent fields leave the preset's usual links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from published_models import MissingField

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.library import cluster

# Pattern of the GPU text: (memory in GB or None, word of the form or None, preset), the first that matches; the last
# entry of a pattern has neither and is the default.
_PRESETS: tuple[tuple[str, tuple[tuple[int | None, str | None, str], ...]], ...] = (
    ("v100", (
        (16, "pcie", "v100-pcie-16g"), (32, "pcie", "v100-pcie-32g"), (16, None, "v100-sxm2-16g"),
        (32, "sxm3", "v100-sxm3-32g"), (None, "pcie", "v100-pcie-32g"), (None, None, "v100-sxm2-32g"),
    )),
    ("a100", (
        (40, "pcie", "a100-pcie-40g"), (None, "pcie", "a100-pcie-80g"), (40, None, "a100-sxm-40g"),
        (None, None, "a100-sxm-80g"),
    )),
    ("a800", ((None, None, "a800-sxm-80g"),)),
    ("gh200", ((None, None, "gh200-96g"),)),
    ("gb200", ((None, None, "gb200"),)),
    ("gb300", ((None, None, "gb300"),)),
    ("h100", (
        (None, "pcie", "h100-pcie"), (96, None, "h100-sxm-96g-500w"), (95, None, "h100-sxm-96g-500w"),
        (94, None, "h100-sxm-96g-500w"), (None, "hbm2e", "h100-sxm-96g-500w"), (None, None, "h100-sxm"),
    )),
    ("h800", ((None, None, "h800-sxm"),)),
    ("h200", ((None, None, "h200-sxm"),)),
    ("b200", ((None, None, "b200-sxm"),)),
    ("b300", ((None, None, "b300-sxm"),)),
    ("mi300x", ((None, None, "mi300x"),)),
    ("mi210", ((None, None, "mi210"),)),
    (r"titan\s*rtx|rtx\s*titan", ((None, None, "titan-rtx"),)),
    (r"2080\s*ti", ((None, None, "rtx-2080-ti"),)),
    ("3090", ((None, None, "rtx-3090"),)),
    ("4090", ((None, None, "rtx-4090"),)),
    ("a6000", ((None, None, "rtx-a6000"),)),
    ("a10g", ((None, None, "a10g"),)),
    ("l40s", ((None, None, "l40s"),)),
    (r"\bt4\b", ((None, None, "t4"),)),
)  # fmt: skip
_COUNT = r"(?:(\d+)\s*[x\u00d7]\s*)?"
_RATE = re.compile(_COUNT + r"([\d.]+)\s*([TG])(B/s|bps|bit/s)", re.IGNORECASE)
_OMNI_PATH = re.compile(_COUNT + r"omni-?path", re.IGNORECASE)
_OMNI_PATH_GBIT_PER_S, _GIGABIT_BYTES = 100, 1e9 / 8
_NODE_DEVICES = {"gb200": 72, "gb300": 72}  # GPUs that NVLink joins, whatever the tray holds
_USUAL_NODE_DEVICES = 8
_PER_GPU_GBIT_PER_S = 200  # a bare rate from here on is one NIC of each GPU, below it one NIC of the node
_NOMINAL_W = {"h100-sxm": 700, "h100-sxm-96g-500w": 700, "a100-sxm-80g": 400, "a100-sxm-40g": 400, "h200-sxm": 700}
_PCIE_BYTES_PER_S = {"v100": 16e9, "a100": 31e9, "a800": 31e9, "h100": 63e9, "h800": 63e9, "h200": 63e9}


def cluster_of(record: Mapping[str, Any], num_devices: int, assumed: list[str]) -> ClusterSpec:
    """Return the `num_devices` devices and the links of `record`."""
    hardware = record["hardware"]
    preset = preset_of(record, assumed)
    per_node = _devices_per_node(hardware, preset, num_devices, assumed)
    found = cluster(f"{num_devices // per_node}x{per_node}x{preset}", by_data_sheet=True)
    intra = str(hardware.get("intra") or "")
    if re.search(r"pcie", intra, re.IGNORECASE) and not re.search(r"nvlink|nvswitch", intra, re.IGNORECASE):
        family = preset.split("-")[0]
        if "pcie" not in preset and family in _PCIE_BYTES_PER_S:
            link = found.intra_node.model_copy(update={"bytes_per_s": _PCIE_BYTES_PER_S[family]})
            found = found.model_copy(update={"intra_node": link})
    network = network_bytes_per_s(str(hardware.get("inter") or ""), hardware.get("gpus_per_node") or per_node, assumed)
    if network is not None:
        link = found.inter_node.model_copy(update={"bytes_per_s": network})
        found = found.model_copy(update={"inter_node": link})
    elif found.num_nodes > 1:
        assumed.append(f"network of {found.inter_node.bytes_per_s / 1e9:g} GB/s a GPU")
    return found


def preset_of(record: Mapping[str, Any], assumed: list[str]) -> str:
    """Return the name of the device preset that `hardware.gpu` means."""
    hardware = record["hardware"]
    text = str(hardware.get("gpu") or "").lower()
    if re.search(r"not (stated|named)|implied", text):
        assumed.append(f"GPU from {text!r}")
    memory_gb = hardware.get("gpu_mem_gb") or _memory_gb(text)
    intra = str(hardware.get("intra") or "").lower()
    pcie_only = "pcie" in intra and "nvl" not in intra
    for pattern, choices in _PRESETS:
        if not re.search(pattern, text):
            continue
        if memory_gb is None and _is_bare_h100_of_pytorch(record, text):
            assumed.append("H100 of the PyTorch developers: 96 GB, 500 W, as their pages state elsewhere")
            return "h100-sxm-96g-500w"
        if memory_gb is None and len(choices) > 1:
            assumed.append(f"{choices[-1][2]} for {text!r}")
        for choice_gb, form, preset in choices:
            fits_form = form is None or form in text or (form == "pcie" and pcie_only and "sxm" not in text)
            if fits_form and choice_gb in (None, memory_gb):
                return preset
    raise MissingField(f"hardware.gpu (no preset for {text or 'none'!r})")


def clock_of(record: Mapping[str, Any], preset: str) -> float:
    """Return the share of the clock that a stated power limit leaves.

    Near the top of the voltage curve power grows about with the square of the clock that it buys, so the share is the
    root of the power's share.
    """
    found = re.search(r"(\d{3})\s*w\b", f"{record['hardware'].get('gpu') or ''} {preset.replace('-', ' ')}".lower())
    nominal_w = _NOMINAL_W.get(preset)
    if found is None or nominal_w is None:
        return 1.0
    return min(1.0, round((int(found.group(1)) / nominal_w) ** 0.5, 3))


def network_bytes_per_s(text: str, gpus_per_node: int, assumed: list[str]) -> float | None:
    """Return the bytes/s of the network that one GPU has to itself, None where `text` does not say."""
    rate = _RATE.search(text)
    if rate is not None:
        count, value, prefix, unit = rate.groups()
        gbit_per_s = float(value) * (1000 if prefix in "tT" else 1) * (8 if unit[0] == "B" else 1)
    elif omni := _OMNI_PATH.search(text):
        count, gbit_per_s = omni.group(1), float(_OMNI_PATH_GBIT_PER_S)
        if count is None:
            return None
    else:
        return None
    per_gpu = re.search(r"per[- ]gpu|/gpu", text, re.IGNORECASE)
    if per_gpu:
        return gbit_per_s * int(count or 1) * _GIGABIT_BYTES
    if count is not None or re.search(r"node", text, re.IGNORECASE):
        return gbit_per_s * int(count or 1) * _GIGABIT_BYTES / gpus_per_node
    if gbit_per_s >= _PER_GPU_GBIT_PER_S:
        assumed.append(f"network {text!r} for each GPU")
        return gbit_per_s * _GIGABIT_BYTES
    assumed.append(f"network {text!r} for each node")
    return gbit_per_s * _GIGABIT_BYTES / gpus_per_node


def _memory_gb(text: str) -> int | None:
    """Return the memory that the GPU text prints; of "94-95 GB" the first."""
    found = re.search(r"(?<![a-z\d.])(\d{2,3})(?:-\d{2,3})?\s*g(?:i?b)?\b", text)
    return int(found.group(1)) if found else None


def _is_bare_h100_of_pytorch(record: Mapping[str, Any], text: str) -> bool:
    repo = str(record.get("source", {}).get("repo") or "").lower()
    return repo.startswith("pytorch/") and bool(re.search(r"h100", text)) and not re.search(r"sxm|pcie|nvl", text)


def _devices_per_node(hardware: Mapping[str, Any], preset: str, num_devices: int, assumed: list[str]) -> int:
    per_node = hardware.get("gpus_per_node")
    if per_node is None:
        per_node = _USUAL_NODE_DEVICES
        if num_devices > 1:
            assumed.append(f"{per_node} GPUs a node")
    if preset in _NODE_DEVICES and num_devices > per_node:
        per_node = _NODE_DEVICES[preset]
        assumed.append(f"NVLink joins {per_node} GPUs")
    per_node = min(int(per_node), num_devices)
    if num_devices % per_node:
        largest = max(size for size in range(1, per_node + 1) if num_devices % size == 0)
        assumed.append(f"nodes of {largest} instead of {per_node} GPUs, which do not divide {num_devices}")
        return largest
    return per_node
