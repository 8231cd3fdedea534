"""T5: an encoder and a decoder of pre-norm blocks without biases, with learned biases for relative positions.

Version 1.0 has a feed-forward part with ReLU and ties the output to the embedding; version 1.1 and Flan have a gated
one and do neither tie nor scale. Dropout fields are not read: dropout belongs to the job.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.base import LONGEST_SEQ
from meshwright.spec.families.config import Config
from meshwright.spec.families.layers import groups_of
from meshwright.spec.model import (
    MOST_LAYERS,
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    ModelSpec,
    pad_vocab,
    relative_table,
    source_states,
    target_states,
)
from meshwright.spec.parts import Activation, AttentionSpec, MlpSpec, RelativeSpec

_EPS = 1e-6  # the default of layer_norm_epsilon
_BUCKETS, _FEWEST_BUCKETS, _DISTANCE = 32, 4, 128  # the defaults, and what leaves a bucket for each side and kind
_USUAL_SEQ_LEN = 512  # of pre-training, arXiv 1910.10683, section 3.1.2
_FEED_FORWARD: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gated-relu": "relu",
    "gated-gelu": "gelu_tanh",  # not what the name says; the files of version 1.1 mean this
    "gated-silu": "silu",
}
_ARCHITECTURES = {
    "T5Model": "tokens",
    "T5ForConditionalGeneration": "tokens",
    "T5WithLMHeadModel": "tokens",  # the older name
}


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a T5 `config` describes."""
    config.architecture(_ARCHITECTURES, "tokens")
    config.refuse_unless("is_encoder_decoder", [True], "an encoder or a decoder alone")
    hidden, vocab = config.count("d_model"), config.count("vocab_size")
    padded, eps = pad_vocab(vocab), config.number("layer_norm_epsilon", _EPS)
    is_tied = config.flag("tie_word_embeddings", default=True)
    is_scaled = config.flag("scale_decoder_outputs", default=is_tied)
    num_encoder_blocks = config.count("num_layers", most=MOST_LAYERS)
    num_decoder_blocks = config.count("num_decoder_layers", num_encoder_blocks, most=MOST_LAYERS)
    embedding = EmbeddingLayer(hidden_size=hidden, vocab_size=vocab, padded_vocab_size=padded, targets=True)
    head = HeadLayer(
        hidden_size=hidden,
        vocab_size=vocab,
        padded_vocab_size=padded,
        norm="rmsnorm",
        norm_eps=eps,
        logit_scale=hidden**-0.5 if is_scaled else 1.0,
        length="target_seq",
    )
    seq_len = config.count("n_positions", _USUAL_SEQ_LEN, most=LONGEST_SEQ)
    encoder, decoder = _encoder(config, num_encoder_blocks), _decoder(config, num_decoder_blocks)
    return ModelSpec(
        name=name,
        family="t5",
        groups=groups_of([embedding, *encoder, *decoder, head]),
        tied_embedding=is_tied,
        usual_seq_len=seq_len,
        # A key of ours, because such a file does not say how long targets are.
        usual_target_seq_len=config.count("target_seq_len", seq_len, most=LONGEST_SEQ),
    )


def _encoder(config: Config, num_blocks: int) -> Iterator[BlockLayer]:
    """Yield the encoder's blocks; the embedded targets travel through them, and the shared table up to the last."""
    for index in range(num_blocks):
        is_last = index == num_blocks - 1
        attention = _attention(config, causal=False, relative=_relative(config, owns_table=index == 0))
        targets, table = target_states(config.count("d_model")), relative_table(attention)
        yield _block(config, attention).model_copy(
            update={"closing_norm": is_last, "carries": (targets,) if is_last else (targets, table)}
        )


def _decoder(config: Config, num_blocks: int) -> Iterator[BlockLayer]:
    """Yield the decoder's blocks; the encoder's states and the shared table travel up to the last."""
    cross_attention = _attention(config, causal=False, relative=None)
    for index in range(num_blocks):
        attention = _attention(config, causal=True, relative=_relative(config, owns_table=index == 0))
        carried = (source_states(config.count("d_model")), relative_table(attention))
        yield _block(config, attention).model_copy(
            update={
                "cross_attention": cross_attention,
                "length": "target_seq",
                "carries": () if index == num_blocks - 1 else carried,
            }
        )


def _block(config: Config, attention: AttentionSpec) -> BlockLayer:
    kind = config.choice("feed_forward_proj", {name: name for name in _FEED_FORWARD}, "relu")
    return BlockLayer(
        hidden_size=config.count("d_model"),
        norm="rmsnorm",
        norm_eps=config.number("layer_norm_epsilon", _EPS),
        attention=attention,
        mlp=MlpSpec(
            ffn_size=config.count("d_ff"), gated=kind.startswith("gated-"), activation=_FEED_FORWARD[kind], bias=False
        ),
    )


def _attention(config: Config, *, causal: bool, relative: RelativeSpec | None) -> AttentionSpec:
    heads = config.count("num_heads")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=config.count("d_kv"),
        causal=causal,
        scaled=False,
        relative=relative,
    )


def _relative(config: Config, *, owns_table: bool) -> RelativeSpec:
    buckets = config.count("relative_attention_num_buckets", _BUCKETS)
    distance = config.count("relative_attention_max_distance", _DISTANCE)
    if buckets < _FEWEST_BUCKETS:
        raise config.error("relative_attention_num_buckets", f"must be at least {_FEWEST_BUCKETS}, not {buckets}")
    if distance <= buckets // 2:
        raise config.error(
            "relative_attention_max_distance",
            f"must be above half of relative_attention_num_buckets ({buckets // 2}), not {distance}",
        )
    return RelativeSpec(num_buckets=buckets, max_distance=distance, owns_table=owns_table)
