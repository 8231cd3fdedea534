"""Bytes that one rank holds for a layer: states, saved activations, and what is alive for a moment.

States per parameter, as the runtime holds them (p and r bytes of the compute and reduce dtypes, d
shards): fp32 master 4/d, gradient 4/d, two Adam states 8/d; ZeRO-0 and ZeRO-2 keep the gathered
parameters in the compute dtype, p, from the first forward to the last backward of a step. A layer
that stands alone (dp 1) and computes in fp32 has no such copy.

Saved activations: cost/activations.py.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.cost.activations import input_bytes, saved_bytes, working_bytes
from meshwright.cost.collectives import padded_elements, shard_elements
from meshwright.spec.base import dtype_bytes
from meshwright.spec.cluster import Kernels
from meshwright.spec.job import JobSpec
from meshwright.spec.model import LayerSpec
from meshwright.spec.parameters import ParameterSpec
from meshwright.spec.plan import needs_copy
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import StateBytes, TransientBytes

_FP32 = 4
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
    if strategy.recompute == "full":
        return samples_per_rank * input_bytes(layer, job)
    return samples_per_rank * saved_bytes(layer, strategy.tp, job, kernels)


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
    local = padded_elements(parameters, strategy.tp, strategy.dp_shard) * strategy.dp_shard
    param, reduce = dtype_bytes(job.param_dtype), dtype_bytes(job.reduce_dtype)
    recomputes = strategy.recompute == "full"
    return TransientBytes(
        # ZeRO-3 holds this layer's parameters and the flat buffer they or the next layer's arrive in.
        gather_bytes=2 * local * param if strategy.zero_stage == _ZERO_3 else 0,
        # The new gradient (accumulated elsewhere under ZeRO-0) and the flat copy that is reduced.
        reduce_bytes=local * ((param if strategy.dp_shard > 1 else 0) + reduce) if needs_copy(strategy, job) else 0,
        recompute_bytes=samples_per_rank * saved_bytes(layer, strategy.tp, job, kernels) if recomputes else 0,
        working_bytes=samples_per_rank * working_bytes(layer, strategy.tp, job),
        accumulate_bytes=0 if needs_copy(strategy, job) else local * param,
    )
