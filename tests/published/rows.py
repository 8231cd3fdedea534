"""Records in the format of the shared measurements, made from a few fields."""

from __future__ import annotations

import copy
from typing import Any

_EMPTY: dict[str, Any] = {
    "id": "made-up",
    "source_group": "made-up",
    "trust": "A",
    "primary": True,
    "kind": "end_to_end",
    "task": "pretrain",
    "source": {"name": "Megatron-LM", "repo": "NVIDIA/Megatron-LM", "date": "2021-04"},
    "model": {
        "name": "GPT", "arch": "gpt", "layers": 40, "hidden": 6144, "ffn": 24576, "heads": 48, "kv_heads": 48,
        "vocab": 51200, "seq": 2048, "tied_embeddings": True, "n_experts": None, "topk": None, "moe_ffn": None,
        "extra": None,
    },
    "hardware": {
        "gpu": "A100 80GB SXM", "n_gpus": 256, "gpu_mem_gb": 80, "gpus_per_node": 8, "intra": "NVLink/NVSwitch",
        "inter": "8x 200Gb/s HDR InfiniBand per node",
    },
    "precision": "fp16 mixed",
    "parallel": {
        "tp": 8, "sp": False, "cp": 1, "pp": 1, "vpp": 1, "ep": None, "etp": None, "dp": 32, "zero": 0, "fsdp": None,
        "other": None,
    },
    "batch": {"mbs": 8, "gbs": 1024, "grad_accum": None, "gbs_tokens": None},
    "recompute": "full",
    "schedule": None,
    "kernels": {"flash": False},
    "optimizer": None,
    "offload": None,
    "notes": None,
    "measured": {"peak_mem": None, "mem_kind": None, "oom": False, "extra": None},
    "norm": {
        "iter_time_s": None, "peak_mem_gib_range": None, "recompute_known": True, "plan_complete": True,
        "degrees_multiply_to_gpus": True,
    },
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    """Return a record of an 18.4-billion GPT of 2021 on 256 A100, with fields changed: mappings are merged."""
    made = copy.deepcopy(_EMPTY)
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(made.get(name), dict):
            made[name].update(value)
        else:
            made[name] = value
    return made
