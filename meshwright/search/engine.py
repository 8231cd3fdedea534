"""The sweep: every batch size, number of stages and number of micro-batches, each solved, cheapest bound first.

For one batch size the objective is the step time, over several it is seconds per sample. Settings
whose lower bound cannot beat the best plan in hand are dropped unsolved. The bound with which a
setting is ordered ignores memory: with T the sum over layers of the least forward + backward
seconds, no 1F1B or GPipe pipeline of P stages and m micro-batches takes less than

    T / (1 - (1 - 1/m)^P),

since some stage i has sum_{j<i} C_j + m C_i at least that large (the split in which all are equal).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.files import sha256
from meshwright.search.problem import StageChoice, StageProblem, price, stage_bytes
from meshwright.search.shortfall import Shortfall, shortfall
from meshwright.search.space import (
    Space,
    divisors,
    even_boundaries,
    stage_counts,
    strategies,
)
from meshwright.search.stages import solve_below
from meshwright.search.table import Setting, build_problem
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import BatchRange, Budget, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan, Proof, StagePlan
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy
from meshwright.units import show_bytes

Progress = Callable[[str], None]

DEFAULT_TIME_LIMIT_S = 20.0
_NUM_RUNNERS_UP = 5
_LARGEST_AUTO_BATCH = 1 << 16
_LEAST_TIME_S = 0.05
_ROUNDING = 1e-9  # sums of the same seconds in another order
_AUTO_GAIN = 0.01  # "auto" stops when doubling the batch gains less throughput than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a search is asked."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    budget: Budget
    space: Space
    schedule: ScheduleName = "1f1b"
    num_stages: int | None = None
    num_micro_batches: int | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of one setting: its best step time, or why it has none."""

    global_batch_size: int
    num_stages: int
    num_micro_batches: int
    bound_s: float
    step_s: float | None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan, the best plans of other settings in order, and what became of every setting."""

    plan: Plan
    runners_up: tuple[Plan, ...]
    tried: tuple[Tried, ...]
    search_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan fits: the plan that comes nearest, and by how many bytes each of its stages exceeds the budget."""

    reason: str
    nearest: Plan | None
    shortfall_bytes: tuple[int, ...]
    tried: tuple[Tried, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    setting: Setting
    candidates: tuple[Strategy, ...]
    problem: StageProblem
    bound_s: float

    @property
    def batch(self) -> int:
        return self.setting.num_micro_batches * self.setting.micro_batch_samples

    def describe(self) -> str:
        return f"{self.setting.num_stages} stages, {self.setting.num_micro_batches} micro-batches, batch {self.batch}"

    @property
    def order(self) -> tuple[float, int, int, int]:
        return self.bound_s / self.batch, self.batch, self.setting.num_stages, self.setting.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    task: _Task
    choice: StageChoice

    @property
    def per_sample_s(self) -> float:
        return self.choice.objective_s / self.task.batch

    @property
    def score(self) -> tuple[float, int, int, int]:
        setting = self.task.setting
        return self.per_sample_s, self.task.batch, setting.num_stages, setting.num_micro_batches


def search(request: Request, progress: Progress | None = None) -> Found | Infeasible:
    """Return the best plan of `request.space`, or why there is none."""
    started = time.perf_counter()
    _check(request)
    if request.job.global_batch_size == "auto":
        outcome = _search_auto(request, progress)
    else:
        outcome = _sweep(request, _batch_sizes(request.job.global_batch_size), progress)
    if isinstance(outcome, Infeasible):
        return outcome
    return Found(
        plan=outcome.plan,
        runners_up=outcome.runners_up,
        tried=outcome.tried,
        search_s=time.perf_counter() - started,
    )


def _check(request: Request) -> None:
    limit = request.model.max_seq_len
    if limit and request.job.seq_len > limit:
        raise UserError(
            f"seq-len: {request.job.seq_len} is above what {request.model.name} has positions for ({limit})"
        )
    _check_stages(request)
    batch, micro_batches = request.job.global_batch_size, request.num_micro_batches
    if micro_batches is not None and micro_batches < 1:
        raise UserError(f"micro-batches: must be at least 1, not {micro_batches}")
    if micro_batches is not None and batch != "auto" and all(size % micro_batches for size in _batch_sizes(batch)):
        raise UserError(f"micro-batches: {micro_batches} does not divide the global batch ({_in_words(batch)})")


def _check_stages(request: Request) -> None:
    wanted, devices, num_layers = request.num_stages, request.cluster.num_devices, len(request.model.layers)
    if wanted is None:
        return
    if wanted < 1 or devices % wanted:
        raise UserError(
            f"stages: {wanted} does not divide {devices} devices; use one of {', '.join(map(str, divisors(devices)))}"
        )
    counts = stage_counts(request.space, devices, num_layers)
    if wanted not in counts:
        raise UserError(
            f"stages: space {request.space.name} has no plan of {wanted} stages for {num_layers} layers on {devices} "
            f"devices; it tries {', '.join(map(str, counts)) or 'none'}"
        )


def _in_words(batch: int | BatchRange) -> str:
    return str(batch) if isinstance(batch, int) else f"{batch.smallest}..{batch.largest}"


def _batch_sizes(wanted: int | BatchRange) -> tuple[int, ...]:
    """Return the batch sizes to try: for a range its ends, powers of two and three halves of them."""
    if isinstance(wanted, int):
        return (wanted,)
    sizes = {wanted.smallest, wanted.largest}
    power = 1
    while power <= wanted.largest:
        sizes.update(size for size in (power, power + power // 2) if wanted.smallest <= size <= wanted.largest)
        power *= 2
    return tuple(sorted(sizes))


def _search_auto(request: Request, progress: Progress | None) -> Found | Infeasible:
    """Double the batch until nothing fits or throughput stops growing; return the best of all sizes.

    It starts at the odd part of the number of devices (and what the micro-batches need), so that dp of every
    degree comes to divide it, and goes on until dp may be as large as there are devices.
    """
    best: Found | None = None
    nearest: Infeasible | None = None
    tried: list[Tried] = []
    devices = request.cluster.num_devices
    batch = math.lcm(devices // (devices & -devices), request.num_micro_batches or 1)
    deadline = time.perf_counter() + request.time_limit_s
    while batch <= _LARGEST_AUTO_BATCH:
        left_s = max(_LEAST_TIME_S, deadline - time.perf_counter())
        outcome = _sweep(replace(request, time_limit_s=left_s), (batch,), progress)
        tried += outcome.tried
        gained = False
        if isinstance(outcome, Infeasible):
            nearest = min((one for one in (outcome, nearest) if one is not None), key=_over_bytes)
        elif best is None or _samples_per_s(outcome.plan) > _samples_per_s(best.plan) * (1 + _AUTO_GAIN):
            best, gained = outcome, True
        if best is not None and time.perf_counter() > deadline:
            break
        could_fit = best is None and _over_bytes(nearest) == math.inf  # no strategy at all so far
        if batch >= devices and not gained and not could_fit:
            break
        batch *= 2
    if best is not None:
        return Found(plan=best.plan, runners_up=best.runners_up, tried=tuple(tried), search_s=0.0)
    if nearest is None:
        raise UserError(f"micro-batches: {request.num_micro_batches} need a batch above {_LARGEST_AUTO_BATCH}")
    return nearest


def _over_bytes(outcome: Infeasible | None) -> float:
    """Return by how much the nearest plan is over the budget; inf when there is none."""
    return math.inf if outcome is None or outcome.nearest is None else max(outcome.shortfall_bytes)


def _samples_per_s(plan: Plan) -> float:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    return plan.predicted.samples_per_s


def _sweep(request: Request, batches: tuple[int, ...], progress: Progress | None) -> Found | Infeasible:
    deadline = time.perf_counter() + request.time_limit_s
    tasks = sorted(_tasks(request, batches), key=lambda task: task.order)
    if not tasks:
        return Infeasible(reason=_why_no_task(request, batches), nearest=None, shortfall_bytes=(), tried=())
    # The best uniform plan is the first to beat; so no uniform plan is ever better than the answer.
    plans = _uniform_plans(request, tasks)
    best = min(plans, key=lambda plan: plan.score, default=None)
    lower_per_sample = math.inf
    tried: list[Tried] = []
    for number, task in enumerate(tasks):
        beat_s = math.inf if best is None else best.per_sample_s * task.batch
        if task.bound_s >= beat_s or request.space.uniform:
            tried.append(_tried(task, plans, "cannot beat the best plan"))
            continue
        if best is not None and time.perf_counter() > deadline:
            lower_per_sample = min(lower_per_sample, task.bound_s / task.batch)
            tried.append(_tried(task, plans, "not solved: out of time"))
            continue
        if progress is not None:
            progress(f"{number + 1}/{len(tasks)}: {task.describe()}")
        choice, bound_s = _solve_task(request, task, best, max(_LEAST_TIME_S, deadline - time.perf_counter()))
        # Stopped by the time limit, the solver may know less than the quick bound.
        lower_per_sample = min(lower_per_sample, max(bound_s, task.bound_s) / task.batch)
        if choice is not None:
            plans.append(_Solved(task=task, choice=choice))
            best = min((plan for plan in (best, plans[-1]) if plan is not None), key=lambda plan: plan.score)
        tried.append(_tried(task, plans, _outcome(choice, bound_s)))
    if best is None:
        return _infeasible(request, tasks, tuple(tried))
    lower_s = min(best.choice.objective_s, lower_per_sample * best.task.batch)
    return Found(
        plan=_plan(request, best, lower_s),
        runners_up=tuple(_plan(request, other, None) for other in _runners_up(request, plans, best)),
        tried=tuple(tried),
        search_s=0.0,
    )


def _uniform_plans(request: Request, tasks: list[_Task]) -> list[_Solved]:
    """Return the best uniform plan of each task, without tasks that can neither win nor be a runner-up."""
    plans: list[_Solved] = []
    least_s = math.inf
    for task in tasks:
        if len(plans) > _NUM_RUNNERS_UP and task.bound_s / task.batch >= least_s:
            continue
        choice = _best_uniform(request, task)
        if choice is not None:
            plans.append(_Solved(task=task, choice=choice))
            least_s = min(least_s, plans[-1].per_sample_s)
    return plans


def _outcome(choice: StageChoice | None, bound_s: float) -> str:
    if choice is not None:
        return "solved"
    return "does not fit in memory" if math.isinf(bound_s) else "has no plan that beats the best"


def _runners_up(request: Request, plans: list[_Solved], best: _Solved) -> list[_Solved]:
    """Return a good plan for each of the most promising other settings, best first."""
    others: dict[_Task, _Solved] = {}
    for plan in sorted(plans, key=lambda plan: plan.score):
        if plan.task is not best.task:
            others.setdefault(plan.task, plan)
    found = list(others.values())[:_NUM_RUNNERS_UP]
    if not request.space.uniform:
        # A moment's search each: they are shown for comparison and not claimed to be the best of their kind.
        better = [_solve_task(request, plan.task, None, 0.0)[0] for plan in found]
        found = [
            _Solved(task=plan.task, choice=choice) if choice and choice.objective_s < plan.choice.objective_s else plan
            for plan, choice in zip(found, better, strict=True)
        ]
    return sorted(found, key=lambda plan: plan.score)


def _tried(task: _Task, plans: list[_Solved], outcome: str) -> Tried:
    times = [plan.choice.objective_s for plan in plans if plan.task is task]
    return Tried(
        global_batch_size=task.batch,
        num_stages=task.setting.num_stages,
        num_micro_batches=task.setting.num_micro_batches,
        bound_s=task.bound_s,
        step_s=min(times, default=None),
        outcome=outcome,
    )


def _tasks(request: Request, batches: tuple[int, ...]) -> Iterator[_Task]:
    devices, num_layers = request.cluster.num_devices, len(request.model.layers)
    counts = stage_counts(request.space, devices, num_layers)
    if request.num_stages is not None:
        counts = (request.num_stages,) if request.num_stages in counts else ()
    for num_stages in counts:
        everything = strategies(request.space, devices // num_stages)
        for batch in batches:
            for micro_batches in divisors(batch):
                if request.num_micro_batches not in (None, micro_batches):
                    continue
                setting = Setting(
                    model=request.model,
                    cluster=request.cluster,
                    job=request.job,
                    budget_bytes=request.budget.usable_bytes,
                    num_stages=num_stages,
                    num_micro_batches=micro_batches,
                    micro_batch_samples=batch // micro_batches,
                    schedule=request.schedule,
                )
                candidates = tuple(s for s in everything if setting.micro_batch_samples % s.dp == 0)
                if candidates:
                    problem = build_problem(setting, candidates)
                    bound_s = _quick_bound_s(problem)
                    if np.isfinite(bound_s):
                        yield _Task(setting=setting, candidates=candidates, problem=problem, bound_s=bound_s)


def _quick_bound_s(problem: StageProblem) -> float:
    """Return the bound at the top, plus the seconds that every stage spends once a step; inf: a layer cannot run."""
    least = float((problem.forward_s + problem.backward_s).min(axis=1).sum())
    stages, micro_batches = problem.num_stages, problem.num_micro_batches
    once_s = float(problem.stage_step_s.min())
    if stages == 1:
        return micro_batches * least + once_s + float(problem.step_s.min(axis=1).sum())
    return least / (1.0 - (1.0 - 1.0 / micro_batches) ** stages) + once_s


def _solve_task(
    request: Request, task: _Task, best: _Solved | None, time_limit_s: float
) -> tuple[StageChoice | None, float]:
    """Return the task's best plan if it is faster than `best`, and a bound on all its plans."""
    partitions = _partitions(request, task)
    if partitions == ():
        return None, math.inf
    beat_s = None if best is None else best.per_sample_s * task.batch
    return solve_below(task.problem, beat_s=beat_s, time_limit_s=time_limit_s, partitions=partitions)


def _partitions(request: Request, task: _Task) -> tuple[tuple[int, ...], ...] | None:
    """Return the boundaries that the space allows: None for any."""
    if not request.space.even_stages:
        return None
    even = even_boundaries(len(request.model.layers), task.setting.num_stages)
    return () if even is None else (even,)


def _best_uniform(request: Request, task: _Task) -> StageChoice | None:
    """Return the best plan with one strategy for all blocks and even stages; the ends do not recompute."""
    bounds = even_boundaries(len(request.model.layers), task.setting.num_stages)
    if bounds is None:
        return None
    best: StageChoice | None = None
    for column, strategy in enumerate(task.candidates):
        plain = task.candidates.index(strategy.model_copy(update={"recompute": "none"}))
        chosen = (plain, *[column] * request.model.num_blocks, plain)
        if not np.isfinite(task.problem.forward_s[np.arange(len(chosen)), list(chosen)]).all():
            continue
        if max(stage_bytes(task.problem, bounds, chosen)) > request.budget.usable_bytes:
            continue
        choice = price(task.problem, bounds, chosen)
        if best is None or choice.objective_s < best.objective_s:
            best = choice
    return best


def _plan(request: Request, solved: _Solved, lower_bound_s: float | None) -> Plan:
    choice, setting = solved.choice, solved.task.setting
    chosen = [solved.task.candidates[column] for column in choice.strategies]
    bounds = choice.boundaries
    plan = Plan(
        model=request.model,
        cluster=request.cluster,
        job=request.job.model_copy(update={"global_batch_size": solved.task.batch}),
        budget=request.budget,
        num_devices=request.cluster.num_devices,
        global_batch_size=solved.task.batch,
        num_micro_batches=setting.num_micro_batches,
        schedule=setting.schedule,
        stages=tuple(StagePlan.of(chosen[low:high]) for low, high in pairwise(bounds)),
        inputs_sha256=sha256(request.model, request.cluster, request.job, request.budget),
    )
    predicted = predict(plan)
    proof = None
    if lower_bound_s is not None:
        gap = 1.0 - lower_bound_s / predicted.step_s
        if gap < _ROUNDING:
            gap, lower_bound_s = 0.0, predicted.step_s
        proof = Proof(space=request.space.name, lower_bound_s=lower_bound_s, gap=gap)
    return plan.model_copy(update={"predicted": predicted, "proof": proof})


def _infeasible(request: Request, tasks: list[_Task], tried: tuple[Tried, ...]) -> Infeasible:
    """Return the plan whose most overfull stage is least over the budget, of all settings."""
    nearest: tuple[float, _Task, Shortfall] | None = None
    for task in tasks:
        partitions = _partitions(request, task)
        short = None if partitions == () else shortfall(task.problem, partitions=partitions)
        if short is not None and (nearest is None or max(short.over_bytes) < nearest[0]):
            nearest = (max(short.over_bytes), task, short)
    budget_bytes = request.budget.usable_bytes
    if nearest is None:
        return Infeasible(reason=_why_no_task(request, ()), nearest=None, shortfall_bytes=(), tried=tried)
    _, task, short = nearest
    plan = _plan(request, _Solved(task=task, choice=price(task.problem, short.boundaries, short.strategies)), None)
    over = tuple(max(0, math.ceil(over)) for over in short.over_bytes)
    worst = short.worst_stage
    return Infeasible(
        reason=(
            f"the smallest plan needs up to {show_bytes(short.stage_bytes[worst])} on each device of stage {worst} "
            f"(the bound that the search keeps to), {show_bytes(over[worst])} more than the "
            f"{show_bytes(budget_bytes)} there are"
        ),
        nearest=plan,
        shortfall_bytes=over,
        tried=tried,
    )


def _why_no_task(request: Request, batches: tuple[int, ...]) -> str:
    devices = request.cluster.num_devices
    sizes = ", ".join(map(str, batches))
    return (
        f"no strategy of space {request.space.name} can run {request.model.name} on {devices} devices with a global "
        f"batch of {sizes}: every layer's dp must divide the micro-batch, and tp its heads, ffn and padded vocabulary"
    )
