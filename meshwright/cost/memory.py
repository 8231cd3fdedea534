"""Bytes that one rank holds for a layer: states, saved activations, and what is alive for a moment.

States per parameter, as the runtime holds them (p and r bytes of the compute and reduce dtypes, d
shards): fp32 master 4/d, gradient 4/d, two Adam states 8/d; ZeRO-0 and ZeRO-2 keep the gathered
parameters in the compute dtype, p, from the first forward to the last backward of a step. A layer
that stands alone (dp 1) and computes in fp32 has no such copy.

Saved activations are counted tensor by tensor for two kernel sets. `cuda_fused`: norms save their
input and one or two statistics a row. `cpu_stock`: RMSNorm is decomposed and saves its input and
its normalised input in fp32. Attention is a flash kernel in both (q, k, v, output and one fp32
statistic per row and head).
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.cost.collectives import padded_elements, shard_elements
from meshwright.spec.base import dtype_bytes
from meshwright.spec.cluster import Kernels
from meshwright.spec.job import JobSpec
from meshwright.spec.model import BlockLayer, EmbeddingLayer, HeadLayer, LayerSpec, Norm
from meshwright.spec.parameters import ParameterSpec
from meshwright.spec.plan import needs_copy
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import StateBytes, TransientBytes

_FP32 = 4
_INT64 = 8
_ZERO_3 = 3
_STEP_COUNTER_BYTES = 4  # AdamW keeps one fp32 scalar a tensor


def state_bytes(
    parameters: tuple[ParameterSpec, ...], strategy: Strategy, job: JobSpec, *, shard_index: int = 0
) -> StateBytes:
    """Return the states of `parameters` on the rank that holds shard `shard_index` (0 is the fullest)."""
    shards = strategy.dp_shard
    own = padded_elements(parameters, strategy.tp, shards)
    exact = sum(shard_elements(p, strategy.tp, shards, shard_index) for p in parameters)
    keeps_copy = strategy.zero_stage < _ZERO_3 and needs_copy(strategy, job)
    return StateBytes(
        master_bytes=_FP32 * own,
        copy_bytes=own * shards * dtype_bytes(job.param_dtype) if keeps_copy else 0,
        gradient_bytes=_FP32 * own * (shards if strategy.zero_stage == 1 else 1),  # ZeRO-1 keeps them whole
        optimizer_bytes=2 * _FP32 * exact + _STEP_COUNTER_BYTES * len(parameters),
    )


@lru_cache(maxsize=65536)
def activation_bytes(
    layer: LayerSpec, strategy: Strategy, samples_per_rank: int, job: JobSpec, kernels: Kernels
) -> int:
    """Return what autograd keeps of one micro-batch's forward pass through `layer`, input included."""
    tokens = samples_per_rank * job.seq_len
    if strategy.recompute == "full":
        return tokens * _input_bytes(layer, job)
    return tokens * _saved_bytes(layer, strategy.tp, job, kernels)


@lru_cache(maxsize=65536)
def transient_bytes(
    layer: LayerSpec,
    parameters: tuple[ParameterSpec, ...],
    strategy: Strategy,
    samples_per_rank: int,
    job: JobSpec,
    kernels: Kernels,
) -> TransientBytes:
    """Return what is alive, beside states and saved activations, while `layer` runs backward."""
    tokens = samples_per_rank * job.seq_len
    local = padded_elements(parameters, strategy.tp, strategy.dp_shard) * strategy.dp_shard
    param, reduce = dtype_bytes(job.param_dtype), dtype_bytes(job.reduce_dtype)
    recomputes = strategy.recompute == "full"
    return TransientBytes(
        # ZeRO-3 holds this layer's parameters and the flat buffer they or the next layer's arrive in.
        gather_bytes=2 * local * param if strategy.zero_stage == _ZERO_3 else 0,
        # The new gradient (accumulated elsewhere under ZeRO-0) and the flat copy that is reduced.
        reduce_bytes=local * ((param if strategy.dp_shard > 1 else 0) + reduce) if needs_copy(strategy, job) else 0,
        recompute_bytes=tokens * _saved_bytes(layer, strategy.tp, job, kernels) if recomputes else 0,
        working_bytes=tokens * _working_bytes(layer, strategy.tp, job),
        accumulate_bytes=0 if needs_copy(strategy, job) else local * param,
    )


def _input_bytes(layer: LayerSpec, job: JobSpec) -> int:
    """Bytes a token of what recomputation keeps: the layer's input (and the head's targets)."""
    if isinstance(layer, EmbeddingLayer):
        return _INT64
    hidden = layer.hidden_size * dtype_bytes(job.param_dtype)
    return hidden + (_INT64 if isinstance(layer, HeadLayer) else 0)


def _saved_bytes(layer: LayerSpec, tp: int, job: JobSpec, kernels: Kernels) -> int:
    """Bytes a token that autograd saves in `layer`, on one of `tp` ranks."""
    param = dtype_bytes(job.param_dtype)
    match layer:
        case EmbeddingLayer():
            # Split over the vocabulary: shifted ids and the mask of foreign ones, instead of the ids.
            return _INT64 if tp == 1 else _INT64 + 1
        case HeadLayer():
            norm = _norm_saved(layer.norm, layer.hidden_size, 1, job, kernels) + layer.hidden_size * param
            logits = layer.padded_vocab_size // tp * param
            return norm + logits + _FP32 + _INT64
        case BlockLayer():
            return _block_saved(layer, tp, job, kernels)


def _block_saved(layer: BlockLayer, tp: int, job: JobSpec, kernels: Kernels) -> int:
    param, hidden = dtype_bytes(job.param_dtype), layer.hidden_size
    attention, mlp = layer.attention, layer.mlp
    heads, kv_heads = attention.num_heads // tp, attention.num_kv_heads // tp
    norms = 2 * (_norm_saved(layer.norm, hidden, 1, job, kernels) + hidden * param)
    core = (2 * heads + 2 * kv_heads) * attention.head_size * param + _FP32 * heads
    if attention.qk_norm:
        core += _norm_saved("rmsnorm", attention.head_size, heads + kv_heads, job, kernels)
    ffn_tensors = 4 if mlp.gated else 2
    return norms + core + ffn_tensors * (mlp.ffn_size // tp) * param


def _norm_saved(norm: Norm, size: int, rows: int, job: JobSpec, kernels: Kernels) -> int:
    """Bytes a token that a norm over `rows` rows of `size` saves: its input and statistics."""
    param = dtype_bytes(job.param_dtype)
    if norm == "rmsnorm" and kernels == "cpu_stock":
        return rows * (2 * size * _FP32 + _FP32)
    statistics = 1 if norm == "rmsnorm" else 2
    statistic_bytes = param if kernels == "cpu_stock" else _FP32
    return rows * (size * param + statistics * statistic_bytes)


def _working_bytes(layer: LayerSpec, tp: int, job: JobSpec) -> int:
    """Bytes a token of gradients and temporaries inside the layer's backward pass, at its widest."""
    param = dtype_bytes(job.param_dtype)
    match layer:
        case EmbeddingLayer():
            return 2 * layer.hidden_size * param
        case HeadLayer():
            # Probabilities in fp32, and their gradient in the compute dtype.
            return layer.padded_vocab_size // tp * (_FP32 + param) + 2 * layer.hidden_size * param
        case BlockLayer():
            ffn = layer.mlp.ffn_size // tp
            return param * ((3 if layer.mlp.gated else 2) * ffn + 3 * layer.hidden_size)
