"""Measure every collective that the runtime uses, over groups, strides and sizes, between pieces of compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.measure.task import Task
from meshwright.measure.timing import Call, timed_between
from meshwright.measure.ways import Way
from meshwright.runtime.split import TORCH_DTYPES
from meshwright.spec.base import Dtype, dtype_bytes
from meshwright.spec.profile import CollectiveOp, CollectiveSample
from meshwright.units import show_bytes

_OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_PAIR = 2


def collective_tasks(
    device: torch.device, ways: tuple[Way, ...], sizes: tuple[int, ...], dtypes: tuple[Dtype, ...]
) -> Iterator[Task]:
    """Yield the collectives over messages of `sizes` bytes; those that add numbers up, in all of `dtypes`."""
    for way in ways:
        for op in _OPS:
            if op == "send" and way.size != _PAIR:
                continue
            for dtype in dtypes if op in _REDUCTIONS else dtypes[:1]:
                for message_bytes in sizes:
                    yield Task(
                        blank=CollectiveSample(
                            op=op,
                            dtype=dtype,
                            num_ranks=way.size,
                            stride=way.stride,
                            num_nodes=way.num_nodes,
                            message_bytes=message_bytes,
                            seconds=1.0,
                        ),
                        label=f"{op} of {show_bytes(message_bytes)} over {way.label}",
                        measure=lambda op=op, dtype=dtype, size=message_bytes, way=way: timed_between(
                            collective(op, dtype, size, way, device), device
                        ).figures(),
                    )


def collective(op: CollectiveOp, dtype: Dtype, message_bytes: int, way: Way, device: torch.device) -> Call:
    """Return the call of a collective on a tensor of about `message_bytes`."""
    elements = max(1, message_bytes // dtype_bytes(dtype) // way.size) * way.size
    whole = torch.zeros(elements, device=device, dtype=TORCH_DTYPES[dtype])
    part = whole[: elements // way.size].clone()
    group = way.group
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if op == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    return _pass_on(whole, way)


def _pass_on(x: Tensor, way: Way) -> Call:
    """Send from the even to the odd neighbour as the pipeline does: the sender goes on and waits one message later."""
    place = way.ranks.index(dist.get_rank())
    if place % 2:
        return lambda: dist.recv(x, way.ranks[place - 1], group=way.group)
    pending: list[dist.Work] = []

    def send() -> None:
        while pending:
            pending.pop().wait()
        work = dist.isend(x, way.ranks[place + 1], group=way.group)
        assert work is not None  # noqa: S101 this rank is in the group
        pending.append(work)

    return send
