"""Llama 1 to 3: RMS norms, rotary positions, grouped queries, a gated feed-forward part.

`attention` and `build` are shared with the families that differ from Llama in biases, q/k norms, a sliding window
and experts only.
"""

from __future__ import annotations

from meshwright.spec.base import LONGEST_SEQ
from meshwright.spec.families.config import Config
from meshwright.spec.model import (
    MOST_LAYERS,
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerGroup,
    ModelSpec,
    pad_vocab,
)
from meshwright.spec.parts import AttentionSpec, ExpertsSpec, RopeScaling

_DEFAULT_THETA = 10000.0
_DEFAULT_EPS = 1e-6
_ROPE_TYPES = {"default": "default", "llama3": "llama3"}


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a Llama `config` describes."""
    bias = config.flag("attention_bias", default=False)
    return build(
        config,
        name,
        family="llama",
        attention=attention(config, bias=bias, output_bias=bias, qk_norm=False),
        mlp_bias=config.flag("mlp_bias", default=False),
    )


def attention(
    config: Config,
    *,
    bias: bool,
    output_bias: bool,
    qk_norm: bool,
    head_size: int | None = None,
    sliding_window: int = 0,
    theta: float = _DEFAULT_THETA,
) -> AttentionSpec:
    """Return the attention part.

    `head_size` and `theta` are the family's defaults; without the first, a head has hidden_size / heads.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    config.divisible("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if config.get("head_dim") is None and head_size is None:
        head_size = config.divisible("hidden_size", hidden, "num_attention_heads", heads)
    head_size = config.count("head_dim", head_size)
    if head_size % 2:
        raise config.error("head_dim", f"must be even for rotary positions, not {head_size}")
    theta, scaling = _rope(config, theta)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        bias=bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        rotary=True,
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=sliding_window,
    )


def build(
    config: Config,
    name: str,
    *,
    family: str,
    attention: AttentionSpec,
    mlp_bias: bool,
    experts: ExpertsSpec | None = None,
    eps: float = _DEFAULT_EPS,
) -> ModelSpec:
    """Return the model of a Llama-like `config` with this attention part. `eps` is the family's default."""
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    eps = config.number("rms_norm_eps", eps)
    mlp = config.mlp(config.count("intermediate_size"), "hidden_act", default_act="silu", gated=True, bias=mlp_bias)
    mlp = mlp.model_copy(update={"experts": experts})
    embedding = EmbeddingLayer(hidden_size=hidden, vocab_size=vocab, padded_vocab_size=pad_vocab(vocab))
    block = BlockLayer(hidden_size=hidden, norm="rmsnorm", norm_eps=eps, attention=attention, mlp=mlp)
    head = HeadLayer(
        hidden_size=hidden, vocab_size=vocab, padded_vocab_size=pad_vocab(vocab), norm="rmsnorm", norm_eps=eps
    )
    return ModelSpec(
        name=name,
        family=family,
        groups=(
            LayerGroup(num_layers=1, layer=embedding),
            LayerGroup(num_layers=config.count("num_hidden_layers", most=MOST_LAYERS), layer=block),
            LayerGroup(num_layers=1, layer=head),
        ),
        tied_embedding=config.flag("tie_word_embeddings", default=False),
        max_seq_len=config.count("max_position_embeddings", most=LONGEST_SEQ),
    )


def _rope(config: Config, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and its rescaling.

    Newer files hold both in `rope_parameters`; older ones hold `rope_theta` beside `rope_scaling`.
    """
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.section(field)
    if any(isinstance(value, dict) for value in rope.values()):
        raise config.error(field, "one entry per kind of layer is not supported; only one for all layers")
    for owner in (config, rope):
        owner.refuse_unless("partial_rotary_factor", [1.0], "rotation of a part of each head")
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    kind_field = "type" if rope.get("rope_type") is None else "rope_type"  # the older name
    if rope.get(kind_field) is None and rope.get("factor") is not None:
        raise rope.error("rope_type", "required beside factor, but missing")
    if rope.choice(kind_field, _ROPE_TYPES, "default") == "default":
        return theta, None
    return theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.count("original_max_position_embeddings", most=LONGEST_SEQ),
    )
