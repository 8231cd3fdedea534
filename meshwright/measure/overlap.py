"""Measure how much compute and a collective slow each other down while both run (arXiv 2307.02031, section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist

from meshwright.measure.task import Figures, Task
from meshwright.measure.timing import REPEATS, largest, timed
from meshwright.measure.ways import Way
from meshwright.spec.profile import OverlapSample
from meshwright.units import show_bytes

_MESSAGE_BYTES = 1 << 22
_SIZE = 512
_WINDOW_S = 0.15
_MOST_SLOWDOWN = 10.0


def overlap_tasks(device: torch.device, ways: tuple[Way, ...]) -> Iterator[Task]:
    """Yield one task for every way that lies in one piece: an all-reduce beside matrix products."""
    for way in ways:
        if way.stride == 1:
            yield Task(
                blank=OverlapSample(
                    op="all_reduce",
                    num_ranks=way.size,
                    message_bytes=_MESSAGE_BYTES,
                    compute_slowdown=1.0,
                    communication_slowdown=1.0,
                ),
                label=f"compute beside an all_reduce of {show_bytes(_MESSAGE_BYTES)} over {way.label}",
                measure=lambda way=way: _measure(way, device),
            )


def slowdowns(compute_alone_s: float, alone_s: float, compute_end_s: float, end_s: float) -> tuple[float, float]:
    """Return by how much compute and communication were slower while both ran.

    Both started at 0 and would alone have taken `compute_alone_s` and `alone_s`. The one that ends
    last ran at its own speed from the moment when the other was done.
    """
    together_s = min(compute_end_s, end_s)
    compute_work_s = compute_alone_s - max(0.0, compute_end_s - together_s)
    work_s = alone_s - max(0.0, end_s - together_s)
    # Of one that got nothing done beside the other, or that was much slower alone than later, no more is said.
    return _ratio(together_s, compute_work_s), _ratio(together_s, work_s)


def _ratio(together_s: float, work_s: float) -> float:
    return together_s / max(work_s, together_s / _MOST_SLOWDOWN)


def _measure(way: Way, device: torch.device) -> Figures:
    message = torch.zeros(_MESSAGE_BYTES // 4, device=device)
    left, right = torch.randn(2, _SIZE, _SIZE, device=device)
    compute_one_s = timed(lambda: torch.mm(left, right), device).seconds
    one_s = timed(lambda: dist.all_reduce(message, group=way.group), device).seconds
    products, messages = max(1, round(_WINDOW_S / compute_one_s)), max(1, round(_WINDOW_S / one_s))
    found: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        dist.barrier()
        ends = _together(device, message, way, messages, left, right, products)
        compute_end_s, end_s = largest(list(ends), device)
        found.append(slowdowns(products * compute_one_s, messages * one_s, compute_end_s, end_s))
    compute, communication = (median(max(1.0, pair[i]) for pair in found) for i in range(2))
    spread = max((max(pair[i] for pair in found) - min(pair[i] for pair in found)) / 2 for i in range(2))
    return {
        "compute_slowdown": compute,
        "communication_slowdown": communication,
        "spread": spread / min(compute, communication),
        "repeats": REPEATS,
    }


def _together(
    device: torch.device,
    message: torch.Tensor,
    way: Way,
    messages: int,
    left: torch.Tensor,
    right: torch.Tensor,
    products: int,
) -> tuple[float, float]:
    """Return when compute and when communication ended, in seconds after both were started."""
    started = time.perf_counter()
    started_works = (dist.all_reduce(message, group=way.group, async_op=True) for _ in range(messages))
    works = [work for work in started_works if work is not None]
    if device.type == "cuda":
        return _together_on_gpu(works, left, right, products)
    end_s = 0.0
    for _ in range(products):
        torch.mm(left, right)
        if not end_s and works[-1].is_completed():
            end_s = time.perf_counter() - started
    compute_end_s = time.perf_counter() - started
    for work in works:
        work.wait()
    return compute_end_s, end_s or time.perf_counter() - started


def _together_on_gpu(
    works: list[dist.Work], left: torch.Tensor, right: torch.Tensor, products: int
) -> tuple[float, float]:
    begin, compute_end, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    for _ in range(products):
        torch.mm(left, right)
    compute_end.record()
    waiting = torch.cuda.Stream()
    with torch.cuda.stream(waiting):
        for work in works:
            work.wait()
        end.record(waiting)
    torch.cuda.synchronize()
    return begin.elapsed_time(compute_end) / 1e3, begin.elapsed_time(end) / 1e3
