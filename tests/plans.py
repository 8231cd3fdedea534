"""Plans that tests write by hand."""

from __future__ import annotations

from itertools import pairwise

from meshwright.spec.base import Dtype
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import Budget, JobSpec
from meshwright.spec.library import cluster, model
from meshwright.spec.model import LayerGroup, ModelSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy


def cut(spec: ModelSpec, num_blocks: int) -> ModelSpec:
    """Return a model of one kind of block with another number of them."""
    first, blocks, last = spec.groups
    middle = LayerGroup(num_layers=num_blocks, layer=blocks.layer)
    return spec.model_copy(update={"groups": (first, middle, last)})


def by_hand(
    model_spec: ModelSpec | str,
    cluster_spec: ClusterSpec | str,
    strategies: list[Strategy],
    *,
    batch: int,
    seq_len: int,
    target_seq_len: int | None = None,
    sizes: list[int] | None = None,
    micro_batches: int = 1,
    dtype: Dtype = "bf16",
    schedule: ScheduleName = "1f1b",
) -> Plan:
    """Return a plan with a strategy for each layer; `sizes` count the layers of each stage."""
    spec = model(model_spec) if isinstance(model_spec, str) else model_spec
    ranks = cluster(cluster_spec) if isinstance(cluster_spec, str) else cluster_spec
    bounds = [0]
    for size in sizes or [len(strategies)]:
        bounds.append(bounds[-1] + size)
    return Plan(
        model=spec,
        cluster=ranks,
        job=JobSpec(global_batch_size=batch, seq_len=seq_len, target_seq_len=target_seq_len, param_dtype=dtype),
        budget=Budget(memory_bytes=ranks.device.memory_bytes),
        num_devices=ranks.num_devices,
        global_batch_size=batch,
        num_micro_batches=micro_batches,
        schedule=schedule,
        stages=tuple(StagePlan.of(strategies[low:high]) for low, high in pairwise(bounds)),
    )


def uniform(
    model_spec: ModelSpec | str,
    cluster_spec: ClusterSpec | str,
    strategy: Strategy,
    *,
    batch: int,
    seq_len: int,
    stages: int = 1,
    micro_batches: int = 1,
    dtype: Dtype = "bf16",
    schedule: ScheduleName = "1f1b",
) -> Plan:
    """Return one strategy for all blocks, over even stages; embedding and head have it without recomputation."""
    spec = model(model_spec) if isinstance(model_spec, str) else model_spec
    ends = strategy.model_copy(update={"recompute": "none"})
    each, extra = divmod(spec.num_blocks, stages)
    sizes = [each + (stage < extra) + (stage == 0) + (stage == stages - 1) for stage in range(stages)]
    return by_hand(
        spec,
        cluster_spec,
        [ends, *[strategy] * spec.num_blocks, ends],
        batch=batch,
        seq_len=seq_len,
        sizes=sizes,
        micro_batches=micro_batches,
        dtype=dtype,
        schedule=schedule,
    )
