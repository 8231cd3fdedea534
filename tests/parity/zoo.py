"""The other families under every dimension: encoders, encoder-decoders, images, windows; dropout on and off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from examples import gated_conv
from meshwright.spec.families import model_from_config
from meshwright.spec.model import ModelSpec
from tests.parity.cases import Case, make_plan, s

DROPOUT = 0.2
# Other ends or parts of a family, which need not be seen under every dimension once more.
VARIANTS, OF_VARIANTS = ("bert-classifier", "t5-gated-untied"), ("tp2-recompute", "mixed-uneven")
# Heads and widths that tp 2 divides; vocabularies and classes that are not round numbers.
_TEXT = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _TEXT | {"model_type": "bert", "num_hidden_layers": 4, "max_position_embeddings": 12},
    "bert-classifier": _TEXT
    | {
        "model_type": "bert",
        "num_hidden_layers": 4,
        "max_position_embeddings": 12,
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 3,
    },
    "t5": {
        "model_type": "t5", "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 3, "n_positions": 12, "target_seq_len": 3, "relative_attention_num_buckets": 4,
    },
    "t5-gated-untied": {
        "model_type": "t5", "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3,
        "num_decoder_layers": 2, "n_positions": 14, "target_seq_len": 5, "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 4,
        "tie_word_embeddings": False,
    },
    "vit": {
        "model_type": "vit", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
        "num_hidden_layers": 4, "image_size": 12, "patch_size": 4, "num_channels": 2, "num_labels": 5,
    },
    "swin": {
        "model_type": "swin", "embed_dim": 16, "depths": [2, 2, 1], "num_heads": [2, 4, 4], "window_size": 2,
        "image_size": 16, "patch_size": 2, "num_channels": 1, "num_labels": 5,
    },
    "mistral": _TEXT
    | {
        "model_type": "mistral", "num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 12,
        "sliding_window": 5,
    },
    "qwen2": _TEXT
    | {
        "model_type": "qwen2", "num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 12,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def family(name: str) -> ModelSpec:
    """Return the small model called `name`."""
    return model_from_config(CONFIGS[name], name=name, where=name)


def own() -> ModelSpec:
    """Return a model outside the zoo, as the example describes it."""
    model = gated_conv.model(hidden=32)
    builder = {"builder": "examples.gated_conv:build"}
    groups = [
        group.model_copy(update={"layer": group.layer.model_copy(update=builder)} if group.num_layers > 1 else {})
        for group in model.groups
    ]
    return model.model_copy(update={"groups": tuple(groups)})


def zoo_cases() -> list[Case]:
    models = {name: family(name) for name in CONFIGS} | {"own": own()}
    cases = [case for name, model in models.items() for case in _cases(name, model)]
    return [case for case in cases if not case.name.startswith(VARIANTS) or case.name.endswith(OF_VARIANTS)]


def _cases(name: str, model: ModelSpec) -> Iterator[Case]:
    """Yield every dimension, and mixes of them with uneven stages; the middle of a model is all but its ends."""
    layers = len(model.layers)
    middle = layers - 2
    one, tp2, again = s(), s(tp=2), s(tp=2, recompute=True)

    def case(kind: str, stages: Any, *, micro_batches: int = 2, batch: int = 8, dropout: float = 0.0) -> Case:
        plan = make_plan(model, stages, micro_batches=micro_batches, batch=batch, dropout=dropout)
        return Case(name=f"{name}-{kind}", plan=plan)

    yield case("dp2", [[(layers, s(rep=2))]], dropout=DROPOUT)
    yield case("zero3x2", [[(layers, s(shard=2, zero=3))]])
    yield case("tp2-recompute", [[(1, tp2), (middle, again), (1, tp2)]], batch=4, dropout=DROPOUT)
    yield case("pp2", [[(3, one)], [(layers - 3, one)]], micro_batches=4)
    yield case("hsdp2x2", [[(layers, s(rep=2, shard=2, zero=3))]])
    first, last = s(tp=2), s(tp=2)
    yield case(
        "mixed-uneven",
        [
            [(1, first), (1, s(shard=2, zero=3)), (1, s(rep=2, recompute=True))],
            [(1, s(tp=2, recompute=True)), (layers - 6, s(shard=2, zero=2)), (1, s(tp=2)), (1, last)],
        ],
        micro_batches=4,
        batch=16,
        dropout=DROPOUT,
    )
