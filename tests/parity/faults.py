"""Faults planted on purpose, to see that the comparison catches them: tests of the tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.pipeline import Pipeline
from meshwright.runtime.relayout import Mover, Relayout
from meshwright.runtime.stage import Stage

# The module: as an attribute of the package that name is the function.
parallelize = importlib.import_module("meshwright.runtime.parallelize")

# fault -> the case that it is planted in
FAULTS = {
    "mean_instead_of_sum": "tp2-and-dp2-and-zero3",
    "dropped_micro_batch": "pp2-uneven",
    "skipped_relayout": "both-mesh-orders",
    "transposed_relayout": "pp2-mixed-uneven",
    "missing_tied_sum": "pp2-dp2-tied",
    "missing_split_norm_sum": "tp2-qk-norm",
    "dropout_of_slices": "bert-dp2",
    "unmoved_source": "t5-mixed-uneven",
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Break the runtime inside the block."""
    with {
        "mean_instead_of_sum": _mean,
        "dropped_micro_batch": _dropped,
        "skipped_relayout": lambda: mock.patch.object(Relayout, "__call__", lambda self, *tensors: tensors),
        "transposed_relayout": _transposed,
        "missing_tied_sum": lambda: mock.patch.object(parallelize, "sum_tied", return_value=None),
        "missing_split_norm_sum": lambda: mock.patch.object(parallelize, "sum_split_norms", return_value=None),
        "dropout_of_slices": lambda: mock.patch.object(Stage, "_in_layer", lambda self, at, index: at),
        "unmoved_source": _first_moved_alone,
    }[fault]():
        yield


def _mean() -> Any:
    """Divide gradients by the data-parallel degree, as frameworks do that average."""
    original = FSDPModule.set_gradient_divide_factor
    return mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, 2.0))


def _dropped() -> Any:
    """Let the second micro-batch count in the loss but give no gradient."""
    original: Callable[..., tuple[Tensor, ...]] = Pipeline._forward
    calls = 0

    def forward(self: Pipeline, inputs: tuple[Tensor, ...], targets: Tensor | None, at: Any) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        out = original(self, inputs, targets, at)
        return (out[0].detach() + 0.0 * out[0],) if targets is not None and calls == 2 else out

    return mock.patch.object(Pipeline, "_forward", forward)


def _first_moved_alone() -> Any:
    """Move hidden states, and drop the gradient of what travels beside them."""
    original = Relayout.__call__

    def move(self: Relayout, *tensors: Tensor) -> tuple[Tensor, ...]:
        first, *beside = original(self, *tensors)
        return first, *(x.detach() for x in beside)

    return mock.patch.object(Relayout, "__call__", move)


def _transposed() -> Any:
    """Hand the samples of a slice on in the wrong order."""
    original = Mover.__call__

    def move(self: Mover, x: Tensor) -> Tensor:
        moved = original(self, x)
        return torch.flip(moved, [0]) if self.kind == "all_gather" else moved

    return mock.patch.object(Mover, "__call__", move)
