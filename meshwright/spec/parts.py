"""Parts of a Transformer block: attention in its kinds, and the feed-forward part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from meshwright.spec.base import NonNegativeInt, PositiveFloat, Spec

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# Far above any model, so that a slip of the hand is an error and not a search without end, and so
# that the elements of a model stay countable in 64 bits.
LARGEST_SIZE = 1 << 22
Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


class AttentionSpec(Spec):
    """Attention: grouped queries, optional rotary positions, biases and q/k norms.

    `qk_norm` normalises every head of q and k (before rotation) with one weight of `head_size`.
    `latent`: multi-head latent attention, where `head_size` is that of queries and keys.
    `sliding_window`: a token sees so many tokens, itself included (0: all that `causal` lets it see).
    `scaled`: scores are divided by the square root of `head_size`.
    `relative`, `windows`: a learned bias is added to the scores, which then exist as a tensor ("math" attention);
    without one, a flash kernel keeps them inside.
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
    causal: bool = True
    sliding_window: NonNegativeInt = 0
    scaled: bool = True
    relative: RelativeSpec | None = None
    windows: WindowsSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})")
        if self.rotary and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head_size, not {self.head_size}")
        if self.sliding_window and not self.causal:
            raise ValueError("sliding_window: only causal attention has one")
        if self.windows is not None and (self.causal or self.relative is not None):
            raise ValueError("windows: neither causal attention nor relative positions go with windows")
        return self

    @property
    def keeps_scores(self) -> bool:
        """Whether the scores of all pairs exist as a tensor, which autograd keeps."""
        return self.relative is not None or self.windows is not None


class RelativeSpec(Spec):
    """T5's relative positions (arXiv 1910.10683, section 2.1): one bias a head and bucket of distance.

    All blocks of a stack share one table, [num_buckets, num_heads]: the first `owns_table`, and hands it on.
    """

    num_buckets: Size
    max_distance: Size
    owns_table: bool


class WindowsSpec(Spec):
    """Swin's attention inside square windows (arXiv 2103.14030): `size` x `size` of a `grid` x `grid` of tokens.

    Windows are moved by `shift` tokens in both directions. Each block has its own table of biases, one a head and
    relative position: [(2 size - 1)^2, num_heads].
    """

    size: Size
    grid: Size
    shift: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> WindowsSpec:
        if self.grid % self.size:
            raise ValueError(f"size ({self.size}) must divide grid ({self.grid})")
        if self.shift >= self.size:
            raise ValueError(f"shift ({self.shift}) must be below size ({self.size})")
        return self

    @property
    def num_positions(self) -> int:
        """Relative positions of two tokens of a window."""
        return (2 * self.size - 1) ** 2


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
    original_max_positions: Annotated[int, Field(ge=1)]


class MlpSpec(Spec):
    """The feed-forward part: down(act(up(x))), or down(act(gate(x)) * up(x)) when gated."""

    ffn_size: Size
    gated: bool
    activation: Activation
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
