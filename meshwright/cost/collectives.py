"""Which collectives a layer issues under a strategy: the inventory that is priced and that a test counts.

What the runtime does, per layer and rank:

* tensor parallel block: an all-reduce of the hidden states after attention and after the MLP in
  forward, one for each of their inputs in backward; recomputation repeats the first of the two
  forward ones (it stops before the second, whose result nothing saves, unless a norm follows: post-norm, or the
  one that closes an encoder).
* cross attention is a third part of a block; the source states' gradient, and that of a shared table of relative
  positions, are all-reduced in backward too.
* patch embeddings, patch merging and classifiers, which every rank holds whole: nothing.
* vocabulary-parallel embedding: one all-reduce in forward, repeated by recomputation where a norm follows.
* head: a maximum and a sum over the vocabulary in the loss, an all-reduce of the hidden states' gradient in
  backward.
* ZeRO-3: all-gather of the parameters before forward and before backward of every micro-batch.
  ZeRO-1 and ZeRO-2: once a step. ZeRO-2 and ZeRO-3 reduce-scatter gradients after every micro-batch, ZeRO-1
  once a step; with replicas on top (HSDP) the shards are all-reduced once a step.
* plain replication: one all-reduce of the gradients a step.
* norms over split heads: their gradients are summed over the tensor-parallel ranks once a step.

Message bytes are those of the whole tensor: what an all-reduce reduces, an all-gather or all-to-all
returns, a reduce-scatter takes in, a send carries. Parameters are padded to the shard count
along dimension 0, one by one, as `fully_shard` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from meshwright.spec.base import dtype_bytes
from meshwright.spec.flops import num_tokens
from meshwright.spec.job import JobSpec
from meshwright.spec.mesh import Axis
from meshwright.spec.model import BlockLayer, CustomLayer, EmbeddingLayer, HeadLayer, LayerSpec, relative_table
from meshwright.spec.parameters import ParameterSpec
from meshwright.spec.profile import CollectiveOp
from meshwright.spec.strategy import Strategy

Phase = Literal["forward", "backward", "recompute", "step"]
LOSS_FP32_BYTES = 4
REPORT_BYTES = 32  # squared gradient norm, loss, tokens, stop requests, as fp64, summed over all ranks once a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` calls per micro-batch (or per step) of one collective over one axis of a layer's mesh."""

    op: CollectiveOp
    axis: Axis
    message_bytes: int
    phase: Phase
    count: int = 1
    purpose: Literal["tp", "gather", "reduce"] = "tp"


@lru_cache(maxsize=65536)
def layer_collectives(
    layer: LayerSpec,
    parameters: tuple[ParameterSpec, ...],
    strategy: Strategy,
    samples_per_rank: int,
    job: JobSpec,
) -> tuple[Collective, ...]:
    """Return what one rank issues for `layer`, whose own `parameters` are given (a tied head holds fewer)."""
    return (
        *tensor_parallel_collectives(layer, strategy, samples_per_rank, job),
        *data_parallel_collectives(parameters, strategy, job),
    )


def tensor_parallel_collectives(
    layer: LayerSpec, strategy: Strategy, samples_per_rank: int, job: JobSpec
) -> tuple[Collective, ...]:
    """Return what one rank issues because the layer is split, a micro-batch."""
    found = _tensor_parallel(layer, strategy, samples_per_rank, job)
    return tuple(c for c in found if c.count and c.message_bytes)


def data_parallel_collectives(
    parameters: tuple[ParameterSpec, ...], strategy: Strategy, job: JobSpec
) -> tuple[Collective, ...]:
    """Return what one rank issues because others have the same parameters, whatever the samples."""
    return tuple(c for c in _data_parallel(parameters, strategy, job) if c.count and c.message_bytes)


@lru_cache(maxsize=65536)
def padded_elements(parameters: tuple[ParameterSpec, ...], tp: int, num_shards: int) -> int:
    """Return the elements of one rank's shard of `parameters`, rows padded to equal shards."""
    total = 0
    for parameter in parameters:
        rows, *rest = parameter.local_shape(tp)
        total += -(-rows // num_shards) * prod(rest)
    return total


def shard_elements(parameter: ParameterSpec, tp: int, num_shards: int, shard_index: int) -> int:
    """Return the elements, without padding, of shard `shard_index` of `parameter`'s tensor-parallel part."""
    rows, *rest = parameter.local_shape(tp)
    size = -(-rows // num_shards)
    return max(0, min(size, rows - shard_index * size)) * prod(rest)


def _tensor_parallel(layer: LayerSpec, strategy: Strategy, samples: int, job: JobSpec) -> Iterator[Collective]:
    if strategy.tp == 1:
        return
    tokens, param = samples * num_tokens(layer, job.lengths), dtype_bytes(job.param_dtype)
    hidden_bytes = tokens * layer.hidden_size * param
    recomputed = int(strategy.recompute == "full")
    if isinstance(layer, EmbeddingLayer):
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="forward")
        again = recomputed * (layer.norm is not None)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="recompute", count=again)
    elif isinstance(layer, BlockLayer):
        parts = 2 + (layer.cross_attention is not None)
        again = recomputed * (parts if layer.post_norm or layer.closing_norm else parts - 1)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="forward", count=parts)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="backward", count=parts)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="recompute", count=again)
        if layer.cross_attention is not None:
            source_bytes = samples * job.seq_len * layer.hidden_size * param
            yield Collective(op="all_reduce", axis="tp", message_bytes=source_bytes, phase="backward")
        if layer.attention.relative is not None:
            table_bytes = relative_table(layer.attention).num_elements(job.lengths) * param
            yield Collective(op="all_reduce", axis="tp", message_bytes=table_bytes, phase="backward")
    elif isinstance(layer, CustomLayer):
        parts, again = layer.num_parts, recomputed * max(0, layer.num_parts - 1)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="forward", count=parts)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="backward", count=parts)
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="recompute", count=again)
    elif isinstance(layer, HeadLayer):
        maxima, sums = tokens * LOSS_FP32_BYTES, 2 * tokens * LOSS_FP32_BYTES
        for message_bytes in (maxima, sums):
            yield Collective(op="all_reduce", axis="tp", message_bytes=message_bytes, phase="forward")
            yield Collective(
                op="all_reduce", axis="tp", message_bytes=message_bytes, phase="recompute", count=recomputed
            )
        yield Collective(op="all_reduce", axis="tp", message_bytes=hidden_bytes, phase="backward")


def _data_parallel(parameters: tuple[ParameterSpec, ...], strategy: Strategy, job: JobSpec) -> Iterator[Collective]:
    shards = strategy.dp_shard
    own = padded_elements(parameters, strategy.tp, shards)
    gathered_bytes = own * shards * dtype_bytes(job.param_dtype)
    gradient_bytes = own * shards * dtype_bytes(job.reduce_dtype)
    if shards > 1:
        phases: tuple[Phase, ...] = ("forward", "backward") if strategy.zero_stage == 3 else ("step",)  # noqa: PLR2004
        for phase in phases:
            yield Collective(
                op="all_gather", axis="dp_shard", message_bytes=gathered_bytes, phase=phase, purpose="gather"
            )
        yield Collective(
            op="reduce_scatter",
            axis="dp_shard",
            message_bytes=gradient_bytes,
            phase="step" if strategy.zero_stage == 1 else "backward",
            purpose="reduce",
        )
    if strategy.dp_replicate > 1:
        yield Collective(
            op="all_reduce",
            axis="dp_replicate",
            message_bytes=own * dtype_bytes(job.reduce_dtype),
            phase="step",
            purpose="reduce",
        )
