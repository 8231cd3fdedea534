"""Which prices of a plan rest on samples of a profile, and which were fitted or extrapolated from others."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost.comm import group_shape, measured_sizes
from meshwright.cost.compute import measured_counts
from meshwright.cost.inventory import step_calls
from meshwright.spec.model import LayerSpec
from meshwright.spec.plan import Plan
from meshwright.units import show_bytes


def not_measured(plan: Plan) -> tuple[str, ...]:
    """Return in words what of `plan` was priced without a sample of it; nothing where the cluster has no samples."""
    if not plan.cluster.collective_samples and not plan.cluster.device.layer_samples:
        return ()
    return tuple(dict.fromkeys((*_busy_ranks(plan), *_layers(plan), *_calls(plan))))


def _busy_ranks(plan: Plan) -> Iterator[str]:
    """Ranks that share a machine slow each other down: layers are as fast as with the ranks that were busy then."""
    busy = max((sample.busy_ranks for sample in plan.cluster.device.layer_samples), default=0)
    ranks = min(plan.num_devices, plan.cluster.devices_per_node)
    if plan.cluster.device.backend == "cpu" and 0 < busy < ranks:
        yield f"layers with {ranks} ranks busy on a machine: {busy} were when they were measured"


def _layers(plan: Plan) -> Iterator[str]:
    pairs = dict.fromkeys(zip(plan.model.layers, plan.strategies, strict=True))
    shapes: dict[tuple[LayerSpec, int, int], None] = dict.fromkeys(
        (layer, strategy.tp, plan.micro_batch_samples // strategy.dp) for layer, strategy in pairs
    )
    for layer, tp, samples in shapes:
        counts = measured_counts(layer, tp, plan.job, plan.cluster.device)
        if not counts:
            yield f"{layer.kind} at tp {tp}, {plan.job.seq_len} tokens, {plan.job.param_dtype}: no sample"
        elif samples > max(counts):
            yield f"{layer.kind} at tp {tp}, {samples} samples a rank: above the largest measured, {max(counts)}"


def _calls(plan: Plan) -> Iterator[str]:
    largest: dict[tuple[str, int, int, int], int] = {}
    for stage in range(plan.num_stages):
        for call in step_calls(plan, stage * plan.stage_devices):
            key = (call.op, len(call.ranks), *group_shape(call.ranks, plan.cluster.devices_per_node))
            largest[key] = max(largest.get(key, 0), call.message_bytes)
    for (op, num_ranks, stride, num_nodes), message_bytes in largest.items():
        sizes = measured_sizes(op, num_ranks, num_nodes, plan.cluster)
        where = f"{op} over {num_ranks} ranks, {stride} apart" + (f", on {num_nodes} nodes" if num_nodes > 1 else "")
        if not sizes:
            yield f"{where}: no sample"
        elif message_bytes > max(sizes):
            yield f"{where}, {show_bytes(message_bytes)}: above the largest measured, {show_bytes(max(sizes))}"
