"""Every collective and send that one step of a plan issues on one rank: what is priced, counted out.

A test runs a step and holds the recorded calls against this list (kind, bytes, ranks, number).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.cost.collectives import REPORT_BYTES, layer_collectives, shard_elements
from meshwright.cost.layer import TIED_WEIGHT, held_parameters
from meshwright.cost.reshard import tensor_bytes
from meshwright.spec.base import dtype_bytes
from meshwright.spec.mesh import Layout, MeshShape, transfer
from meshwright.spec.model import hands_on
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.plan import Plan
from meshwright.spec.profile import CollectiveOp


class Call(NamedTuple):
    """One communication: its kind, the bytes of the whole tensor, and the global ranks (sender first in a send)."""

    op: CollectiveOp
    message_bytes: int
    ranks: tuple[int, ...]


def step_calls(plan: Plan, rank: int) -> Counter[Call]:
    """Return what global `rank` issues in one step of `plan`; a send counts at its sender only."""
    calls: Counter[Call] = Counter()
    for call, count in _calls(plan, rank):
        if call.message_bytes and count and len(call.ranks) > 1:
            calls[call] += count
    return calls


def _calls(plan: Plan, rank: int) -> Iterator[tuple[Call, int]]:
    stage, local = divmod(rank, plan.stage_devices)
    first = stage * plan.stage_devices

    def at(local_ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(first + r for r in local_ranks))

    for index in range(plan.boundaries[stage], plan.boundaries[stage + 1]):
        for call, count in _tensor_parallel(plan, index, local):
            yield Call(call.op, call.message_bytes, at(call.ranks)), count
        if index > 0:
            for call, count in _relayouts(plan, index, local):
                yield Call(call.op, call.message_bytes, at(call.ranks)), count
        yield from ((Call(c.op, c.message_bytes, at(c.ranks)), n) for c, n in _split_norms(plan, index, local))
    for unit in plan.sharded_units(stage):
        for call, count in _data_parallel(plan, unit, local):
            yield Call(call.op, call.message_bytes, at(call.ranks)), count
    yield from _borders(plan, stage, rank)
    yield from _tied(plan, stage, rank)
    yield Call("all_reduce", REPORT_BYTES, tuple(range(plan.num_devices))), 1


def _tensor_parallel(plan: Plan, index: int, local: int) -> Iterator[tuple[Call, int]]:
    strategy = plan.strategies[index]
    samples = plan.micro_batch_samples // strategy.dp
    for c in layer_collectives(plan.model.layers[index], (), strategy, samples, plan.job):
        yield Call(c.op, c.message_bytes, MeshShape.of(strategy).group(c.axis, local)), c.count * plan.num_micro_batches


def _data_parallel(plan: Plan, unit: tuple[int, ...], local: int) -> Iterator[tuple[Call, int]]:
    strategy = plan.strategies[unit[0]]
    parameters = tuple(
        p for index in unit for p in held_parameters(plan.model, plan.model.layers[index], plan.num_stages)
    )
    for c in layer_collectives(plan.model.layers[unit[0]], parameters, strategy, 1, plan.job):
        if c.purpose != "tp":
            count = c.count * (1 if c.phase == "step" else plan.num_micro_batches)
            yield Call(c.op, c.message_bytes, MeshShape.of(strategy).group(c.axis, local)), count


def _relayouts(plan: Plan, index: int, local: int) -> Iterator[tuple[Call, int]]:
    before, after = (Layout.of(plan.strategies[i]) for i in (index - 1, index))
    for source, target in ((before, after), (after, before)):
        moved = transfer(source, target)
        mine = moved.ranks[local]
        for tensor in hands_on(plan.model.layers[index - 1]):
            unit_bytes = plan.micro_batch_samples // moved.num_units * tensor_bytes(tensor, plan.job)
            if moved.kind in ("all_gather", "all_to_all"):
                yield Call(moved.kind, len(mine.order) * unit_bytes, mine.group), plan.num_micro_batches


def _split_norms(plan: Plan, index: int, local: int) -> Iterator[tuple[Call, int]]:
    strategy = plan.strategies[index]
    mesh = MeshShape.of(strategy)
    shard = mesh.dp_index(local) % mesh.dp_shard
    for parameter in layer_parameters(plan.model.layers[index]):
        if parameter.acts_on_split:
            own = shard_elements(parameter, strategy.tp, strategy.dp_shard, shard)
            yield Call("all_reduce", own * dtype_bytes(plan.job.master_dtype), mesh.group("tp", local)), 1


def _borders(plan: Plan, stage: int, rank: int) -> Iterator[tuple[Call, int]]:
    bounds, n = plan.boundaries, plan.stage_devices
    for sender_layer, target in ((bounds[stage + 1] - 1, rank + n), (bounds[stage] - 1, rank - n)):
        if 0 <= sender_layer < len(plan.model.layers) - 1:
            samples = plan.micro_batch_samples // plan.strategies[sender_layer].dp
            for tensor in hands_on(plan.model.layers[sender_layer]):
                yield Call("send", samples * tensor_bytes(tensor, plan.job), (rank, target)), plan.num_micro_batches


def _tied(plan: Plan, stage: int, rank: int) -> Iterator[tuple[Call, int]]:
    if not plan.model.tied_embedding or plan.num_stages == 1 or stage not in (0, plan.num_stages - 1):
        return
    strategy = plan.strategies[0]
    mesh, local = MeshShape.of(strategy), rank % plan.stage_devices
    weight = next(p for p in layer_parameters(plan.model.head) if p.name == TIED_WEIGHT)
    own = shard_elements(weight, strategy.tp, strategy.dp_shard, mesh.dp_index(local) % mesh.dp_shard)
    pair = (local, (plan.num_stages - 1) * plan.stage_devices + local)
    yield Call("all_reduce", own * dtype_bytes(plan.job.master_dtype), pair), 1
