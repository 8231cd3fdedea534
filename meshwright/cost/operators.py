"""What operators compute and move, and how long that takes at given rates: the one place that counts it.

A matrix product (m, k) x (k, n) takes max(2mkn / rate, moved bytes / bandwidth). Flash attention cores skip the
masked half of the scores and lose a share of 256 tokens on the diagonal (fitted on published runs). Everything else
is bound by memory: bytes per token of norms, residuals, activations, biases and rotations, as counted for the
operators of the zoo in 16 bit: forward 20 per hidden and 4 (6 gated) per local ffn element, backward 24 and 6
(10 gated), rotary 4 per local query and key element, dropout 2 per hidden element more. Routed experts add 8 bytes per
hidden element and visit forward and 10 backward for permuting tokens there and back. The loss moves 28 bytes per logit,
forward and backward together (32-bit temporaries). Cross attention is a third part of a block, with a norm and a
residual of its own, and adds its gradient to that of the source states. Swin copies hidden states into windows and
back. Where a learned bias is added to attention scores, they are written and read as tensors: forward 16 bytes a score
(product, bias, softmax, product), backward 20.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.spec.flops import num_tokens
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    CustomLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerSpec,
    MergeLayer,
    PatchEmbeddingLayer,
)
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.tensors import Lengths

BACKWARD_ATTENTION = 2.5  # FLOPs of a flash backward pass over its forward pass (it recomputes the scores)
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 14, 14
EMBEDDING_FORWARD_BYTES, EMBEDDING_BACKWARD_BYTES = 8, 12  # per hidden element, in 16 bit
HEAD_NORM_BYTES = 10  # per hidden element and direction
_PART_BYTES = (10, 12)  # a norm and a residual: per hidden element, forward and backward; so are the next ones
_NORM_BYTES = (4, 6)
_WINDOW_BYTES = (8, 8)  # into windows and back
_MERGE_BYTES = (8, 10)  # gathered neighbours and their norm
_CUSTOM_BACKWARD = 1.5  # bytes of a backward pass over its forward pass, as in blocks of the zoo
_ADD_BYTES = (4, 2)
_DENSE_BYTES = (8, 10)  # bias and activation
_SOURCE_GRADIENT_BYTES = 6
_DIAGONAL_TOKENS = 256
# Weights that read the same input as another, and that fused implementations multiply at once.
_WITH = {
    "attention.k": "attention.q",
    "attention.v": "attention.q",
    "cross_attention.v": "cross_attention.k",
    "mlp.up": "mlp.gate",
    "mlp.shared.up": "mlp.shared.gate",
    "mlp.experts.up": "mlp.experts.gate",
}


class Product(NamedTuple):
    """One weight product of a layer on one rank; when routed, one for each expert, of the tokens that visit it."""

    columns: float
    inner: float
    is_routed: bool = False


class Moved(NamedTuple):
    """Bytes per token that the memory-bound operators of one layer move on one rank, in 16 bit."""

    forward_bytes: float
    backward_bytes: float


def matmul_s(
    rows: float,
    columns: float,
    inner: float,
    flops_per_s: float,
    bytes_per_s: float,
    element_bytes: float = 2,
    tail_elements: float = 0,
) -> float:
    """Return the seconds of one matrix product, without its launch.

    `tail_elements` of output more are paid for than computed: the last wave of tiles leaves multiprocessors idle.
    """
    moved = (rows * inner + inner * columns + rows * columns) * element_bytes
    return max(2 * (rows * columns + tail_elements) * inner / flops_per_s, moved / bytes_per_s)


def flash_s(full_flops: float, seq_len: float, flops_per_s: float, *, causal: bool = True) -> float:
    """Return the seconds of a forward attention core; a causal one skips the masked half of `full_flops`."""
    if not causal:
        return full_flops / flops_per_s
    return full_flops / 2 / (flops_per_s * seq_len / (seq_len + _DIAGONAL_TOKENS))


@lru_cache(maxsize=4096)
def block_products(layer: BlockLayer, tp: int) -> tuple[Product, ...]:
    """Return the weight products of a block on one of `tp` ranks, those with the same input as one.

    Key and value heads that are fewer than the ranks are held by several of them.
    """
    sizes: dict[str, Product] = {}
    for parameter in layer_parameters(layer):
        if not parameter.is_product:
            continue
        name = parameter.name.removesuffix(".weight")
        columns, inner = (float(size) for size in parameter.shape[-2:])
        split = None if parameter.tp_dim is None else parameter.tp_dim - len(parameter.shape) + 2
        if split == 0:
            columns = max(columns / tp, _least_columns(layer, name))
        elif split == 1:
            inner /= tp
        name = first if (first := _WITH.get(name, name)) in sizes else name
        before = sizes[name].columns if name in sizes else 0.0
        sizes[name] = Product(before + columns, inner, parameter.is_of_experts)
    return tuple(sizes.values())


def _least_columns(layer: BlockLayer, name: str) -> float:
    return layer.attention.head_size if name in ("attention.k", "attention.v") else 0


@lru_cache(maxsize=4096)
def block_moved(layer: BlockLayer, tp: int, hidden_ranks: int = 1, dropout: bool = False) -> Moved:
    """Return what a block moves per token where hidden states are split over `hidden_ranks` between its products."""
    hidden = layer.hidden_size / hidden_ranks
    mlp, attention = layer.mlp, layer.attention
    parts = 2 + (layer.cross_attention is not None)
    visits = mlp.experts.top_k if mlp.experts else 0
    ffn = (visits * mlp.ffn_size + mlp.experts.shared_ffn_size if mlp.experts else mlp.ffn_size) / tp
    forward = (parts * _PART_BYTES[0] + 2 * dropout) * hidden + (6 if mlp.gated else 4) * ffn + 8 * visits * hidden
    backward = (parts * _PART_BYTES[1] + 2 * dropout) * hidden + (10 if mlp.gated else 6) * ffn + 10 * visits * hidden
    if attention.rotary:
        rotated = 4 * (attention.num_heads + attention.num_kv_heads) * attention.head_size / tp
        forward, backward = forward + rotated, backward + rotated
    for is_there, moved in ((layer.closing_norm, _NORM_BYTES), (attention.windows is not None, _WINDOW_BYTES)):
        if is_there:
            forward, backward = forward + moved[0] * hidden, backward + moved[1] * hidden
    return Moved(forward, backward)


def block_launches(layer: BlockLayer) -> tuple[int, int]:
    """Return the kernels of a block beside matrix products and attention, forward and backward."""
    forward, backward = (16, 24) if layer.attention.rotary else (8, 12)
    if layer.cross_attention is not None:
        forward, backward = forward + 4, backward + 8
    extra = 2 * (layer.attention.windows is not None) + layer.closing_norm
    return forward + extra, backward + extra


def layer_launches(layer: LayerSpec) -> tuple[int, int]:
    """Return the kernels of any layer beside matrix products and attention, forward and backward."""
    match layer:
        case BlockLayer():
            return block_launches(layer)
        case CustomLayer():
            return 4 + 2 * len(layer.parameters), 6 + 3 * len(layer.parameters)
        case HeadLayer():
            return (8, 8) if layer.transform is None else (10, 12)
        case ClassifierLayer():
            return 8, 10
        case EmbeddingLayer() | PatchEmbeddingLayer():
            extra = (layer.norm is not None) + (isinstance(layer, PatchEmbeddingLayer) or layer.token_types > 0)
            return 2 + extra, 2 + extra
        case MergeLayer():
            return 3, 4


def sample_moved(layer: LayerSpec, tp: int, lengths: Lengths) -> Moved:
    """Return what any layer moves for one sample, beside matrix products, attention and the loss."""
    elements = num_tokens(layer, lengths) * layer.hidden_size
    match layer:
        case BlockLayer():
            moved, tokens = block_moved(layer, tp), num_tokens(layer, lengths)
            from_source = lengths.seq * layer.hidden_size if layer.cross_attention is not None else 0
            return Moved(
                tokens * moved.forward_bytes, tokens * moved.backward_bytes + _SOURCE_GRADIENT_BYTES * from_source
            )
        case CustomLayer():
            moved = 2 * num_tokens(layer, lengths) * (layer.moved_elements + layer.split_moved_elements / tp)
            return Moved(moved, _CUSTOM_BACKWARD * moved)
        case EmbeddingLayer() | PatchEmbeddingLayer():
            return _embedding_moved(layer, elements)
        case MergeLayer():
            merged = layer.num_tokens * layer.merged_size
            return Moved(_MERGE_BYTES[0] * merged, _MERGE_BYTES[1] * merged)
        case HeadLayer():
            extra = (0, 0) if layer.transform is None else _DENSE_BYTES
            return Moved((HEAD_NORM_BYTES + extra[0]) * elements, (HEAD_NORM_BYTES + extra[1]) * elements)
        case ClassifierLayer():
            each = HEAD_NORM_BYTES * (layer.norm is not None) + 2 * (layer.pooling == "mean")
            return Moved(each * elements, each * elements)


def score_bytes(num_scores: float) -> Moved:
    """Return what attention moves whose scores are tensors."""
    return Moved(16 * num_scores, 20 * num_scores)


def _embedding_moved(layer: EmbeddingLayer | PatchEmbeddingLayer, elements: int) -> Moved:
    forward, backward = EMBEDDING_FORWARD_BYTES * elements, EMBEDDING_BACKWARD_BYTES * elements
    if isinstance(layer, PatchEmbeddingLayer):
        forward += _ADD_BYTES[0] * layer.num_patches * layer.patch_elements  # pixels into rows of patches
    elif layer.token_types:
        forward, backward = forward + _ADD_BYTES[0] * elements, backward + _ADD_BYTES[1] * elements
    if layer.norm is not None:
        forward, backward = forward + _NORM_BYTES[0] * elements, backward + _NORM_BYTES[1] * elements
    return Moved(forward, backward)
