"""Moving hidden tensors between the layouts of neighbouring layers, with the exact gradient.

Executes `spec.mesh.transfer`. In both directions slices are replicated over tensor-parallel ranks,
so the gradient simply takes the transfer back: nothing is summed. (An all-gather whose backward is
a reduce-scatter would count replicated gradients several times.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.runtime.groups import World
from meshwright.spec.mesh import Layout, transfer


class Mover:
    """One direction of a re-layout on this rank: samples (dimension 0) from `source` to `target`."""

    def __init__(self, source: Layout, target: Layout, world: World) -> None:
        moved = transfer(source, target)
        self.kind = moved.kind
        self.mine = moved.ranks[world.local_rank]
        self.held_units = moved.num_units // source.dp
        self.group = world.stage_group(self.mine.group) if len(self.mine.group) > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the samples that this rank holds in the target layout."""
        if self.kind == "none":
            return x
        pieces = x.contiguous().unflatten(0, (self.held_units, -1))
        if self.kind == "slice":
            # A copy, because a view would keep all of `x` alive.
            first, last = self.mine.send_units[0], self.mine.send_units[-1]
            return pieces[first : last + 1].flatten(0, 1).clone()
        if self.group is None:
            received = pieces[list(self.mine.send_units)]
        elif self.kind == "all_gather":
            received = pieces.new_empty((len(self.mine.order), *pieces.shape[1:]))
            dist.all_gather_single(received, pieces, group=self.group)
        else:
            received = self._exchange(pieces)
        if self.mine.order != tuple(range(len(self.mine.order))):
            received = received[list(self.mine.order)]
        return received.flatten(0, 1)

    def _exchange(self, pieces: Tensor) -> Tensor:
        received = pieces.new_empty((sum(self.mine.receive_splits), *pieces.shape[1:]))
        dist.all_to_all_single(
            received,
            pieces[list(self.mine.send_units)],
            output_split_sizes=list(self.mine.receive_splits),
            input_split_sizes=list(self.mine.send_splits),
            group=self.group,
        )
        return received


class Relayout:
    """The re-layout between two neighbouring layers: applied to every tensor that is handed on."""

    def __init__(self, source: Layout, target: Layout, world: World) -> None:
        self.there = Mover(source, target, world)
        self.back = Mover(target, source, world)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.there.kind == "none":
            return tensors
        return tuple(_Move.apply(x, self.there, self.back) if x.is_floating_point() else self.there(x) for x in tensors)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Mover, back: Mover) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(gradient), None, None
