"""What is trained: a sequence of layers (embedding, blocks, head), each priced and placed on its own.

A model begins with an embedding of tokens or of image patches and ends with a head that computes the loss. Between
them lie blocks, and in Swin layers that merge patches. A layer says what it hands on, so that layers of different
lengths and widths follow each other, and an encoder's states travel on beside a decoder's.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from meshwright.spec.base import LONGEST_SEQ, NonNegativeInt, PositiveFloat, Spec
from meshwright.spec.parts import LARGEST_SIZE, Activation, AttentionSpec, MlpSpec, Norm, Size
from meshwright.spec.tensors import Length, ParameterSpec, TensorSpec

VOCAB_MULTIPLE = 128
MOST_LAYERS = 1 << 12
_BUILDER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_Vocabulary = TypeVar("_Vocabulary", "EmbeddingLayer", "HeadLayer")


class EmbeddingLayer(Spec):
    """Token ids to hidden states; learned positions when `max_positions` is above 0, likewise `token_types`.

    `padded_vocab_size` rows are held (one size per model, whatever the tp degree); rows from
    `vocab_size` on are never used. `norm`: of the sum. `targets`: a decoder's tokens are embedded too, by the same
    weight, and handed on beside.
    """

    kind: Literal["embedding"] = "embedding"
    hidden_size: Size
    vocab_size: Size
    padded_vocab_size: Size
    max_positions: Annotated[int, Field(ge=0, le=LONGEST_SEQ)] = 0
    token_types: Annotated[int, Field(ge=0, le=LARGEST_SIZE)] = 0
    norm: Norm | None = None
    norm_eps: PositiveFloat = 1e-5
    targets: bool = False

    @model_validator(mode="after")
    def _check(self) -> EmbeddingLayer:
        return _check_padding(self)


class PatchEmbeddingLayer(Spec):
    """Square images to hidden states, one a patch, after those of a learned `class_token`.

    `positions`: learned ones are added.
    """

    kind: Literal["patch_embedding"] = "patch_embedding"
    hidden_size: Size
    image_size: Size
    patch_size: Size
    num_channels: Size
    class_token: bool = False
    positions: bool = False
    norm: Norm | None = None
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _check(self) -> PatchEmbeddingLayer:
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size ({self.patch_size}) must divide image_size ({self.image_size})")
        return self

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_elements(self) -> int:
        """Colours of one patch."""
        return self.num_channels * self.patch_size**2

    @property
    def num_tokens(self) -> int:
        return self.num_patches + self.class_token


class BlockLayer(Spec):
    """One Transformer block over `length` tokens of a sample.

    Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)). Post-norm: norm(x + attention(x)), then norm(x + mlp(x)).
    With `cross_attention` (pre-norm only) a part between them attends to the encoder's states, of "seq" tokens.
    `closing_norm`: the output is normalised once more, which ends an encoder. `carries`: what the block hands on
    beside its own hidden states.
    """

    kind: Literal["block"] = "block"
    hidden_size: Size
    norm: Norm
    norm_eps: PositiveFloat
    attention: AttentionSpec
    mlp: MlpSpec
    post_norm: bool = False
    cross_attention: AttentionSpec | None = None
    closing_norm: bool = False
    length: Length = "seq"
    carries: tuple[TensorSpec, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> BlockLayer:
        if self.post_norm and (self.cross_attention is not None or self.closing_norm):
            raise ValueError("post_norm: neither cross_attention nor closing_norm goes with it")
        cross = self.cross_attention
        if cross is not None and (cross.causal or cross.rotary or cross.keeps_scores or self.length != "target_seq"):
            raise ValueError("cross_attention sees a whole source, without positions, from target_seq tokens")
        windows = self.attention.windows
        if windows is not None and self.length != windows.grid**2:
            raise ValueError(f"length ({self.length}) must be the tokens of the windows' grid, {windows.grid**2}")
        return self


class MergeLayer(Spec):
    """Swin's patch merging: 2 x 2 neighbours of a `grid` x `grid` become one token of twice the width."""

    kind: Literal["merge"] = "merge"
    hidden_size: Size
    grid: Size
    norm: Norm = "layernorm"
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _check(self) -> MergeLayer:
        if self.grid % 2:
            raise ValueError(f"grid must be even, not {self.grid}")
        return self

    @property
    def merged_size(self) -> int:
        """Width of what the layer reads: four neighbours."""
        return 4 * self.hidden_size

    @property
    def num_tokens(self) -> int:
        """Tokens handed on."""
        return (self.grid // 2) ** 2


class HeadLayer(Spec):
    """The last norm, the projection to the vocabulary, and the summed cross-entropy loss.

    `transform`: a dense layer with this activation comes before the norm (masked language models). `logit_scale`
    multiplies what is projected.
    """

    kind: Literal["head"] = "head"
    hidden_size: Size
    vocab_size: Size
    padded_vocab_size: Size
    norm: Norm
    norm_eps: PositiveFloat
    transform: Activation | None = None
    bias: bool = False
    logit_scale: PositiveFloat = 1.0
    length: Length = "seq"

    @model_validator(mode="after")
    def _check(self) -> HeadLayer:
        return _check_padding(self)


class ClassifierLayer(Spec):
    """The last norm (if any), one vector a sample ("first" token or "mean"), a linear map to classes, and the loss.

    `pooler`: a dense layer with tanh comes before the map.
    """

    kind: Literal["classifier"] = "classifier"
    hidden_size: Size
    num_classes: Size
    pooling: Literal["first", "mean"]
    norm: Norm | None = None
    norm_eps: PositiveFloat = 1e-5
    pooler: bool = False
    length: Length = "seq"


class CustomLayer(Spec):
    """A block of the user's own, described by what planning must know of it (docs/own-model.md).

    It takes hidden states [samples, `length`, `hidden_size`] (and what it `carries`) and hands the same on.
    `builder` is the "package.module:function" that makes the torch module of this spec; `options` are for it.
    `parameters` are those of the module: names, shapes, and which dimension tensor parallelism splits. Every matrix
    among them multiplies all tokens. Counts are per token and forward: `split_core_flops` beside those products,
    `moved_elements` that memory-bound operators read and write, `kept_elements` that autograd keeps; `split_` ones
    are divided by the tensor-parallel degree. `num_parts`: how often split results are summed over tensor-parallel
    ranks (2 in a block of attention and MLP).
    """

    kind: Literal["custom"] = "custom"
    hidden_size: Size
    builder: str
    options: tuple[tuple[str, int | float | str | bool], ...] = ()
    parameters: tuple[ParameterSpec, ...]
    num_parts: NonNegativeInt
    split_core_flops: NonNegativeInt = 0
    moved_elements: NonNegativeInt
    split_moved_elements: NonNegativeInt
    kept_elements: NonNegativeInt
    split_kept_elements: NonNegativeInt
    length: Length = "seq"
    carries: tuple[TensorSpec, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> CustomLayer:
        if not _BUILDER.fullmatch(self.builder):
            raise ValueError(f"builder must be written package.module:function, not {self.builder}")
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) < len(names):
            raise ValueError("parameters: every name must be there once")
        return self


FirstLayer = EmbeddingLayer | PatchEmbeddingLayer
LastLayer = HeadLayer | ClassifierLayer
AnyBlock = BlockLayer | CustomLayer
AnyLayer = FirstLayer | AnyBlock | MergeLayer | LastLayer
LayerSpec = Annotated[AnyLayer, Field(discriminator="kind")]


class LayerGroup(Spec):
    """`num_layers` consecutive layers of the same shape."""

    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    layer: LayerSpec


class ModelSpec(Spec):
    """A model as a sequence of layers: one embedding, blocks, one head.

    `groups` holds the layers run-length encoded; `layers` is the flat sequence. `max_seq_len`
    is 0 when positions do not limit the length. `usual_seq_len` and `usual_target_seq_len` are what a job has that
    does not say otherwise (0: it must say).
    """

    schema_version: Literal[1] = 1
    name: str
    family: str
    groups: tuple[LayerGroup, ...]
    tied_embedding: bool = False
    max_seq_len: NonNegativeInt = 0
    usual_seq_len: NonNegativeInt = 0
    usual_target_seq_len: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        kinds = [group.layer.kind for group in self.groups]
        if len(kinds) < 3:  # noqa: PLR2004 embedding, at least one block, head
            raise ValueError("groups must be one embedding, then at least one block, then one head")
        if not isinstance(self.groups[0].layer, FirstLayer) or not isinstance(self.groups[-1].layer, LastLayer):
            raise ValueError("groups must be one embedding, then blocks, then one head")
        if not all(isinstance(group.layer, AnyBlock | MergeLayer) for group in self.groups[1:-1]):
            raise ValueError("groups must be one embedding, then blocks, then one head")
        if self.groups[0].num_layers != 1 or self.groups[-1].num_layers != 1:
            raise ValueError("groups: the embedding and the head are one layer each")
        if (num_layers := sum(group.num_layers for group in self.groups)) > MOST_LAYERS:
            raise ValueError(f"groups: {num_layers} layers are more than the {MOST_LAYERS} that can be planned")
        if not self.name.isprintable() or not self.name:
            raise ValueError("name must be printable text")
        self._check_chain()
        self._check_vocabulary()
        self._check_lengths()
        return self

    def _check_chain(self) -> None:
        from meshwright.spec.chain import why_broken  # which is about the kinds of layers above

        if reason := why_broken(self.groups):
            raise ValueError(reason)

    def _check_lengths(self) -> None:
        positions = self.embedding.max_positions if isinstance(self.embedding, EmbeddingLayer) else 0
        if positions and self.max_seq_len > positions:
            raise ValueError(f"max_seq_len ({self.max_seq_len}) is above the embedding's max_positions ({positions})")
        if self.max_seq_len and self.usual_seq_len > self.max_seq_len:
            raise ValueError(f"usual_seq_len ({self.usual_seq_len}) is above max_seq_len ({self.max_seq_len})")
        if self.fixed_seq_len and self.usual_seq_len not in (0, self.fixed_seq_len):
            raise ValueError(f"usual_seq_len ({self.usual_seq_len}) is not the {self.fixed_seq_len} tokens of an image")

    def _check_vocabulary(self) -> None:
        first, last = self.embedding, self.head
        if self.tied_embedding and not (isinstance(first, EmbeddingLayer) and isinstance(last, HeadLayer)):
            raise ValueError("tied_embedding: only an embedding of tokens and a language-model head can share a weight")
        if isinstance(last, HeadLayer) and not isinstance(first, EmbeddingLayer):
            raise ValueError("groups: a head with a vocabulary needs an embedding of tokens, not of patches")
        if isinstance(first, EmbeddingLayer) and isinstance(last, HeadLayer):
            if first.hidden_size != last.hidden_size:
                raise ValueError("groups: embedding and head must have the same hidden_size")
            if (first.padded_vocab_size, first.vocab_size) != (last.padded_vocab_size, last.vocab_size):
                raise ValueError("groups: embedding and head must have the same vocabulary size")

    @cached_property
    def layers(self) -> tuple[AnyLayer, ...]:
        return tuple(group.layer for group in self.groups for _ in range(group.num_layers))

    @property
    def embedding(self) -> FirstLayer:
        layer = self.groups[0].layer
        assert isinstance(layer, FirstLayer)  # noqa: S101 checked when made
        return layer

    @property
    def head(self) -> LastLayer:
        layer = self.groups[-1].layer
        assert isinstance(layer, LastLayer)  # noqa: S101 checked when made
        return layer

    @property
    def token_embedding(self) -> EmbeddingLayer:
        """The embedding of a model of token ids."""
        assert isinstance(self.embedding, EmbeddingLayer)  # noqa: S101 asked of language models only
        return self.embedding

    @property
    def language_head(self) -> HeadLayer:
        """The head of a language model."""
        assert isinstance(self.head, HeadLayer)  # noqa: S101 asked of language models only
        return self.head

    @property
    def num_blocks(self) -> int:
        return sum(group.num_layers for group in self.groups if isinstance(group.layer, AnyBlock))

    @property
    def merges(self) -> tuple[int, ...]:
        """The indices of layers that merge patches."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer, MergeLayer))

    @property
    def vocab_size(self) -> int:
        """Distinct token ids; 0 for images."""
        return self.embedding.vocab_size if isinstance(self.embedding, EmbeddingLayer) else 0

    @property
    def has_targets(self) -> bool:
        """Whether a decoder has tokens of its own beside the encoder's."""
        return isinstance(self.embedding, EmbeddingLayer) and self.embedding.targets

    @property
    def fixed_seq_len(self) -> int:
        """Tokens of every sample where the model decides (an image's patches); 0 where the job does."""
        return self.embedding.num_tokens if isinstance(self.embedding, PatchEmbeddingLayer) else 0

    @property
    def is_decoder_only(self) -> bool:
        """Whether this is a causal language model of pre-norm blocks: embedding, decoder blocks, head."""
        if not isinstance(self.embedding, EmbeddingLayer) or not isinstance(self.head, HeadLayer):
            return False
        ends_plain = self.embedding.norm is None and not self.has_targets and self.head.transform is None
        return ends_plain and all(_is_decoder(group.layer) for group in self.groups[1:-1])


def hands_on(layer: AnyLayer) -> tuple[TensorSpec, ...]:
    """Return the tensors that `layer` hands to the next one, hidden states first; none for a head."""
    match layer:
        case HeadLayer() | ClassifierLayer():
            return ()
        case EmbeddingLayer():
            source = TensorSpec(name="hidden", shape=("seq", layer.hidden_size))
            return (source, target_states(layer.hidden_size)) if layer.targets else (source,)
        case PatchEmbeddingLayer():
            return (TensorSpec(name="hidden", shape=(layer.num_tokens, layer.hidden_size)),)
        case MergeLayer():
            return (TensorSpec(name="hidden", shape=(layer.num_tokens, 2 * layer.hidden_size)),)
        case BlockLayer() | CustomLayer():
            return (TensorSpec(name="hidden", shape=(layer.length, layer.hidden_size)), *layer.carries)


def target_states(hidden_size: int) -> TensorSpec:
    """Return the embedded targets, which travel through the encoder to the decoder."""
    return TensorSpec(name="target", shape=("target_seq", hidden_size))


def source_states(hidden_size: int) -> TensorSpec:
    """Return the encoder's states, which travel on to every block of the decoder."""
    return TensorSpec(name="source", shape=("seq", hidden_size))


def relative_table(attention: AttentionSpec) -> TensorSpec:
    """Return the table of relative positions that the blocks of a stack share: the same for every sample."""
    buckets = attention.relative.num_buckets if attention.relative else 1
    return TensorSpec(name="relative", shape=(buckets, attention.num_heads))


def pad_vocab(vocab_size: int) -> int:
    """Return the padded vocabulary: the next multiple of 128, which tp up to 128 divides when a power of two."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _is_decoder(layer: AnyLayer) -> bool:
    if not isinstance(layer, BlockLayer) or layer.post_norm or layer.closing_norm or layer.cross_attention is not None:
        return False
    return layer.attention.causal and not layer.attention.keeps_scores and layer.length == "seq"


def _check_padding(layer: _Vocabulary) -> _Vocabulary:
    if layer.padded_vocab_size < layer.vocab_size:
        raise ValueError(f"padded_vocab_size ({layer.padded_vocab_size}) is below vocab_size ({layer.vocab_size})")
    return layer
