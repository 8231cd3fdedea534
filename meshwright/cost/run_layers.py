"""Seconds of one block, embedding or head for one micro-batch of a uniform run, on one rank.

Per rank and micro-batch, T = micro-batch samples x sequence / cp tokens. Operators are those of `operators.py`; here is
what a framework and a strategy make of them:

    flash attention      backward 2.5 times the FLOPs at 0.86 of the rate (FlashAttention-2, arXiv 2307.08691, fig. 4-6)
    unfused attention    two batched products over the full square, backward twice that; scores are moved 4 bytes
                         forward and 6 backward (5 more each with dropout), per element
    tensor parallelism   two all-reduces of T h elements forward and two backward (arXiv 1909.08053, section 3); sequence
                         parallelism moves the same (arXiv 2205.05198, section 4.2.2)
    context parallelism  keys and values go round the ring beside the attention of the last part (arXiv 2310.01889)
    expert parallelism   an all-to-all there and one back, forward and backward
    recompute            the forward pass, or its attention, or half of its products and the rest, once more
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.cost.operators import (
    BACKWARD_ATTENTION,
    EMBEDDING_BACKWARD_BYTES,
    EMBEDDING_FORWARD_BYTES,
    HEAD_NORM_BYTES,
    block_launches,
    block_moved,
    block_products,
    flash_s,
    matmul_s,
)
from meshwright.cost.run_links import Links
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.constants import Constants, DeviceConstants
from meshwright.spec.flops import forward_flops
from meshwright.spec.model import BlockLayer
from meshwright.spec.run import RunSpec

EXP: dict = {}
_FLASH_BACKWARD_SHARE = 0.86  # of the forward rate
_ROWWISE_SHARE = 0.8  # of the tensorwise rate: scales of rows and columns are applied in the epilogue
_TILE_ROWS = 128
_ALIGNED_SIZE = 8  # elements of 16 bit: what tensor cores load at once
_SCORE_FORWARD_BYTES, _SCORE_BACKWARD_BYTES, _SCORE_DROPOUT_BYTES = 4, 6, 5
_FP8_BYTES = 4  # per element of a product's input that is cast
# Bytes per logit, forward and backward together.
_LOSS_BYTES = {"eager": 28, "vocab_parallel": 28, "compiled": 28, "fused": 28}


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
        return self.gemm_s + self.attention_s + self.memory_s + self.launch_s + self.tp_s + self.cp_s + self.ep_s


class LayerSeconds(NamedTuple):
    """Forward, backward, and what is computed again before the backward pass."""

    forward: Pass
    backward: Pass
    recompute_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward.total_s + self.backward.total_s + self.recompute_s


class Rates(NamedTuple):
    """What one device reaches."""

    matmul_flops_per_s: float
    block_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    tail_elements: float


def rates_of(run: RunSpec, constants: Constants) -> Rates:
    """Return the rates of the run's device with its kernels, dtypes and clock."""
    device: DeviceSpec = run.cluster.device
    software = run.software
    of = constants.of(device)
    peak = device.bf16_flops_per_s * software.clock
    attention = {"flash2": of.flash2_efficiency, "flash1": of.flash1_efficiency, "unfused": of.unfused_efficiency}
    return Rates(
        matmul_flops_per_s=peak * of.matmul_efficiency,
        block_flops_per_s=peak * _block_efficiency(of, software.fp8),
        attention_flops_per_s=peak * attention[software.attention],
        memory_bytes_per_s=device.memory_bytes_per_s * of.memory_efficiency,
        launch_s=device.launch_s,
        tail_elements=constants.tail_elements,
    )


def _block_efficiency(of: DeviceConstants, fp8: str) -> float:
    if fp8 == "none":
        return of.matmul_efficiency
    return 2 * of.fp8_efficiency * (_ROWWISE_SHARE if fp8 == "rowwise" else 1)


def block_seconds(run: RunSpec, layer: BlockLayer, rates: Rates, links: Links, constants: Constants) -> LayerSeconds:
    """Return the seconds of one block."""
    tokens = run.micro_batch_size * run.seq_len / run.cp
    gemm = _products_s(run, layer, tokens, rates, constants)
    attention = _attention_s(run, layer, rates, constants)
    memory = _memory_s(run, layer, tokens, rates, constants)
    tp = _tensor_parallel_s(run, layer, tokens, links, constants)
    cp = _ring_s(run, layer, tokens, links, attention)
    ep_s = _experts_exchange_s(run, layer, tokens, links)
    launches = len(block_products(layer, run.tp)) + (1 if run.software.attention != "unfused" else 2)
    other = block_launches(layer)
    forward = Pass(
        gemm[0], attention[0], memory[0], rates.launch_s * (launches + other[0]), tp[0], cp[0], ep_s
    )
    backward = Pass(
        gemm[1], attention[1], memory[1], rates.launch_s * (2 * launches + other[1]), tp[1], cp[1], ep_s
    )
    return LayerSeconds(forward, backward, _recomputed_s(run, forward))


def _products_s(
    run: RunSpec, layer: BlockLayer, tokens: float, rates: Rates, constants: Constants
) -> tuple[float, float]:
    forward_s = backward_s = 0.0
    flops, moved, tail = rates.block_flops_per_s, rates.memory_bytes_per_s, rates.tail_elements
    for columns, inner, is_routed in block_products(layer, run.tp):
        rows, count, share = tokens, 1.0, tail
        if is_routed and layer.mlp.experts is not None:
            # All experts of a rank are multiplied at once; each ends in half a tile, and all wait for the fullest rank.
            count = max(1.0, layer.mlp.experts.num_experts / run.ep)
            visits = tokens * layer.mlp.experts.top_k * constants.expert_imbalance_factor / count * 1
            rows = visits + _TILE_ROWS / 2
            share = tail / count
        forward_s += count * matmul_s(rows, columns, inner, flops, moved, 2, share)
        backward_s += count * matmul_s(rows, inner, columns, flops, moved, 2, share)
        backward_s += count * matmul_s(columns, inner, rows, flops, moved, 2, share)
    return forward_s, backward_s


def _attention_s(run: RunSpec, layer: BlockLayer, rates: Rates, constants: Constants) -> tuple[float, float]:
    flops = forward_flops(layer, run.seq_len).attention_flops * run.micro_batch_size / (run.tp * run.cp)
    if run.software.attention != "unfused":
        forward_s = flash_s(flops, run.seq_len, rates.attention_flops_per_s)
        return forward_s, BACKWARD_ATTENTION / _FLASH_BACKWARD_SHARE * forward_s
    products_s = flops / rates.attention_flops_per_s
    if layer.attention.head_size % _ALIGNED_SIZE:
        products_s *= constants.unaligned_factor
    heads = layer.attention.num_heads / run.tp
    scores = heads * run.micro_batch_size * run.seq_len**2 / run.cp
    dropout = _SCORE_DROPOUT_BYTES * run.dropout
    return (
        products_s + scores * (_SCORE_FORWARD_BYTES + dropout) / rates.memory_bytes_per_s,
        2 * products_s + scores * (_SCORE_BACKWARD_BYTES + dropout) / rates.memory_bytes_per_s,
    )


def _memory_s(
    run: RunSpec, layer: BlockLayer, tokens: float, rates: Rates, constants: Constants
) -> tuple[float, float]:
    hidden_ranks = run.tp if run.sequence_parallel else 1
    moved = block_moved(layer, run.tp, hidden_ranks, run.dropout)
    factor = constants.eager_factor if run.software.operators == "eager" else 1.0
    if factor != 1 and layer.norm == "layernorm":
        factor = EXP.get("gptf", factor)
    forward_bytes, backward_bytes = factor * moved.forward_bytes, factor * moved.backward_bytes
    if run.software.fp8 != "none":
        queries = layer.attention.num_heads * layer.attention.head_size / run.tp
        ffn = layer.mlp.ffn_size / run.tp
        cast = _FP8_BYTES * constants.fp8_copy_factor * (2 if run.software.fp8 == "rowwise" else 1)
        forward_bytes += cast * (layer.hidden_size + queries + ffn / 2)
        backward_bytes += cast * (layer.hidden_size + queries + ffn)
    return tokens * forward_bytes / rates.memory_bytes_per_s, tokens * backward_bytes / rates.memory_bytes_per_s


def _tensor_parallel_s(
    run: RunSpec, layer: BlockLayer, tokens: float, links: Links, constants: Constants
) -> tuple[float, float]:
    if run.tp == 1:
        return 0.0, 0.0
    both_s = 2 * links.all_reduce_s(2 * tokens * layer.hidden_size, run.tp, 1)
    if run.software.async_tp:
        both_s *= constants.async_tp_factor
    overlapped = constants.overlapped_tp_factor if run.software.overlaps_tp_backward else 1.0
    return both_s, overlapped * both_s


def _ring_s(
    run: RunSpec, layer: BlockLayer, tokens: float, links: Links, attention: tuple[float, float]
) -> tuple[float, float]:
    """Return what passing keys and values on takes longer than attention."""
    if run.cp == 1:
        return 0.0, 0.0
    keys = max(layer.attention.num_kv_heads / run.tp, 1) * layer.attention.head_size
    bytes_per_s, latency_s = links.link(run.cp, run.tp)
    ring_s = (run.cp - 1) * (2 * 2 * tokens * keys / bytes_per_s + latency_s)
    return max(0.0, ring_s - attention[0]), max(0.0, 2 * ring_s - attention[1])


def _experts_exchange_s(run: RunSpec, layer: BlockLayer, tokens: float, links: Links) -> float:
    if run.ep == 1 or layer.mlp.experts is None:
        return 0.0
    visits = tokens * layer.mlp.experts.top_k
    return 2 * links.exchange_s(2 * visits * layer.hidden_size, run.ep, run.tp)


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


def embedding_seconds(run: RunSpec, rates: Rates, links: Links) -> LayerSeconds:
    """Return the seconds of looking up tokens; with tensor parallelism the rows of all ranks are summed."""
    hidden = run.model.embedding.hidden_size
    tokens = run.micro_batch_size * run.seq_len / run.cp
    moved = tokens * hidden / rates.memory_bytes_per_s
    tp_s = links.all_reduce_s(2 * tokens * hidden, run.tp, 1)
    return LayerSeconds(
        Pass(memory_s=EMBEDDING_FORWARD_BYTES * moved, tp_s=tp_s), Pass(memory_s=EMBEDDING_BACKWARD_BYTES * moved)
    )


def head_seconds(run: RunSpec, rates: Rates, links: Links) -> LayerSeconds:
    """Return the seconds of the last norm, the logits and the loss."""
    head = run.model.head
    tokens = run.micro_batch_size * run.seq_len / run.cp
    columns, inner = head.padded_vocab_size / run.tp, head.hidden_size
    flops, moved, tail = rates.matmul_flops_per_s, rates.memory_bytes_per_s, rates.tail_elements
    forward_s = matmul_s(tokens, columns, inner, flops, moved, 2, tail)
    backward_s = matmul_s(tokens, inner, columns, flops, moved, 2, tail)
    backward_s += matmul_s(columns, inner, tokens, flops, moved, 2, tail)
    loss_bytes = tokens * (columns * _LOSS_BYTES[run.software.loss] / 2 + HEAD_NORM_BYTES * inner)
    tp_s = links.all_reduce_s(2 * tokens * inner, run.tp, 1)
    return LayerSeconds(
        Pass(gemm_s=forward_s, memory_s=loss_bytes / moved),
        Pass(gemm_s=backward_s, memory_s=loss_bytes / moved, tp_s=tp_s),
    )
