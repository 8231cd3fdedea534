"""Time something on all ranks at once.

Every rank computes at the same time, because ranks that share cores, memory or a link are slower
together than alone. A sample repeats the call for a while, the same number of times on every rank:
shorter ones would fit between two switches of the scheduler and not see ranks that share a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist

SAMPLE_S = 0.06
REPEATS = 5
_MOST_CALLS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Median seconds of a call on the slowest rank, and half the interquartile range over the median."""

    seconds: float
    spread: float


def timed(call: Callable[[], object], device: torch.device, *, sample_s: float = SAMPLE_S) -> Timed:
    """Return how long `call` takes when all ranks make it together."""
    calls = calls_in_a_sample(call, device, sample_s)
    samples: list[float] = []
    for _ in range(REPEATS):
        dist.barrier()
        samples.append(_seconds(call, calls, device))
    return summary(samples, device)


def summary(samples: list[float], device: torch.device) -> Timed:
    """Return median and spread of one rank's samples, for the slowest rank."""
    middle = median(samples)
    first, _, third = quantiles(samples, n=4)
    seconds, spread = largest([middle, (third - first) / 2 / middle], device)
    return Timed(seconds=seconds, spread=spread)


def calls_in_a_sample(call: Callable[[], object], device: torch.device, sample_s: float) -> int:
    """Return how many calls last about `sample_s`, the same on every rank."""
    _seconds(call, 2, device)
    (one_s,) = largest([_seconds(call, 2, device)], device)
    return max(1, min(_MOST_CALLS, round(sample_s / one_s)))


def largest(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / calls
