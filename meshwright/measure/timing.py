"""Time something on all ranks at once.

Every rank computes at the same time, because ranks that share cores, memory or a link are slower
together than alone. A sample repeats the call for a while, the same number of times on every rank:
shorter ones would fit between two switches of the scheduler and not see ranks that share a core.

What a call adds to a rank that computes in between is measured as a difference (`timed_between`):
a collective in a tight loop finds its buffers in the cache and its threads awake, and took about
half the time so that it takes inside a training step on CPU ranks (docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from meshwright.measure.task import Figures

SAMPLE_S = 0.04
REPEATS = 3
_MOST_CALLS = 2000
_LONG = 4
_LEAST_S = 1e-6  # nothing that is timed here takes less
_WORK_ELEMENTS = 1 << 19
_WORK_SIZE = 256

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Median seconds of a call on the slowest rank, and half the range between repeats over the median."""

    seconds: float
    spread: float
    repeats: int

    def figures(self, parts: int = 1) -> Figures:
        """Return the figures of a sample: of one of `parts` equal parts of the call."""
        return {"seconds": self.seconds / parts, "spread": self.spread, "repeats": self.repeats}


def timed(call: Call, device: torch.device) -> Timed:
    """Return how long `call` takes when all ranks make it together."""
    calls = calls_in_a_sample(call, device, SAMPLE_S)
    samples: list[float] = []
    for _ in range(REPEATS):
        dist.barrier()
        samples.append(_seconds(call, calls, device))
    return summary(samples, device)


def timed_between(call: Call, device: torch.device) -> Timed:
    """Return what `call` adds to ranks that compute before each: the time with it less the time without."""
    work = _work(device)

    def both() -> None:
        work()
        call()

    calls = calls_in_a_sample(both, device, 2 * SAMPLE_S)
    samples: list[float] = []
    for _ in range(REPEATS):
        dist.barrier()
        alone = _seconds(work, calls, device)
        dist.barrier()
        together = _seconds(both, calls, device)
        alone, together = largest([alone, together], device)
        samples.append(together - alone)
    return summary(samples, device)


def summary(samples: list[float], device: torch.device) -> Timed:
    """Return median and spread of one rank's samples, for the slowest rank."""
    middle = max(_LEAST_S, median(samples))  # a difference may come out below zero
    seconds, spread = largest([middle, (max(samples) - min(samples)) / 2 / middle], device)
    return Timed(seconds=seconds, spread=spread, repeats=len(samples))


def calls_in_a_sample(call: Call, device: torch.device, sample_s: float) -> int:
    """Return how many calls last about `sample_s`, the same on every rank."""
    (first_s,) = largest([_seconds(call, 1, device)], device)
    if first_s > _LONG * sample_s:  # cold or not, one call is a sample
        return 1
    (one_s,) = largest([_seconds(call, 1, device)], device)
    return max(1, min(_MOST_CALLS, round(sample_s / one_s)))


def largest(values: list[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Call, calls: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / calls


def _work(device: torch.device) -> Call:
    """Return a piece of compute of a few milliseconds on a CPU: a matrix product and a pass over memory."""
    left = torch.randn(_WORK_SIZE, _WORK_SIZE, device=device)
    right = torch.randn(_WORK_SIZE, _WORK_ELEMENTS // _WORK_SIZE, device=device)
    memory = torch.zeros(_WORK_ELEMENTS, device=device)

    def work() -> None:
        memory.add_(1.0)
        torch.mm(left, right)

    return work
