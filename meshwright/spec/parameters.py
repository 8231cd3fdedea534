"""The parameters of a layer, once: names, shapes and which dimension tensor parallelism splits.

The cost model counts bytes from this list, the runtime splits weights by it, and a test holds the
torch modules against it. Column-parallel weights split dimension 0 (their outputs are split),
row-parallel weights dimension 1 (their inputs are split and their outputs summed). The weights of
all experts of a layer are one tensor of three dimensions, experts first, and split like those of one
expert. Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) has down-projections that every
rank holds whole, and up-projections split by heads. What is small is whole on every rank: norms, positions,
patch embeddings, patch merging, poolers, classifiers, and the table of relative positions that a stack shares;
Swin's tables are split by heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    CustomLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerSpec,
    MergeLayer,
    ModelSpec,
    PatchEmbeddingLayer,
)
from meshwright.spec.parts import AttentionSpec, ExpertsSpec, LatentSpec, MlpSpec, Norm
from meshwright.spec.tensors import EXPERTS, ParameterSpec


@lru_cache(maxsize=1024)
def layer_parameters(layer: LayerSpec) -> tuple[ParameterSpec, ...]:
    """Return the parameters of `layer`, in module order. A tied head still lists its `output.weight`."""
    match layer:
        case EmbeddingLayer():
            return tuple(_embedding(layer))
        case PatchEmbeddingLayer():
            return tuple(_patch_embedding(layer))
        case BlockLayer():
            return tuple(_block(layer))
        case MergeLayer():
            return tuple(_merge(layer))
        case HeadLayer():
            return tuple(_head(layer))
        case ClassifierLayer():
            return tuple(_classifier(layer))
        case CustomLayer():
            return layer.parameters


def num_parameters(model: ModelSpec) -> int:
    """Return the trainable parameters of `model`: unpadded vocabulary, tied weights once."""
    total = 0
    for group in model.groups:
        total += group.num_layers * sum(p.num_elements for p in layer_parameters(group.layer))
    for layer in (model.embedding, model.head):
        if isinstance(layer, EmbeddingLayer | HeadLayer):
            unused_rows = layer.padded_vocab_size - layer.vocab_size
            total -= unused_rows * (layer.hidden_size + (isinstance(layer, HeadLayer) and layer.bias))
    if model.tied_embedding:
        total -= model.vocab_size * model.embedding.hidden_size
    return total


def _embedding(layer: EmbeddingLayer) -> Iterator[ParameterSpec]:
    hidden = layer.hidden_size
    yield ParameterSpec(name="token.weight", shape=(layer.padded_vocab_size, hidden), tp_dim=0, is_looked_up=True)
    if layer.max_positions:
        yield ParameterSpec(name="position.weight", shape=(layer.max_positions, hidden), is_looked_up=True)
    if layer.token_types:
        yield ParameterSpec(name="token_type.weight", shape=(layer.token_types, hidden), is_looked_up=True)
    if layer.norm is not None:
        yield from _norm("norm", layer.norm, hidden)


def _patch_embedding(layer: PatchEmbeddingLayer) -> Iterator[ParameterSpec]:
    hidden = layer.hidden_size
    yield from _linear("projection", hidden, layer.patch_elements, tp_dim=None, bias=True)
    if layer.class_token:
        yield ParameterSpec(name="class_token", shape=(hidden,))
    if layer.positions:
        yield ParameterSpec(name="position.weight", shape=(layer.num_tokens, hidden), is_looked_up=True)
    if layer.norm is not None:
        yield from _norm("norm", layer.norm, hidden)


def _block(layer: BlockLayer) -> Iterator[ParameterSpec]:
    attention, mlp, hidden = layer.attention, layer.mlp, layer.hidden_size
    yield from _norm("norm1", layer.norm, hidden)
    if attention.latent is None:
        yield from _attention("attention", attention, hidden)
    else:
        yield from _latent_attention(attention, attention.latent, hidden, layer.norm)
    if layer.cross_attention is not None:
        yield from _norm("cross_norm", layer.norm, hidden)
        yield from _attention("cross_attention", layer.cross_attention, hidden)
    yield from _norm("norm2", layer.norm, hidden)
    if mlp.experts is None:
        yield from _mlp("mlp", mlp, mlp.ffn_size, hidden)
    else:
        yield from _experts(mlp, mlp.experts, hidden)
    if layer.closing_norm:
        yield from _norm("closing_norm", layer.norm, hidden)


def _attention(name: str, attention: AttentionSpec, hidden: int) -> Iterator[ParameterSpec]:
    queries = attention.num_heads * attention.head_size
    keys = attention.num_kv_heads * attention.head_size
    yield from _linear(f"{name}.q", queries, hidden, tp_dim=0, bias=attention.bias)
    yield from _linear(f"{name}.k", keys, hidden, tp_dim=0, bias=attention.bias)
    yield from _linear(f"{name}.v", keys, hidden, tp_dim=0, bias=attention.bias)
    yield from _linear(f"{name}.out", hidden, queries, tp_dim=1, bias=attention.output_bias)
    if attention.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield ParameterSpec(name=f"{name}.{norm}.weight", shape=(attention.head_size,), acts_on_split=True)
    if attention.relative is not None and attention.relative.owns_table:
        table = (attention.relative.num_buckets, attention.num_heads)
        yield ParameterSpec(name=f"{name}.relative.weight", shape=table, is_looked_up=True)
    if attention.windows is not None:
        table = (attention.windows.num_positions, attention.num_heads)
        yield ParameterSpec(name=f"{name}.relative.weight", shape=table, tp_dim=1, is_looked_up=True)


def _latent_attention(attention: AttentionSpec, latent: LatentSpec, hidden: int, norm: Norm) -> Iterator[ParameterSpec]:
    queries = attention.num_heads * attention.head_size
    if latent.query_rank:
        yield ParameterSpec(name="attention.q_a.weight", shape=(latent.query_rank, hidden))
        yield from _norm("attention.q_a_norm", norm, latent.query_rank)
        yield from _linear("attention.q_b", queries, latent.query_rank, tp_dim=0, bias=False)
    else:
        yield from _linear("attention.q", queries, hidden, tp_dim=0, bias=False)
    yield ParameterSpec(name="attention.kv_a.weight", shape=(latent.kv_rank + latent.rope_size, hidden))
    yield from _norm("attention.kv_a_norm", norm, latent.kv_rank)
    keys_and_values = attention.num_heads * (attention.head_size - latent.rope_size + latent.value_size)
    yield from _linear("attention.kv_b", keys_and_values, latent.kv_rank, tp_dim=0, bias=False)
    yield from _linear("attention.out", hidden, attention.num_heads * latent.value_size, tp_dim=1, bias=False)


def _mlp(name: str, mlp: MlpSpec, ffn_size: int, hidden: int) -> Iterator[ParameterSpec]:
    if mlp.gated:
        yield from _linear(f"{name}.gate", ffn_size, hidden, tp_dim=0, bias=mlp.bias)
    yield from _linear(f"{name}.up", ffn_size, hidden, tp_dim=0, bias=mlp.bias)
    yield from _linear(f"{name}.down", hidden, ffn_size, tp_dim=1, bias=mlp.bias)


def _experts(mlp: MlpSpec, experts: ExpertsSpec, hidden: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name="mlp.router.weight", shape=(experts.num_experts, hidden))
    count = experts.num_experts
    for name in ("gate", "up") if mlp.gated else ("up",):
        yield ParameterSpec(name=f"{EXPERTS}{name}.weight", shape=(count, mlp.ffn_size, hidden), tp_dim=1)
    yield ParameterSpec(name=f"{EXPERTS}down.weight", shape=(count, hidden, mlp.ffn_size), tp_dim=2)
    if experts.shared_ffn_size:
        yield from _mlp("mlp.shared", mlp, experts.shared_ffn_size, hidden)


def _merge(layer: MergeLayer) -> Iterator[ParameterSpec]:
    yield from _norm("norm", layer.norm, layer.merged_size)
    yield from _linear("reduction", 2 * layer.hidden_size, layer.merged_size, tp_dim=None, bias=False)


def _head(layer: HeadLayer) -> Iterator[ParameterSpec]:
    if layer.transform is not None:
        yield from _linear("transform", layer.hidden_size, layer.hidden_size, tp_dim=None, bias=True)
    yield from _norm("norm", layer.norm, layer.hidden_size)
    yield from _linear("output", layer.padded_vocab_size, layer.hidden_size, tp_dim=0, bias=layer.bias)


def _classifier(layer: ClassifierLayer) -> Iterator[ParameterSpec]:
    if layer.norm is not None:
        yield from _norm("norm", layer.norm, layer.hidden_size)
    if layer.pooler:
        yield from _linear("pooler", layer.hidden_size, layer.hidden_size, tp_dim=None, bias=True)
    yield from _linear("output", layer.num_classes, layer.hidden_size, tp_dim=None, bias=True)


def _norm(name: str, norm: Norm, size: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name=f"{name}.weight", shape=(size,))
    if norm == "layernorm":
        yield ParameterSpec(name=f"{name}.bias", shape=(size,))


def _linear(name: str, num_outputs: int, num_inputs: int, *, tp_dim: int | None, bias: bool) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name=f"{name}.weight", shape=(num_outputs, num_inputs), tp_dim=tp_dim)
    if bias:
        # The bias of a row-parallel layer is added after the sum, so it is whole on every rank.
        yield ParameterSpec(name=f"{name}.bias", shape=(num_outputs,), tp_dim=0 if tp_dim == 0 else None)
