"""Seconds of one block, embedding or head for one micro-batch of a uniform run, on one rank.

Per rank and micro-batch, T = micro-batch samples x sequence / cp tokens of h hidden elements. Operators are those of
`operators.py`; here is what a framework and a strategy make of them:

    flash attention      backward 2.5 times the FLOPs at 0.86 of the rate (FlashAttention-2, arXiv 2307.08691, fig. 4-6)
    unfused attention    two batched products over the full square, backward twice that; a score is moved 4 bytes
                         forward and 6 backward, 5 more each with dropout
    experts              products of all experts of a rank at once; each pads its rows to a tile, and all wait for the
                         rank with the most visits
    tensor parallelism   two all-reduces of T h elements forward and two backward (arXiv 1909.08053, section 3);
                         sequence parallelism moves the same (arXiv 2205.05198, section 4.2.2)
    context parallelism  keys and values go round the ring beside the attention of the last part (arXiv 2310.01889)
    expert parallelism   an all-to-all there and one back, forward and backward (arXiv 2006.16668, section 3.2)
    recompute            the forward pass, or its attention, or half of its products and what is bound by memory, again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.cost.operators import (
    BACKWARD_ATTENTION,
    EMBEDDING_BACKWARD_BYTES,
    EMBEDDING_FORWARD_BYTES,
    HEAD_NORM_BYTES,
    LOSS_BACKWARD_BYTES,
    LOSS_FORWARD_BYTES,
    block_launches,
    block_moved,
    block_products,
    flash_s,
    matmul_s,
)
from meshwright.cost.run_links import Links
from meshwright.cost.run_stages import interned
from meshwright.spec.constants import Constants, DeviceConstants
from meshwright.spec.flops import forward_flops
from meshwright.spec.frameworks import held_of
from meshwright.spec.model import BlockLayer, ModelSpec
from meshwright.spec.run import HeldBytes, RunSpec
from meshwright.spec.tensors import Lengths

# Half a wave of 256 x 128 tiles on about 108 multiprocessors: what the last wave of a product leaves idle, on average.
_TAIL_ELEMENTS = 256 * 128 * 108 / 2
_TILE_ROWS = 128  # of a product over the rows of one expert
_FLASH_BACKWARD_SHARE = 0.86  # of the forward rate
_ROWWISE_SHARE = 0.8  # of the fp8 rate with one scale a tensor: scales of rows and columns are applied to the output
_ROWWISE_COPIES = 2  # inputs are cast once for rows and once for columns
_ALIGNED_ELEMENTS = 8  # of 16 bit: what tensor cores load at once
_SCORE_FORWARD_BYTES, _SCORE_BACKWARD_BYTES, _SCORE_DROPOUT_BYTES = 4, 6, 5
_FP8_BYTES = 4  # per element of a product's input that is cast


class Pass(NamedTuple):
    """Seconds of one direction of one layer, by what takes them."""

    gemm_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    tp_s: float = 0.0
    cp_s: float = 0.0
    ep_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


class LayerSeconds(NamedTuple):
    """Forward, backward, and what is computed again before the backward pass."""

    forward: Pass
    backward: Pass
    recompute_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return self.backward.total_s + self.recompute_s

    @property
    def total_s(self) -> float:
        return self.forward.total_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Setting:
    """A run with what all its terms share: constants, rates of its device, links, bytes a parameter, tokens."""

    run: RunSpec
    model: ModelSpec
    constants: Constants
    links: Links
    held: HeldBytes
    tokens: float
    matmul_flops_per_s: float
    block_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float

    @classmethod
    def of(cls, run: RunSpec, constants: Constants) -> Setting:
        device, software = run.cluster.device, run.software
        reached = constants.of(device)
        peak_flops_per_s = device.bf16_flops_per_s * software.clock
        attention_efficiency = {
            "flash2": reached.flash2_efficiency,
            "flash1": reached.flash2_efficiency * constants.flash1_share,
            "unfused": reached.unfused_efficiency,
        }[software.attention]
        return cls(
            run=run,
            model=interned(run.model),
            constants=constants,
            links=Links.of(run.cluster, constants),
            held=held_of(run),
            tokens=run.micro_batch_size * run.seq_len / run.cp,
            matmul_flops_per_s=peak_flops_per_s * reached.matmul_efficiency,
            block_flops_per_s=peak_flops_per_s * _block_efficiency(reached, software.fp8),
            attention_flops_per_s=peak_flops_per_s * attention_efficiency,
            memory_bytes_per_s=device.memory_bytes_per_s * reached.memory_efficiency,
            launch_s=device.launch_s,
        )


def _block_efficiency(reached: DeviceConstants, fp8: str) -> float:
    if fp8 == "none":
        return reached.matmul_efficiency
    return 2 * reached.fp8_efficiency * (_ROWWISE_SHARE if fp8 == "rowwise" else 1)


def block_seconds(setting: Setting, layer: BlockLayer) -> LayerSeconds:
    """Return the seconds of one block."""
    run = setting.run
    gemm = _products_s(setting, layer)
    attention = _attention_s(setting, layer)
    memory = _memory_s(setting, layer)
    tp = _tensor_parallel_s(setting, layer.hidden_size)
    cp = _ring_s(setting, layer, attention)
    ep_s = _exchange_s(setting, layer)
    products = len(block_products(layer, run.tp)) + (2 if run.software.attention == "unfused" else 1)
    launches = block_launches(layer)
    forward_launch_s = setting.launch_s * (products + launches[0])
    backward_launch_s = setting.launch_s * (2 * products + launches[1])
    forward = Pass(gemm[0], attention[0], memory[0], forward_launch_s, tp[0], cp[0], ep_s)
    backward = Pass(gemm[1], attention[1], memory[1], backward_launch_s, tp[1], cp[1], ep_s)
    return LayerSeconds(forward, backward, _recomputed_s(run, forward))


def embedding_seconds(setting: Setting) -> LayerSeconds:
    """Return the seconds of looking up tokens; tensor-parallel ranks sum what each of them finds."""
    run, hidden = setting.run, setting.model.token_embedding.hidden_size
    element_s = setting.tokens * hidden / setting.memory_bytes_per_s
    tp_s = setting.links.all_reduce_s(2 * setting.tokens * hidden, run.tp, 1)
    return LayerSeconds(
        Pass(memory_s=EMBEDDING_FORWARD_BYTES * element_s, tp_s=tp_s),
        Pass(memory_s=EMBEDDING_BACKWARD_BYTES * element_s),
    )


def head_seconds(setting: Setting) -> LayerSeconds:
    """Return the seconds of the last norm, the logits and the loss."""
    run, head = setting.run, setting.model.language_head
    hidden, columns = head.hidden_size, head.padded_vocab_size / run.tp
    gemm = _product_s(setting, setting.matmul_flops_per_s, setting.tokens, columns, hidden)
    byte_s = setting.tokens / setting.memory_bytes_per_s
    norm_bytes = HEAD_NORM_BYTES * hidden
    tp_s = setting.links.all_reduce_s(2 * setting.tokens * hidden, run.tp, 1)
    return LayerSeconds(
        Pass(gemm_s=gemm[0], memory_s=byte_s * (columns * LOSS_FORWARD_BYTES + norm_bytes)),
        Pass(gemm_s=gemm[1], memory_s=byte_s * (columns * LOSS_BACKWARD_BYTES + norm_bytes), tp_s=tp_s),
    )


def _product_s(
    setting: Setting,
    flops_per_s: float,
    rows: float,
    columns: float,
    inner: float,
    tail_elements: float = _TAIL_ELEMENTS,
) -> tuple[float, float]:
    """Return the seconds of a weight product forward, and backward for its input and its weight."""
    moved = setting.memory_bytes_per_s
    return (
        matmul_s(rows, columns, inner, flops_per_s, moved, tail_elements=tail_elements),
        matmul_s(rows, inner, columns, flops_per_s, moved, tail_elements=tail_elements)
        + matmul_s(columns, inner, rows, flops_per_s, moved, tail_elements=tail_elements),
    )


def _products_s(setting: Setting, layer: BlockLayer) -> tuple[float, float]:
    forward_s = backward_s = 0.0
    experts = layer.mlp.experts
    for columns, inner, is_routed in block_products(layer, setting.run.tp):
        if is_routed and experts is not None:
            count = max(1.0, experts.num_experts / setting.run.ep)
            visits = setting.tokens * experts.top_k * setting.constants.routed_factor
            rows = visits / count + _TILE_ROWS / 2
            each = _product_s(setting, setting.block_flops_per_s, rows, columns, inner, _TAIL_ELEMENTS / count)
            forward_s, backward_s = forward_s + count * each[0], backward_s + count * each[1]
        else:
            one = _product_s(setting, setting.block_flops_per_s, setting.tokens, columns, inner)
            forward_s, backward_s = forward_s + one[0], backward_s + one[1]
    return forward_s, backward_s


def _attention_s(setting: Setting, layer: BlockLayer) -> tuple[float, float]:
    run = setting.run
    flops = forward_flops(layer, Lengths(run.seq_len)).attention_flops * run.micro_batch_size / (run.tp * run.cp)
    if run.software.attention != "unfused":
        forward_s = flash_s(flops, run.seq_len, setting.attention_flops_per_s)
        return forward_s, BACKWARD_ATTENTION / _FLASH_BACKWARD_SHARE * forward_s
    products_s = flops / setting.attention_flops_per_s
    if layer.attention.head_size % _ALIGNED_ELEMENTS:
        products_s *= setting.constants.unaligned_factor
    scores = layer.attention.num_heads / run.tp * run.micro_batch_size * run.seq_len**2 / run.cp
    score_s = scores / setting.memory_bytes_per_s
    dropout_bytes = _SCORE_DROPOUT_BYTES * run.dropout
    return (
        products_s + score_s * (_SCORE_FORWARD_BYTES + dropout_bytes),
        2 * products_s + score_s * (_SCORE_BACKWARD_BYTES + dropout_bytes),
    )


def _memory_s(setting: Setting, layer: BlockLayer) -> tuple[float, float]:
    run, constants = setting.run, setting.constants
    moved = block_moved(layer, run.tp, run.tp if run.sequence_parallel else 1, run.dropout)
    factor = 1.0
    if run.software.operators == "eager":
        # A layer norm or gelu is one kernel in eager PyTorch too; RMS norms, rotations and gates are many.
        factor = constants.eager_plain_factor if layer.norm == "layernorm" else constants.eager_factor
    forward_bytes, backward_bytes = factor * moved.forward_bytes, factor * moved.backward_bytes
    if run.software.fp8 != "none":
        inputs = layer.hidden_size + layer.attention.num_heads * layer.attention.head_size / run.tp
        ffn = layer.mlp.ffn_size / run.tp
        copies = _ROWWISE_COPIES if run.software.fp8 == "rowwise" else 1
        cast_bytes = _FP8_BYTES * constants.fp8_copy_factor * copies
        forward_bytes += cast_bytes * (inputs + ffn / 2)
        backward_bytes += cast_bytes * (inputs + ffn)
    byte_s = setting.tokens / setting.memory_bytes_per_s
    return byte_s * forward_bytes, byte_s * backward_bytes


def _tensor_parallel_s(setting: Setting, hidden: int) -> tuple[float, float]:
    run, constants = setting.run, setting.constants
    if run.tp == 1:
        return 0.0, 0.0
    both_s = 2 * setting.links.all_reduce_s(2 * setting.tokens * hidden, run.tp, 1)
    if run.software.async_tp:
        both_s *= constants.async_tp_factor
    return both_s, both_s * (constants.overlapped_tp_factor if run.software.overlaps_tp_backward else 1.0)


def _ring_s(setting: Setting, layer: BlockLayer, attention: tuple[float, float]) -> tuple[float, float]:
    """Return what passing keys and values on takes longer than attention."""
    run = setting.run
    if run.cp == 1:
        return 0.0, 0.0
    keys = max(layer.attention.num_kv_heads / run.tp, 1) * layer.attention.head_size
    bytes_per_s, latency_s = setting.links.link(run.cp, run.tp)
    ring_s = (run.cp - 1) * (2 * 2 * setting.tokens * keys / bytes_per_s + latency_s)
    return max(0.0, ring_s - attention[0]), max(0.0, 2 * ring_s - attention[1])


def _exchange_s(setting: Setting, layer: BlockLayer) -> float:
    run, experts = setting.run, layer.mlp.experts
    if run.ep == 1 or experts is None:
        return 0.0
    return 2 * setting.links.exchange_s(2 * setting.tokens * experts.top_k * layer.hidden_size, run.ep, run.tp)


def _recomputed_s(run: RunSpec, forward: Pass) -> float:
    match run.recompute:
        case "none":
            seconds = 0.0
        case "full":
            seconds = forward.total_s
        case "attention":
            seconds = forward.attention_s + forward.cp_s
        case "operators":
            seconds = forward.gemm_s / 2 + forward.memory_s + forward.tp_s / 2
    return seconds / run.recompute_every
