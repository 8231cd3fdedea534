"""The two communications of tensor parallelism, on plain tensors with explicit collectives.

After Megatron-LM (arXiv 1909.08053, figure 3): `copy_to_ranks` stands where a replicated tensor
enters split weights (identity forward, all-reduce backward), `sum_over_ranks` where partial results
leave them (all-reduce forward, identity backward). Parameters may be DTensors, so that checkpoints
can reshard them; arithmetic is on their local part, since eager DTensor arithmetic costs 2-4 times
the host time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The ranks that share the split weights of a layer; the default is one rank alone."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None


SINGLE = TensorParallel()


def local(parameter: Tensor | None) -> Tensor | None:
    """Return the part of `parameter` that this rank holds, differentiably."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def copy_to_ranks(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return `x`; its gradient is summed over the tensor-parallel ranks."""
    return x if tp.size == 1 else _Copy.apply(x, tp.group)


def sum_over_ranks(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return the sum of `x` over the tensor-parallel ranks; `x` itself may be overwritten."""
    return x if tp.size == 1 else _Sum.apply(x.contiguous(), tp.group)


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of a `parameter` that is there, as `local` does."""
    return _present(local(parameter))


class Table(nn.Module):
    """A weight that is looked up by row."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))


class Linear(nn.Module):
    """y = x W^T (+ b), with a weight that may be split over tensor-parallel ranks."""

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.empty(num_outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, local_part(self.weight), local(self.bias))


class RowParallelLinear(Linear):
    """A linear layer over split inputs: partial products are summed, then the whole bias is added."""

    def forward(self, x: Tensor, tp: TensorParallel = SINGLE) -> Tensor:
        if tp.size == 1:
            return super().forward(x)
        y = sum_over_ranks(nn.functional.linear(x, local_part(self.weight)), tp)
        return y if self.bias is None else y + self.bias


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("a weight is missing")
    return tensor
