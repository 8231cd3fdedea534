"""The parameters of a layer, once: names, shapes and which dimension tensor parallelism splits.

The cost model counts bytes from this list, the runtime splits weights by it, and a test holds the
torch modules against it. Column-parallel weights split dimension 0 (their outputs are split),
row-parallel weights dimension 1 (their inputs are split and their outputs summed).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from meshwright.spec.base import NonNegativeInt, PositiveInt, Spec, divide
from meshwright.spec.model import BlockLayer, EmbeddingLayer, HeadLayer, LayerSpec, ModelSpec, Norm


class ParameterSpec(Spec):
    """One parameter of a layer. `tp_dim` None: every tensor-parallel rank holds all of it.

    `acts_on_split` marks a replicated parameter that works on split activations (a norm over
    heads), so that its gradient must be summed over the tensor-parallel ranks.
    """

    name: str
    shape: tuple[PositiveInt, ...]
    tp_dim: NonNegativeInt | None = None
    acts_on_split: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of `tp` ranks holds."""
        if self.tp_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.tp_dim] = divide(shape[self.tp_dim], tp, f"{self.name}: dimension {self.tp_dim} over tp")
        return tuple(shape)


@lru_cache(maxsize=1024)
def layer_parameters(layer: LayerSpec) -> tuple[ParameterSpec, ...]:
    """Return the parameters of `layer`, in module order. A tied head still lists its `output.weight`."""
    match layer:
        case EmbeddingLayer():
            return tuple(_embedding(layer))
        case BlockLayer():
            return tuple(_block(layer))
        case HeadLayer():
            return tuple(_head(layer))


def num_parameters(model: ModelSpec) -> int:
    """Return the trainable parameters of `model`: unpadded vocabulary, tied weights once."""
    total = 0
    for group in model.groups:
        total += group.num_layers * sum(p.num_elements for p in layer_parameters(group.layer))
    unused_rows = model.embedding.padded_vocab_size - model.vocab_size
    total -= 2 * unused_rows * model.embedding.hidden_size
    if model.tied_embedding:
        total -= model.vocab_size * model.embedding.hidden_size
    return total


def _embedding(layer: EmbeddingLayer) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name="token.weight", shape=(layer.padded_vocab_size, layer.hidden_size), tp_dim=0)
    if layer.max_positions:
        yield ParameterSpec(name="position.weight", shape=(layer.max_positions, layer.hidden_size))


def _block(layer: BlockLayer) -> Iterator[ParameterSpec]:
    attention, mlp, hidden = layer.attention, layer.mlp, layer.hidden_size
    queries = attention.num_heads * attention.head_size
    keys = attention.num_kv_heads * attention.head_size
    yield from _norm("norm1", layer.norm, hidden)
    yield from _linear("attention.q", queries, hidden, tp_dim=0, bias=attention.bias)
    yield from _linear("attention.k", keys, hidden, tp_dim=0, bias=attention.bias)
    yield from _linear("attention.v", keys, hidden, tp_dim=0, bias=attention.bias)
    yield from _linear("attention.out", hidden, queries, tp_dim=1, bias=attention.output_bias)
    if attention.qk_norm:
        for name in ("attention.q_norm.weight", "attention.k_norm.weight"):
            yield ParameterSpec(name=name, shape=(attention.head_size,), acts_on_split=True)
    yield from _norm("norm2", layer.norm, hidden)
    if mlp.gated:
        yield from _linear("mlp.gate", mlp.ffn_size, hidden, tp_dim=0, bias=mlp.bias)
    yield from _linear("mlp.up", mlp.ffn_size, hidden, tp_dim=0, bias=mlp.bias)
    yield from _linear("mlp.down", hidden, mlp.ffn_size, tp_dim=1, bias=mlp.bias)


def _head(layer: HeadLayer) -> Iterator[ParameterSpec]:
    yield from _norm("norm", layer.norm, layer.hidden_size)
    yield ParameterSpec(name="output.weight", shape=(layer.padded_vocab_size, layer.hidden_size), tp_dim=0)


def _norm(name: str, norm: Norm, size: int) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name=f"{name}.weight", shape=(size,))
    if norm == "layernorm":
        yield ParameterSpec(name=f"{name}.bias", shape=(size,))


def _linear(name: str, num_outputs: int, num_inputs: int, *, tp_dim: int, bias: bool) -> Iterator[ParameterSpec]:
    yield ParameterSpec(name=f"{name}.weight", shape=(num_outputs, num_inputs), tp_dim=tp_dim)
    if bias:
        # The bias of a row-parallel layer is added after the sum, so it is whole on every rank.
        yield ParameterSpec(name=f"{name}.bias", shape=(num_outputs,), tp_dim=0 if tp_dim == 0 else None)
