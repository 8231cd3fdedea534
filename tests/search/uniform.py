"""Every uniform plan of a setting, listed by plain loops and priced by `predict`: what the search must not lose to."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.predict import predict
from meshwright.spec.base import Dtype
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.legality import why_illegal_tp
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.strategy import Strategy
from tests.plans import uniform


def all_strategies(num_devices: int) -> set[Strategy]:
    """Return every way to split a layer over `num_devices` that the planner knows, by trying all degrees."""
    found: set[Strategy] = set()
    degrees = range(1, num_devices + 1)
    for tp, replicas, shards in ((t, r, s) for t in degrees for r in degrees for s in degrees):
        if tp * replicas * shards != num_devices:
            continue
        for zero_stage in (0,) if shards == 1 else (2, 3):
            for recompute in ("none", "full"):
                for inner in ("tp", "dp") if tp > 1 and replicas * shards > 1 else ("tp",):
                    found.add(
                        Strategy(
                            tp=tp,
                            dp_replicate=replicas,
                            dp_shard=shards,
                            zero_stage=zero_stage,
                            recompute=recompute,
                            inner=inner,
                        )
                    )
    return found


def uniform_plans(
    model: ModelSpec, cluster: ClusterSpec, *, batch: int, seq_len: int, dtype: Dtype = "bf16"
) -> Iterator[Plan]:
    """Yield every plan with one strategy for all blocks and even stages, priced."""
    for stages in range(1, min(cluster.num_devices, model.num_blocks) + 1):
        if cluster.num_devices % stages:
            continue
        for strategy in all_strategies(cluster.num_devices // stages):
            if any(why_illegal_tp(layer, strategy.tp) for layer in model.layers):
                continue
            for micro_batches in range(1, batch + 1):
                if batch % micro_batches or batch // micro_batches % strategy.dp:
                    continue
                plan = uniform(
                    model,
                    cluster,
                    strategy,
                    batch=batch,
                    seq_len=seq_len,
                    stages=stages,
                    micro_batches=micro_batches,
                    dtype=dtype,
                )
                yield plan.model_copy(update={"predicted": predict(plan)})


def bound_bytes(plan: Plan) -> list[int]:
    """Return what the search counts for each stage of a priced plan."""
    assert plan.predicted is not None
    return [stage.bound_bytes for stage in plan.predicted.stages]


def step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s
