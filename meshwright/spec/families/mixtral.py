"""Mixtral: Mistral with a mixture of experts in the place of the feed-forward part."""

from __future__ import annotations

from meshwright.spec.families import llama
from meshwright.spec.families.config import Config
from meshwright.spec.families.mistral import require_kv_heads, sliding_window
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import ExpertsSpec

_THETA = 1e6  # the default of rope_theta
_EPS = 1e-5  # the default of rms_norm_eps


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a Mixtral `config` describes."""
    config.refuse_unless("output_router_logits", [False], "a loss that balances experts")
    config.refuse_unless("router_jitter_noise", [0.0], "noise on what the router sees")
    require_kv_heads(config)
    num_experts, top_k = config.count("num_local_experts"), config.count("num_experts_per_tok")
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"{top_k} is above num_local_experts ({num_experts})")
    return llama.build(
        config,
        name,
        family="mixtral",
        attention=llama.attention(
            config,
            bias=False,
            output_bias=False,
            qk_norm=False,
            sliding_window=sliding_window(config, 0),
            theta=_THETA,
        ),
        mlp_bias=False,
        experts=ExpertsSpec(num_experts=num_experts, top_k=top_k),
        eps=_EPS,
    )
