"""What operators compute and move, and how long that takes at given rates: the one place that counts it.

A matrix product (m, k) x (k, n) takes max(2mkn / rate, moved bytes / bandwidth). Flash attention cores skip the
masked half of the scores and lose a share of 256 tokens on the diagonal (fitted on published runs). Everything else
is bound by memory: bytes per token of norms, residuals, activations, biases and rotations, as counted for the
operators of the zoo in 16 bit: forward 20 per hidden and 4 (6 gated) per local ffn element, backward 24 and 6
(10 gated), rotary 4 per local query and key element, dropout 2 per hidden element more. Routed experts add 8 bytes per
hidden element and visit forward and 10 backward for permuting tokens there and back. The loss moves 28 bytes per logit,
forward and backward together (32-bit temporaries).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.spec.model import BlockLayer
from meshwright.spec.parameters import layer_parameters

BACKWARD_ATTENTION = 2.5  # FLOPs of a flash backward pass over its forward pass (it recomputes the scores)
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 14, 14
EMBEDDING_FORWARD_BYTES, EMBEDDING_BACKWARD_BYTES = 8, 12  # per hidden element, in 16 bit
HEAD_NORM_BYTES = 10  # per hidden element and direction
_DIAGONAL_TOKENS = 256
# Weights that read the same input as another, and that fused implementations multiply at once.
_WITH = {
    "attention.k": "attention.q",
    "attention.v": "attention.q",
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


def flash_s(full_flops: float, seq_len: float, flops_per_s: float) -> float:
    """Return the seconds of a forward attention core that skips the masked half of `full_flops`."""
    return full_flops / 2 / (flops_per_s * seq_len / (seq_len + _DIAGONAL_TOKENS))


@lru_cache(maxsize=4096)
def block_products(layer: BlockLayer, tp: int) -> tuple[Product, ...]:
    """Return the weight products of a block on one of `tp` ranks, those with the same input as one.

    Key and value heads that are fewer than the ranks are held by several of them.
    """
    sizes: dict[str, Product] = {}
    for parameter in layer_parameters(layer):
        if len(parameter.shape) == 1:
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
    visits = mlp.experts.top_k if mlp.experts else 0
    ffn = (visits * mlp.ffn_size + mlp.experts.shared_ffn_size if mlp.experts else mlp.ffn_size) / tp
    forward = (20 + 2 * dropout) * hidden + (6 if mlp.gated else 4) * ffn + 8 * visits * hidden
    backward = (24 + 2 * dropout) * hidden + (10 if mlp.gated else 6) * ffn + 10 * visits * hidden
    if attention.rotary:
        rotated = 4 * (attention.num_heads + attention.num_kv_heads) * attention.head_size / tp
        forward, backward = forward + rotated, backward + rotated
    return Moved(forward, backward)


def block_launches(layer: BlockLayer) -> tuple[int, int]:
    """Return the kernels of a block beside matrix products and attention, forward and backward."""
    return (16, 24) if layer.attention.rotary else (8, 12)
