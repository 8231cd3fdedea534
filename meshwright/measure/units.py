"""Measure what the data-parallel runtime adds to a pass of a layer: collectives, copies, hooks, bookkeeping.

Two units under a root, as in a stage, hold parameters that cost nothing to compute with. What their
passes add to ranks that compute in between, halved, is one unit's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.measure.task import Figures, Task
from meshwright.measure.timing import Call, timed_between
from meshwright.measure.ways import Way
from meshwright.runtime.groups import group_alone
from meshwright.runtime.split import fsdp_unit, shard_over
from meshwright.spec.base import Dtype, dtype_bytes
from meshwright.spec.job import JobSpec
from meshwright.spec.profile import UnitOp, UnitSample
from meshwright.units import show_bytes

_OPS: tuple[UnitOp, ...] = ("gather", "reduce_scatter", "all_reduce", "accumulate")
_TENSORS = 8  # parameters of a layer; a block has 7 to 12
_COLUMNS = 64
_UNITS = 2


def unit_tasks(device: torch.device, ways: tuple[Way, ...], sizes: tuple[int, ...], job: JobSpec) -> Iterator[Task]:
    """Yield the four things that a unit does, for units whose parameters take `sizes` bytes in the compute dtype."""
    for way in ways:
        for op in _OPS:
            if op == "accumulate" and way is not ways[0]:
                continue  # no rank talks
            for param_bytes in sizes:
                elements = param_bytes // dtype_bytes(job.param_dtype)
                dtype: Dtype = job.param_dtype if op == "gather" else job.reduce_dtype
                message_bytes = elements * dtype_bytes(dtype)
                yield Task(
                    blank=UnitSample(
                        op=op,
                        dtype=job.param_dtype,
                        num_ranks=way.size,
                        stride=way.stride,
                        num_nodes=way.num_nodes,
                        message_bytes=message_bytes,
                        seconds=1.0,
                    ),
                    label=f"{op} of a layer of {show_bytes(message_bytes)} over {way.label}",
                    measure=lambda op=op, elements=elements, way=way: _measure(op, elements, way, job, device),
                )


def _measure(op: UnitOp, num_elements: int, way: Way, job: JobSpec, device: torch.device) -> Figures:
    return timed_between(_passes(op, num_elements, way, job, device), device).figures(_UNITS)


class _Use(torch.autograd.Function):
    """Hands `x` on; in backward every weight gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.shapes = [(w.shape, w.dtype, w.device) for w in weights]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


class _Weights(nn.Module):
    def __init__(self, num_elements: int, num_ranks: int, device: torch.device) -> None:
        super().__init__()
        rows = max(1, num_elements // _TENSORS // _COLUMNS // num_ranks) * num_ranks
        self.weights = nn.ParameterList(torch.zeros(rows, _COLUMNS, device=device) for _ in range(_TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        return _Use.apply(x, *self.weights)  # type: ignore[no-any-return]


def _passes(op: UnitOp, num_elements: int, way: Way, job: JobSpec, device: torch.device) -> Call:
    """Return passes through two units whose difference to none is what `op` costs twice."""
    layers = [_Weights(num_elements, way.size, device) for _ in range(_UNITS)]
    root = nn.Sequential(*layers)
    mesh = _mesh(way, device, shards=op in ("gather", "reduce_scatter"))
    for layer in layers:
        shard_over([layer], mesh, job, lets_go=op == "gather")
    shard_over([root], mesh, job, lets_go=False)
    x = torch.zeros(1, _COLUMNS, device=device, requires_grad=True)
    if op == "gather":

        def forward() -> None:
            with torch.no_grad():
                root(x)

        return forward
    for layer in layers:
        unit = fsdp_unit(layer)
        unit.set_reshard_after_backward(False, recurse=False)
        unit.set_requires_gradient_sync(op != "accumulate", recurse=False)
        unit.set_requires_all_reduce(op == "all_reduce", recurse=False)

    def forward_backward() -> None:
        root(x).sum().backward()
        for parameter in root.parameters():
            parameter.grad = None

    return forward_backward


def _mesh(way: Way, device: torch.device, *, shards: bool) -> DeviceMesh:
    """Return a mesh that shards over the way's group, or one that replicates over it."""
    if shards:
        return DeviceMesh.from_group(way.group, device.type)
    ranks = torch.tensor(way.ranks).view(-1, 1)
    return DeviceMesh.from_group(
        [way.group, group_alone()], device.type, ranks, mesh_dim_names=("dp_replicate", "dp_shard")
    )
