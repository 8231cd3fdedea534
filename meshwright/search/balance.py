"""Balance memory and time over stages: the bi-objective loop of arXiv 2307.02031 (section 5), beside the exact answer.

The loop starts from the partition that balances memory, p_m, and moves layers off the slowest stage
towards the one that balances time, p_t. The paper leaves open how both are made before strategies are
known. Here: p_m has the least memory on its fullest stage when every layer uses the strategy that
needs least, p_t the least time on its slowest stage when every layer uses its fastest. Layers are
chosen well (stages.PartitionPlans) for every partition that the loop visits, and solved exactly for the best of them.

Degrees of balance: alpha_t = 1 - max C_i / sum C_i and alpha_m = 1 - max M_i / sum M_i.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meshwright.search.problem import StageChoice, StageProblem
from meshwright.search.shortfall import best_cut, shortfall
from meshwright.search.stages import PartitionPlans, solve_below

Boundaries = tuple[int, ...]
_LEAST_TIME_S = 0.05
_EXACT_PARTITIONS = 3


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly time and memory lie on the stages of one partition, after its layers were solved."""

    name: str  # p_m, p_t or answer
    boundaries: Boundaries
    alpha_t: float
    alpha_m: float


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """What the loop found (`choice` claims nothing: its lower bound is 0), and how balanced the partitions were."""

    choice: StageChoice | None
    balances: tuple[Balance, ...]
    num_partitions: int


def memory_balanced(problem: StageProblem) -> Boundaries | None:
    """Return p_m, or None when some layer can use no strategy."""
    found = shortfall(problem)
    return None if found is None else found.boundaries


def time_balanced(problem: StageProblem) -> Boundaries | None:
    """Return p_t, or None when some layer can use no strategy."""
    num_layers, num_stages = problem.num_layers, problem.num_stages
    least = (problem.forward_s + problem.backward_s).min(axis=1)
    if num_layers < num_stages or not np.isfinite(least).all():
        return None
    before = np.concatenate([[0.0], np.cumsum(least)])
    spans = np.full((num_stages, num_layers + 1, num_layers + 1), np.inf)
    for start in range(num_layers):
        spans[:, start, start + 1 :] = before[start + 1 :] - before[start]
    return best_cut(spans)


def solve_balanced(problem: StageProblem, *, beat_s: float | None = None, time_limit_s: float = 20.0) -> Balanced:
    """Return what the paper's loop comes to: partitions in the order of a queue, each with its best layers.

    The best partitions are solved exactly as far as that can beat `beat_s`, where there is something to beat.
    """
    deadline = time.perf_counter() + time_limit_s
    p_m, p_t = memory_balanced(problem), time_balanced(problem)
    if p_m is None or p_t is None:
        return Balanced(choice=None, balances=(), num_partitions=0)
    known: dict[Boundaries, StageChoice | None] = {}
    plans = PartitionPlans(problem)

    def solved(partition: Boundaries) -> StageChoice | None:
        if partition not in known:
            known[partition] = plans.plan(partition)
        return known[partition]

    at_p_t = solved(p_t)
    most_bytes = max(at_p_t.stage_bytes) if at_p_t is not None else math.inf
    best, queue, seen = solved(p_m), deque([p_m]), {p_m}
    while queue and (best is None or time.perf_counter() < deadline):
        here = solved(queue.popleft())
        if here is None:
            continue
        if best is None or here.objective_s < best.objective_s:
            best = here
        for partition in _moved(here):
            if partition in seen:
                continue
            seen.add(partition)
            there = solved(partition)
            if there is not None and _is_accepted(there, here, most_bytes):
                queue.append(partition)
    best = _exact(problem, [choice for choice in known.values() if choice is not None], p_m, beat_s, deadline)
    named = (("p_m", solved(p_m)), ("p_t", at_p_t), ("answer", best))
    balances = tuple(_balance(name, choice) for name, choice in named if choice is not None)
    return Balanced(choice=best, balances=balances, num_partitions=len(known))


def _exact(
    problem: StageProblem, found: list[StageChoice], p_m: Boundaries, beat_s: float | None, deadline: float
) -> StageChoice | None:
    """Return the best plan of the most promising partitions, their layers now solved exactly; of p_m without any."""
    found.sort(key=lambda choice: (choice.objective_s, choice.boundaries))
    best = found[0] if found else None
    for partition in [choice.boundaries for choice in found[:_EXACT_PARTITIONS]] or [p_m]:
        left_s = max(_LEAST_TIME_S, deadline - time.perf_counter())
        known = [seconds for seconds in (beat_s, best.objective_s if best else None) if seconds is not None]
        better, _ = solve_below(problem, beat_s=min(known, default=None), time_limit_s=left_s, partitions=(partition,))
        best = best if better is None else better
    return best


def _is_accepted(there: StageChoice, here: StageChoice, most_bytes: float) -> bool:
    """The slowest stage is not slower, and no stage holds more than the time-balanced partition's fullest."""
    return max(there.stage_s) <= max(here.stage_s) and max(there.stage_bytes) <= most_bytes


def _moved(choice: StageChoice) -> Iterator[Boundaries]:
    """Yield the partition with a boundary layer of the slowest stage handed to each of its neighbours."""
    bounds = choice.boundaries
    slowest = int(np.argmax(choice.stage_s))
    if bounds[slowest + 1] - bounds[slowest] == 1:
        return
    last = len(bounds) - 2
    if slowest > 0:
        yield (*bounds[:slowest], bounds[slowest] + 1, *bounds[slowest + 1 :])
    if slowest < last:
        yield (*bounds[: slowest + 1], bounds[slowest + 1] - 1, *bounds[slowest + 2 :])


def _balance(name: str, choice: StageChoice) -> Balance:
    return Balance(
        name=name,
        boundaries=choice.boundaries,
        alpha_t=_evenness(choice.stage_s),
        alpha_m=_evenness(choice.stage_bytes),
    )


def _evenness(values: tuple[float, ...]) -> float:
    total = sum(values)
    return 1.0 - max(values) / total if total else 0.0


def stage_sizes(boundaries: Boundaries) -> tuple[int, ...]:
    """Return how many layers each stage has."""
    return tuple(high - low for low, high in pairwise(boundaries))
