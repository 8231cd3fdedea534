"""What is trained: a sequence of layers (embedding, blocks, head), each priced and placed on its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from meshwright.spec.base import LONGEST_SEQ, NonNegativeInt, PositiveFloat, PositiveInt, Spec

Norm = Literal["layernorm", "rmsnorm"]
VOCAB_MULTIPLE = 128
# Far above any model, so that a slip of the hand is an error and not a search without end, and so
# that the elements of a model stay countable in 64 bits.
MOST_LAYERS = 1 << 12
LARGEST_SIZE = 1 << 22
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
_Vocabulary = TypeVar("_Vocabulary", "EmbeddingLayer", "HeadLayer")


class TensorSpec(Spec):
    """A tensor that one layer hands to the next: its shape for one sample.

    `shape` entries are sizes, or the name of a length that the job fixes ("seq"). `dtype`
    "param" is the dtype that layers compute in.
    """

    name: str
    shape: tuple[PositiveInt | Literal["seq"], ...]
    dtype: Literal["param", "fp32", "int64", "bool"] = "param"

    def resolve(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with named lengths filled in."""
        return tuple(lengths[size] if isinstance(size, str) else size for size in self.shape)


class AttentionSpec(Spec):
    """Causal self-attention: grouped queries, optional rotary positions, biases and q/k norms.

    `qk_norm` normalises every head of q and k (before rotation) with one weight of `head_size`.
    `latent`: multi-head latent attention, where `head_size` is that of queries and keys.
    """

    num_heads: Size
    num_kv_heads: Size
    head_size: Size
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    rotary: bool = False
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    latent: LatentSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})")
        if self.rotary and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head_size, not {self.head_size}")
        return self


class LatentSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values from a small latent.

    Queries come from a latent of `query_rank` (0: straight from the hidden states), keys and values from one of
    `kv_rank`; of each head, `rope_size` of its `head_size` is rotated (one such key for all heads).
    """

    query_rank: Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
    kv_rank: Size
    rope_size: Size
    value_size: Size


class RopeScaling(Spec):
    """Llama 3's rescaling of rotary frequencies for longer contexts."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_positions: PositiveInt


class MlpSpec(Spec):
    """The feed-forward part: down(act(up(x))), or down(act(gate(x)) * up(x)) when gated."""

    ffn_size: Size
    gated: bool
    activation: Literal["silu", "gelu", "gelu_tanh"]
    bias: bool = False
    experts: ExpertsSpec | None = None


class ExpertsSpec(Spec):
    """A mixture of experts in the place of one MLP: a router sends each token to `top_k` of `num_experts`.

    `ffn_size` of the MLP is one expert's. `shared_ffn_size`: of the experts that every token passes, together.
    """

    num_experts: Size
    top_k: Size
    shared_ffn_size: Annotated[int, Field(ge=0, le=LARGEST_SIZE)] = 0

    @model_validator(mode="after")
    def _check(self) -> ExpertsSpec:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) is above num_experts ({self.num_experts})")
        return self


class EmbeddingLayer(Spec):
    """Token ids to hidden states; learned positions when `max_positions` is above 0.

    `padded_vocab_size` rows are held (one size per model, whatever the tp degree); rows from
    `vocab_size` on are never used.
    """

    kind: Literal["embedding"] = "embedding"
    hidden_size: Size
    vocab_size: Size
    padded_vocab_size: Size
    max_positions: Annotated[int, Field(ge=0, le=LONGEST_SEQ)] = 0

    @model_validator(mode="after")
    def _check(self) -> EmbeddingLayer:
        return _check_padding(self)


class BlockLayer(Spec):
    """One pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

    kind: Literal["block"] = "block"
    hidden_size: Size
    norm: Norm
    norm_eps: PositiveFloat
    attention: AttentionSpec
    mlp: MlpSpec


class HeadLayer(Spec):
    """The last norm, the projection to the vocabulary, and the summed cross-entropy loss."""

    kind: Literal["head"] = "head"
    hidden_size: Size
    vocab_size: Size
    padded_vocab_size: Size
    norm: Norm
    norm_eps: PositiveFloat

    @model_validator(mode="after")
    def _check(self) -> HeadLayer:
        return _check_padding(self)


LayerSpec = Annotated[EmbeddingLayer | BlockLayer | HeadLayer, Field(discriminator="kind")]


class LayerGroup(Spec):
    """`num_layers` consecutive layers of the same shape."""

    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    layer: LayerSpec


class ModelSpec(Spec):
    """A model as a sequence of layers: one embedding, blocks, one head.

    `groups` holds the layers run-length encoded; `layers` is the flat sequence. `max_seq_len`
    is 0 when positions do not limit the length.
    """

    schema_version: Literal[1] = 1
    name: str
    family: str
    groups: tuple[LayerGroup, ...]
    tied_embedding: bool = False
    max_seq_len: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        kinds = [group.layer.kind for group in self.groups]
        ends_once = kinds.count("embedding") == kinds.count("head") == 1
        if not kinds or kinds[0] != "embedding" or kinds[-1] != "head" or not ends_once:
            raise ValueError("groups must be one embedding, then blocks, then one head")
        if self.groups[0].num_layers != 1 or self.groups[-1].num_layers != 1:
            raise ValueError("groups: the embedding and the head are one layer each")
        if len(kinds) < 3:  # noqa: PLR2004 embedding, at least one block, head
            raise ValueError("groups: a model needs at least one block")
        if (num_layers := sum(group.num_layers for group in self.groups)) > MOST_LAYERS:
            raise ValueError(f"groups: {num_layers} layers are more than the {MOST_LAYERS} that can be planned")
        if len({group.layer.hidden_size for group in self.groups}) > 1:
            raise ValueError("groups: every layer must have the same hidden_size")
        if self.embedding.padded_vocab_size != self.head.padded_vocab_size or (
            self.embedding.vocab_size != self.head.vocab_size
        ):
            raise ValueError("groups: embedding and head must have the same vocabulary size")
        return self

    @cached_property
    def layers(self) -> tuple[EmbeddingLayer | BlockLayer | HeadLayer, ...]:
        return tuple(group.layer for group in self.groups for _ in range(group.num_layers))

    @property
    def embedding(self) -> EmbeddingLayer:
        layer = self.groups[0].layer
        assert isinstance(layer, EmbeddingLayer)  # noqa: S101 checked when made
        return layer

    @property
    def head(self) -> HeadLayer:
        layer = self.groups[-1].layer
        assert isinstance(layer, HeadLayer)  # noqa: S101 checked when made
        return layer

    @property
    def num_blocks(self) -> int:
        return len(self.layers) - 2

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size


def hands_on(layer: EmbeddingLayer | BlockLayer | HeadLayer) -> tuple[TensorSpec, ...]:
    """Return the tensors that `layer` hands to the next one; none for the head, which ends in the loss."""
    if layer.kind == "head":
        return ()
    return (TensorSpec(name="hidden", shape=("seq", layer.hidden_size)),)


def pad_vocab(vocab_size: int) -> int:
    """Return the padded vocabulary: the next multiple of 128, which tp up to 128 divides when a power of two."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _check_padding(layer: _Vocabulary) -> _Vocabulary:
    if layer.padded_vocab_size < layer.vocab_size:
        raise ValueError(f"padded_vocab_size ({layer.padded_vocab_size}) is below vocab_size ({layer.vocab_size})")
    return layer
