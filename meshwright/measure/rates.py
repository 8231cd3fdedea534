"""Measure what every rank does by itself, all at once: matrix products, copies, launches, the end of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from meshwright.measure.task import Figures, Task
from meshwright.measure.timing import Call, timed
from meshwright.runtime.split import TORCH_DTYPES
from meshwright.spec.base import Dtype
from meshwright.spec.profile import AccumulateSample, CopySample, LaunchSample, MatmulSample, OptimizerSample

_SIZES = ((512, 512, 512), (2048, 256, 256), (2048, 256, 1024))
_COPY_ELEMENTS = 1 << 21
# As many that no cache holds them.
_PARAMETERS, _ELEMENTS_EACH = 16, 1 << 19


def rate_tasks(device: torch.device, dtypes: tuple[Dtype, ...]) -> Iterator[Task]:
    """Yield what is measured of any machine."""
    ranks = dist.get_world_size()
    for dtype in dtypes:
        for m, k, n in _SIZES:
            yield Task(
                blank=MatmulSample(dtype=dtype, m=m, k=k, n=n, busy_ranks=ranks, seconds=1.0),
                label=f"matrix product of {m} x {k} x {n}, {dtype}",
                measure=lambda size=(m, k, n), dtype=dtype: _timed(_matmul(size, dtype, device), device),
            )
    yield Task(
        blank=CopySample(moved_bytes=8 * _COPY_ELEMENTS, busy_ranks=ranks, seconds=1.0),
        label="copy",
        measure=lambda: _timed(_copy(device), device),
    )
    yield Task(
        blank=LaunchSample(busy_ranks=ranks, seconds=1.0),
        label="launch",
        measure=lambda: _timed(_launch(device), device),
    )
    elements = _PARAMETERS * _ELEMENTS_EACH
    yield Task(
        blank=OptimizerSample(num_elements=elements, busy_ranks=ranks, seconds=1.0),
        label="optimizer",
        measure=lambda: _timed(_end_of_step(device), device),
    )
    for dtype in dtypes:
        yield Task(
            blank=AccumulateSample(num_elements=elements, dtype=dtype, busy_ranks=ranks, seconds=1.0),
            label=f"accumulation of gradients in {dtype}",
            measure=lambda dtype=dtype: _timed(_accumulate(dtype, device), device),
        )


def _timed(call: Call, device: torch.device) -> Figures:
    return timed(call, device).figures()


def _matmul(size: tuple[int, int, int], dtype: Dtype, device: torch.device) -> Call:
    m, k, n = size
    left = torch.randn(m, k, device=device).to(TORCH_DTYPES[dtype])
    right = torch.randn(n, k, device=device).to(TORCH_DTYPES[dtype])
    return lambda: torch.nn.functional.linear(left, right)


def _copy(device: torch.device) -> Call:
    source = torch.randn(_COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _launch(device: torch.device) -> Call:
    x = torch.zeros(8, device=device, requires_grad=True)
    return lambda: x + 1


def _end_of_step(device: torch.device) -> Call:
    """Return what ends a step on a rank: the norm of the gradients, clipping, AdamW."""
    parameters = [torch.nn.Parameter(torch.zeros(_ELEMENTS_EACH, device=device)) for _ in range(_PARAMETERS)]
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def end() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.stack(torch._foreach_norm(gradients)).square().sum().item()
        torch._foreach_mul_(gradients, 0.999)
        optimizer.step()

    return end


def _accumulate(dtype: Dtype, device: torch.device) -> Call:
    sums = [torch.zeros(_ELEMENTS_EACH, device=device) for _ in range(_PARAMETERS)]
    gradients = [torch.ones(_ELEMENTS_EACH, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(_PARAMETERS)]

    def add() -> None:
        for one, gradient in zip(sums, gradients, strict=True):
            one.add_(gradient)

    return add
