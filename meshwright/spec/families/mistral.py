"""Mistral: Llama whose attention may be limited to a sliding window."""

from __future__ import annotations

from meshwright.spec.base import LONGEST_SEQ
from meshwright.spec.families import llama
from meshwright.spec.families.config import Config
from meshwright.spec.model import ModelSpec

_WINDOW = 4096  # the default of sliding_window


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a Mistral `config` describes."""
    config.refuse_unless("layer_types", [], "one entry per kind of layer")
    require_kv_heads(config)
    attention = llama.attention(
        config, bias=False, output_bias=False, qk_norm=False, sliding_window=sliding_window(config, _WINDOW)
    )
    return llama.build(config, name, family="mistral", attention=attention, mlp_bias=False)


def sliding_window(config: Config, default: int) -> int:
    """Return the tokens that a token sees (0: all before it), `default` when the file does not say.

    Null says that there is no window, which is not the same as silence.
    """
    if config.is_null("sliding_window") or (not default and config.get("sliding_window") is None):
        return 0
    return config.count("sliding_window", default, most=LONGEST_SEQ)


def require_kv_heads(config: Config) -> None:
    """Raise unless the file says how many heads keys have: its absence means 8 here, and elsewhere as many as queries.

    Every published file says it.
    """
    config.count("num_key_value_heads")
