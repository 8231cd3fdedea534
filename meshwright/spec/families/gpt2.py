"""GPT-2 (also used for GPT-3 sizes): learned positions, layer norms, biases, tied output by default.

Dropout fields are not read: dropout belongs to the job.
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
from meshwright.spec.parts import AttentionSpec

_FFN_RATIO = 4  # the default of n_inner


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a GPT-2 `config` describes."""
    config.refuse_unless("scale_attn_weights", [True], "attention without 1/sqrt(head size)")
    config.refuse_unless("scale_attn_by_inverse_layer_idx", [False], "attention scaled by layer")
    config.refuse_unless("reorder_and_upcast_attn", [False], "another attention arithmetic")
    config.refuse_unless("add_cross_attention", [False], "not a decoder-only model")
    hidden, heads = config.count("n_embd"), config.count("n_head")
    vocab, eps = config.count("vocab_size"), config.number("layer_norm_epsilon", 1e-5)
    positions = config.count("n_positions", most=LONGEST_SEQ)
    block = BlockLayer(
        hidden_size=hidden,
        norm="layernorm",
        norm_eps=eps,
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config.divisible("n_embd", hidden, "n_head", heads),
            bias=True,
            output_bias=True,
        ),
        mlp=config.mlp(
            config.count("n_inner", _FFN_RATIO * hidden),
            "activation_function",
            default_act="gelu_new",
            gated=False,
            bias=True,
        ),
    )
    embedding = EmbeddingLayer(
        hidden_size=hidden, vocab_size=vocab, padded_vocab_size=pad_vocab(vocab), max_positions=positions
    )
    head = HeadLayer(
        hidden_size=hidden, vocab_size=vocab, padded_vocab_size=pad_vocab(vocab), norm="layernorm", norm_eps=eps
    )
    return ModelSpec(
        name=name,
        family="gpt2",
        groups=(
            LayerGroup(num_layers=1, layer=embedding),
            LayerGroup(num_layers=config.count("n_layer", most=MOST_LAYERS), layer=block),
            LayerGroup(num_layers=1, layer=head),
        ),
        tied_embedding=config.flag("tie_word_embeddings", default=True),
        max_seq_len=positions,
    )
