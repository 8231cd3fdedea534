"""Qwen 2 and 3: Llama with biases on q, k and v (Qwen 2), or with norms on the heads of q and k (Qwen 3)."""

from __future__ import annotations

from typing import Any, cast

from meshwright.spec.families import llama
from meshwright.spec.families.config import Config
from meshwright.spec.model import ModelSpec

_QWEN3_HEAD_SIZE = 128  # the default of head_dim, whatever the hidden size
_FULL = "full_attention"


def read_qwen2(config: Config, name: str) -> ModelSpec:
    """Return the model that a Qwen 2 `config` describes."""
    _refuse_windows(config)
    attention = llama.attention(config, bias=True, output_bias=False, qk_norm=False)
    return llama.build(config, name, family="qwen2", attention=attention, mlp_bias=False)


def read_qwen3(config: Config, name: str) -> ModelSpec:
    """Return the model that a Qwen 3 `config` describes."""
    _refuse_windows(config)
    bias = config.flag("attention_bias", default=False)
    attention = llama.attention(config, bias=bias, output_bias=bias, qk_norm=True, head_size=_QWEN3_HEAD_SIZE)
    return llama.build(config, name, family="qwen3", attention=attention, mlp_bias=False)


def _refuse_windows(config: Config) -> None:
    config.refuse_unless("use_sliding_window", [False], "attention in a window")
    kinds: Any = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, cast("list[Any]", kinds))) != {_FULL}):
        raise config.error("layer_types", f"only {_FULL} is supported")
