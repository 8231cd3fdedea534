"""BERT: an encoder of post-norm blocks with biases, learned positions, and a head for masked tokens or for classes.

Dropout fields are not read: dropout belongs to the job.
"""

from __future__ import annotations

from meshwright.spec.base import LONGEST_SEQ
from meshwright.spec.families.config import Config
from meshwright.spec.families.layers import groups_of
from meshwright.spec.model import (
    MOST_LAYERS,
    BlockLayer,
    ClassifierLayer,
    EmbeddingLayer,
    HeadLayer,
    LastLayer,
    ModelSpec,
    pad_vocab,
)
from meshwright.spec.parts import AttentionSpec

_EPS = 1e-12  # the default of layer_norm_eps
_TOKEN_TYPES = 2  # the default of type_vocab_size
# BertForPreTraining also predicts whether two sentences follow each other; its head for tokens is what is read.
_HEADS = {
    "BertModel": "tokens",
    "BertForMaskedLM": "tokens",
    "BertForPreTraining": "tokens",
    "BertForSequenceClassification": "classes",
}


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a BERT `config` describes."""
    _refuse(config)
    vocab, positions = config.count("vocab_size"), config.count("max_position_embeddings", most=LONGEST_SEQ)
    block = _block(config)
    embedding = EmbeddingLayer(
        hidden_size=block.hidden_size,
        vocab_size=vocab,
        padded_vocab_size=pad_vocab(vocab),
        max_positions=positions,
        token_types=config.count("type_vocab_size", _TOKEN_TYPES),
        norm="layernorm",
        norm_eps=block.norm_eps,
    )
    head = _head(config, embedding, block)
    num_blocks = config.count("num_hidden_layers", most=MOST_LAYERS)
    return ModelSpec(
        name=name,
        family="bert",
        groups=groups_of([embedding, *[block] * num_blocks, head]),
        tied_embedding=isinstance(head, HeadLayer) and config.flag("tie_word_embeddings", default=True),
        max_seq_len=positions,
        usual_seq_len=positions,
    )


def _refuse(config: Config) -> None:
    config.refuse_unless("position_embedding_type", ["absolute"], "relative positions")
    config.refuse_unless("is_decoder", [False], "a causal BERT")
    config.refuse_unless("add_cross_attention", [False], "not an encoder alone")
    config.refuse_unless("chunk_size_feed_forward", [0], "a feed-forward part in chunks")
    config.refuse_unless("pruned_heads", [{}], "blocks of different shapes")


def _block(config: Config) -> BlockLayer:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    return BlockLayer(
        hidden_size=hidden,
        norm="layernorm",
        norm_eps=config.number("layer_norm_eps", _EPS),
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config.divisible("hidden_size", hidden, "num_attention_heads", heads),
            bias=True,
            output_bias=True,
            causal=False,
        ),
        mlp=config.mlp(config.count("intermediate_size"), "hidden_act", default_act="gelu", gated=False, bias=True),
        post_norm=True,
    )


def _head(config: Config, embedding: EmbeddingLayer, block: BlockLayer) -> LastLayer:
    if config.architecture(_HEADS, "tokens") == "classes":
        return ClassifierLayer(
            hidden_size=block.hidden_size, num_classes=config.num_classes(), pooling="first", pooler=True
        )
    return HeadLayer(
        hidden_size=block.hidden_size,
        vocab_size=embedding.vocab_size,
        padded_vocab_size=embedding.padded_vocab_size,
        norm="layernorm",
        norm_eps=block.norm_eps,
        transform=block.mlp.activation,
        bias=True,
    )
