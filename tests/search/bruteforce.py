"""Every plan of a small StageProblem, priced by loops that share nothing with the solver, and random problems."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.search.problem import StageProblem
from meshwright.spec.schedule import make_schedule, prerequisites


@dataclass(frozen=True)
class Plans:
    """All plans of one partition."""

    boundaries: tuple[int, ...]
    strategies: np.ndarray  # [plan, layer]
    times: np.ndarray  # [plan] simulated
    excess: np.ndarray  # [plan] largest bytes over a stage's budget


def every_plan(problem: StageProblem) -> list[Plans]:
    """Return all partitions with all allowed assignments."""
    num_layers, num_strategies = problem.forward_s.shape
    assignments = np.array(list(itertools.product(range(num_strategies), repeat=num_layers)))
    allowed = np.isfinite(problem.forward_s)[np.arange(num_layers), assignments].all(axis=1)
    if problem.tied:
        allowed &= assignments[:, 0] == assignments[:, -1]
    assignments = assignments[allowed]
    cuts = itertools.combinations(range(1, num_layers), problem.num_stages - 1)
    return [_priced(problem, (0, *cut, num_layers), assignments) for cut in cuts]


def _priced(problem: StageProblem, boundaries: tuple[int, ...], plans: np.ndarray) -> Plans:
    stages = problem.num_stages
    f, b, g = np.zeros((3, len(plans), stages))
    excess = np.full((len(plans), stages), 0.0)
    for i in range(stages):
        transient = np.full(len(plans), -np.inf)
        g[:, i] += problem.stage_step_s[i]
        for layer in range(boundaries[i], boundaries[i + 1]):
            s = plans[:, layer]
            f[:, i] += problem.forward_s[layer, s]
            b[:, i] += problem.backward_s[layer, s]
            g[:, i] += problem.step_s[layer, s]
            excess[:, i] += problem.states_bytes[layer, s] + problem.in_flight[i] * problem.act_bytes[layer, s]
            # What this layer frees is gone when those before it run backward.
            freed = np.zeros(len(plans)) if problem.freed_bytes is None else problem.freed_bytes[layer, s]
            transient = np.maximum(transient - freed, problem.transient_bytes[layer, s])
            if layer:
                r = plans[:, layer - 1]
                sf, sb = problem.switch_forward_s, problem.switch_backward_s
                if layer == boundaries[i] and problem.enter_forward_s is not None:
                    sf = problem.enter_forward_s
                if layer == boundaries[i] and problem.enter_backward_s is not None:
                    sb = problem.enter_backward_s
                f[:, i] += (sf[layer] if sf.ndim == 3 else sf)[r, s]
                b[:, i] += (sb[layer] if sb.ndim == 3 else sb)[r, s]
            if layer == boundaries[i] and i:
                bf, bb = problem.border_forward_s, problem.border_backward_s
                for j in (i - 1, i):
                    f[:, j] += (bf[layer - 1] if bf.ndim == 2 else bf)[r]
                    b[:, j] += (bb[layer - 1] if bb.ndim == 2 else bb)[r]
        excess[:, i] += transient - problem.budget_bytes[i]
    if problem.tied and stages > 1 and problem.tied_step_s is not None:
        g[:, 0] += problem.tied_step_s[plans[:, 0]]
        g[:, -1] += problem.tied_step_s[plans[:, 0]]
    if problem.tied and stages == 1 and problem.tied_extra_bytes is not None:
        excess[:, 0] += problem.tied_extra_bytes[plans[:, 0]]
    times = slow_simulation(problem, f, b, g)
    return Plans(boundaries=boundaries, strategies=plans, times=times, excess=excess.max(axis=1))


def slow_simulation(problem: StageProblem, f: np.ndarray, b: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Run the schedule action by action for all plans."""
    stages, m = problem.num_stages, problem.num_micro_batches
    queues = [list(actions) for actions in make_schedule(problem.schedule, stages, m)]
    free = [np.zeros(len(f)) for _ in range(stages)]
    ends: dict[Any, np.ndarray] = {}
    while any(queues):
        for i, queue in enumerate(queues):
            while queue and all(need in ends for need in prerequisites(i, queue[0], stages)):
                action = queue.pop(0)
                start = free[i]
                for need in prerequisites(i, action, stages):
                    start = np.maximum(start, ends[need])
                free[i] = ends[i, action] = start + (f if action.phase == "forward" else b)[:, i]
    return np.max([free[i] + g[:, i] for i in range(stages)], axis=0)


def a_random_problem(seed: int) -> StageProblem:
    """Return one of the three kinds."""
    return (random_problem, random_freeing, random_growing)[seed % 3](seed)


def random_growing(seed: int) -> StageProblem:
    """Return a random problem whose layers free something and leave something else; mostly few of its plans fit."""
    return random_freeing(seed, makes_gradients=True)


def random_freeing(seed: int, *, makes_gradients: bool = False) -> StageProblem:
    """Return a random problem whose layers free something, the last ones too little; mostly few of its plans fit."""
    problem, rng = random_problem(seed), np.random.default_rng([seed, 1])
    high = max(4.0, float(problem.states_bytes.max()))
    kinds = np.unique(problem.states_bytes, axis=0, return_inverse=True)[1].reshape(-1)

    def rows(most: float) -> np.ndarray:
        return np.floor(rng.uniform(0, most, (kinds.max() + 1, problem.forward_s.shape[1])))[kinds]

    freed = problem.act_bytes if rng.random() < 0.3 else rows(high * float(rng.choice([0.3, 1.0, 2.0])))
    if makes_gradients:
        freed = freed - rows(high * float(rng.choice([0.5, 1.0, 3.0])))
    problem = replace(problem, transient_bytes=rows(high * float(rng.choice([1.0, 3.0]))), freed_bytes=freed)
    excess = np.concatenate([part.excess[np.isfinite(part.excess)] for part in every_plan(problem)])
    if rng.random() < 0.3 or not len(excess):
        return problem
    more = np.quantile(excess, float(rng.choice([0.01, 0.1, 0.4])))
    return replace(problem, budget_bytes=problem.budget_bytes + np.floor(more))


def random_problem(seed: int) -> StageProblem:
    """Embedding, up to 4 blocks, head; 2-4 strategies in 1-3 layouts; ties in about 40 %; budgets loose to none."""
    rng = np.random.default_rng(seed)
    strategies = int(rng.integers(2, 5))
    blocks = int(rng.integers(1, 5 if strategies < 4 else 4))
    num_layers = blocks + 2
    stages = min(int(rng.choice([1, 2, 2, 3, 3, 3, 4])), num_layers)
    m = int(rng.integers(1, 9))
    high = int(rng.choice([4, 4, 60, 1000, 1000]))
    schedule = "1f1b" if rng.random() < 0.6 else "gpipe"

    def rows(scale: float = 1.0, base: float = 0.0) -> np.ndarray:
        kinds = rng.integers(0, high, (3, strategies)) * scale + base * high
        if rng.random() < 0.2:  # blocks of two kinds
            other = rng.integers(0, high, strategies) * scale + base * high
            middle = [kinds[1] if rng.random() < 0.5 else other for _ in range(blocks)]
        else:
            middle = [kinds[1]] * blocks
        return np.round(np.stack([kinds[0], *middle, kinds[2]]))

    layout = rng.integers(0, int(rng.integers(1, 4)), strategies)
    distance = np.abs(rng.integers(0, high // 2 + 1, 3)[:, None] - rng.integers(0, high // 2 + 1, 3)[None, :])
    wild = rng.integers(0, high // 2 + 1, (num_layers, 3, 3))

    def switch() -> np.ndarray:
        kind = rng.integers(0, 4)
        if kind == 0:
            return np.zeros((strategies, strategies))
        table = np.where(np.eye(3, dtype=bool), 0, distance) if kind == 1 else wild[0] if kind == 2 else wild
        return table[..., layout[:, None], layout[None, :]].astype(float) * float(rng.integers(1, 3))

    def border() -> np.ndarray:
        table = rng.integers(0, high // 2 + 1, (num_layers, 3)) * int(rng.integers(0, 2))
        if rng.random() < 0.5:  # embedding, blocks and head each hand on something else
            table = table[[0, *[1] * blocks, 2]]
        return table[:, layout].astype(float) if rng.random() < 0.3 else table[0, layout].astype(float)

    forward = rows(base=float(rng.choice([0.0, 2.0])))
    forward[rng.random(forward.shape) < 0.06] = np.inf
    tied = bool(rng.random() < 0.4)
    step = rows(float(rng.choice([0.0, 0.5, 3.0])))
    states, act = rows(), rows(float(rng.choice([0.0, 0.3, 1.0])))
    transient = rows(float(rng.choice([0.0, 1.0, 2.0])))
    in_flight = np.array([m if schedule == "gpipe" else min(m, stages - i) for i in range(stages)])
    typical = (np.median(states + in_flight[0] * act) * num_layers / stages + np.median(transient)) * 1.2
    budget = np.round(np.full(stages, typical * float(rng.choice([0.4, 0.7, 0.9, 1.1, 1.4, 9.0]))))
    if rng.random() < 0.3:
        budget = np.round(budget * rng.uniform(0.7, 1.3, stages))
    return StageProblem(
        forward_s=forward,
        backward_s=rows(2.0, 1.0),
        step_s=step,
        states_bytes=states,
        act_bytes=act,
        transient_bytes=transient,
        switch_forward_s=switch(),
        switch_backward_s=switch(),
        border_forward_s=border(),
        border_backward_s=border(),
        layout=layout,
        in_flight=in_flight,
        budget_bytes=budget,
        stage_step_s=np.round(rng.integers(0, high, stages) * float(rng.integers(0, 2))).astype(float),
        enter_forward_s=switch() if rng.random() < 0.3 else None,
        num_micro_batches=m,
        schedule=schedule,
        tied=tied,
        tied_step_s=rng.integers(0, 2 * high, strategies).astype(float) if tied else None,
        tied_extra_bytes=rng.integers(-high, high, strategies).astype(float) if tied else None,
    )
