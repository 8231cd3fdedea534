"""Uniform runs for tests: a GPT with an MLP of 4 h on A100s, as Megatron-LM trains it, unless said otherwise."""

from __future__ import annotations

from typing import Any

from meshwright.spec.library import cluster
from meshwright.spec.model import (
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerGroup,
    ModelSpec,
)
from meshwright.spec.parts import AttentionSpec, MlpSpec
from meshwright.spec.run import RunSpec

HIDDEN, HEADS, VOCAB = 2048, 16, 51200


def gpt(*, num_blocks: int = 8, hidden: int = HIDDEN, heads: int = HEADS, tied: bool = False) -> ModelSpec:
    """Return a GPT without biases, so that parameters are easy to count by hand."""
    block = BlockLayer(
        hidden_size=hidden,
        norm="layernorm",
        norm_eps=1e-5,
        attention=AttentionSpec(num_heads=heads, num_kv_heads=heads, head_size=hidden // heads),
        mlp=MlpSpec(ffn_size=4 * hidden, gated=False, activation="gelu"),
    )
    return of_blocks([(num_blocks, block)], tied=tied)


def of_blocks(blocks: list[tuple[int, BlockLayer]], *, vocab: int = VOCAB, tied: bool = False) -> ModelSpec:
    """Return a model of `blocks`, by count."""
    first = blocks[0][1]
    sizes = {"hidden_size": first.hidden_size, "vocab_size": vocab, "padded_vocab_size": vocab}
    return ModelSpec(
        name="test",
        family="gpt2",
        tied_embedding=tied,
        groups=(
            LayerGroup(num_layers=1, layer=EmbeddingLayer(**sizes)),
            *(LayerGroup(num_layers=count, layer=block) for count, block in blocks),
            LayerGroup(num_layers=1, layer=HeadLayer(norm=first.norm, norm_eps=first.norm_eps, **sizes)),
        ),
    )


def make_run(**changes: Any) -> RunSpec:
    """Return a run of 8 A100s with micro-batches of one sample; `devices` is their number and kind."""
    values: dict[str, Any] = {
        "model": gpt(),
        "cluster": cluster(changes.pop("devices", "8xa100-sxm-80g")),
        "framework": "megatron",
        "seq_len": 2048,
        "global_batch_size": 64,
        "micro_batch_size": 1,
    }
    return RunSpec(**{**values, **changes})
