"""Run plans briefly on the ranks of this job, taking turns: how long their steps take, what memory they need.

Each turn builds a plan's engine, takes a few steps on random tokens and lets it go, so that one plan
at a time is in memory. The order changes from round to round, so that a slow minute hits all plans.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.measure.timing import largest, synchronize
from meshwright.models import build_model
from meshwright.runtime.memory import PeakMemory
from meshwright.runtime.optimizer import make_optimizer
from meshwright.runtime.parallelize import Batch, parallelize
from meshwright.runtime.warm_up import warm_up
from meshwright.runtime.watchdog import Progress
from meshwright.spec.plan import Plan
from meshwright.spec.trial import Trial, Trials

_WARM_UP_STEPS = 2


def run_trials(
    trials: Trials,
    device: torch.device,
    *,
    rounds: int,
    steps: int,
    progress: Progress,
    show: Callable[[str], object],
    keep: Callable[[Trials], object],
) -> Trials:
    """Give each plan without a failure turns of `steps` timed steps until it has had `rounds`. Collective.

    `keep` is called before every turn, with the plan that is `running`, and after it: should the job
    break, it is known which plan broke it.
    """
    warm_up(device)
    for turn in range(rounds):
        order = [i for i, one in enumerate(trials.trials) if one.failure is None and len(one.step_s) <= turn]
        random.Random(turn).shuffle(order)
        for number, index in enumerate(order):
            show(f"round {turn + 1} of {rounds}: plan {number + 1} of {len(order)}")
            keep(trials.model_copy(update={"running": index}))
            trials = trials.with_trial(index, _take_turn(trials.trials[index], device, steps, progress))
            keep(trials)
    return trials


def _take_turn(trial: Trial, device: torch.device, steps: int, progress: Progress) -> Trial:
    memory = PeakMemory(device)
    (seconds,) = largest([_steps(trial.plan, device, steps, progress)], device)
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, memory.peak_bytes)
    highest = tuple(max(pair) for pair in zip(peaks, trial.peak_bytes or peaks, strict=True))
    return trial.model_copy(update={"step_s": (*trial.step_s, seconds), "peak_bytes": highest})


def _steps(plan: Plan, device: torch.device, steps: int, progress: Progress) -> float:
    """Return the seconds of a step, over `steps` of them after a warm-up."""
    engine = parallelize(build_model(plan.model), plan, device=device)
    optimizer = make_optimizer(engine.parameters(), plan.job.optimizer)
    batch = _random_batch(plan)
    started = 0.0
    for number in range(_WARM_UP_STEPS + steps):
        if number == _WARM_UP_STEPS:
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
        progress.begin("running a plan", number + 1)
        engine.forward_backward(batch)
        engine.clip_gradients(plan.job.optimizer.clip_norm)
        optimizer.step()
        engine.zero_grad()
    synchronize(device)
    return (time.perf_counter() - started) / steps


def _random_batch(plan: Plan) -> Batch:
    """Return a batch of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (plan.global_batch_size, plan.job.seq_len + 1)
    tokens = torch.randint(0, plan.model.vocab_size, shape, generator=generator)

    def batch(first: int, count: int) -> tuple[Tensor, Tensor]:
        rows = tokens[first : first + count]
        return rows[:, :-1].clone(), rows[:, 1:].clone()

    return batch
