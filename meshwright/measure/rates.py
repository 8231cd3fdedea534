"""Measure the rates of this machine with all ranks busy: matrix products, copies, launches, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.measure.timing import timed
from meshwright.spec.base import Dtype
from meshwright.spec.profile import (
    CollectiveOp,
    CollectiveSample,
    CopySample,
    LaunchSample,
    MatmulSample,
    Profile,
)

_SIZES = ((512, 512, 512), (2048, 256, 256), (2048, 256, 1024))
_COPY_ELEMENTS = 1 << 21
_MESSAGES = (1 << 10, 1 << 16, 1 << 19, 1 << 22)
_TORCH: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
_PAIR = 2


def measure_rates(device: torch.device, name: str) -> Profile:
    """Return the profile of the ranks of the running process group. Collective; every rank gets all samples."""
    num_ranks = dist.get_world_size()
    groups = list(_groups(num_ranks))
    return Profile(
        device=name,
        backend="cuda" if device.type == "cuda" else "cpu",
        num_ranks=num_ranks,
        torch_version=str(torch.__version__),
        matmuls=tuple(_matmuls(device)),
        copies=(_copy(device),),
        launches=(_launch(device),),
        collectives=tuple(_collectives(device, groups)),
    )


def _groups(num_ranks: int) -> Iterator[tuple[int, int, dist.ProcessGroup]]:
    """Yield (size, stride, this rank's group) for every way to part the ranks into equal groups of equal stride.

    All ranks make all groups, in the same order, and all groups of one way are busy at the same time.
    """
    for size in (d for d in range(2, num_ranks + 1) if num_ranks % d == 0):
        for stride in (d for d in range(1, num_ranks // size + 1) if (num_ranks // size) % d == 0):
            for start in range(0, num_ranks, size * stride):
                for offset in range(stride):
                    ranks = list(range(start + offset, start + offset + size * stride, stride))
                    group = dist.new_group(ranks)
                    if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
                        yield size, stride, group


def _matmuls(device: torch.device) -> Iterator[MatmulSample]:
    for dtype, torch_dtype in _TORCH.items():
        for m, k, n in _SIZES:
            left = torch.randn(m, k, device=device).to(torch_dtype)
            right = torch.randn(n, k, device=device).to(torch_dtype)
            seconds = timed(lambda a=left, b=right: torch.nn.functional.linear(a, b), device).seconds
            yield MatmulSample(dtype=dtype, m=m, k=k, n=n, busy_ranks=dist.get_world_size(), seconds=seconds)


def _copy(device: torch.device) -> CopySample:
    source = torch.randn(_COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device).seconds
    return CopySample(
        moved_bytes=2 * source.numel() * source.element_size(), busy_ranks=dist.get_world_size(), seconds=seconds
    )


def _launch(device: torch.device) -> LaunchSample:
    x = torch.zeros(8, device=device, requires_grad=True)
    return LaunchSample(busy_ranks=dist.get_world_size(), seconds=timed(lambda: x + 1, device).seconds)


def _collectives(device: torch.device, groups: list[tuple[int, int, dist.ProcessGroup]]) -> Iterator[CollectiveSample]:
    for size, stride, group in groups:
        for op in _OPS:
            if op == "send" and size != _PAIR:
                continue
            for message_bytes in _MESSAGES:
                taken = timed(_collective(op, message_bytes, size, group, device), device)
                yield CollectiveSample(
                    op=op,
                    num_ranks=size,
                    stride=stride,
                    message_bytes=message_bytes,
                    seconds=taken.seconds,
                    spread=taken.spread,
                )


def _collective(
    op: CollectiveOp, message_bytes: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    whole = torch.zeros(message_bytes // 4, device=device)
    part = torch.zeros(message_bytes // 4 // size, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if op == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    return lambda: _pass_on(whole, group)


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> None:
    """Send from the even to the odd neighbour."""
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    if place % 2 == 0:
        dist.send(x, ranks[place + 1], group=group)
    else:
        dist.recv(x, ranks[place - 1], group=group)
