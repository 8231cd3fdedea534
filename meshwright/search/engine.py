"""The sweep: every batch size, number of stages and number of micro-batches, each solved, cheapest bound first.

For one batch size the objective is the step time, over several it is seconds per sample. Settings
whose lower bound cannot beat the best plan in hand are dropped unsolved. The bound with which a
setting is ordered ignores memory: with T the sum over layers of the least forward + backward
seconds, no 1F1B or GPipe pipeline of P stages and m micro-batches takes less than

    T / (1 - (1 - 1/m)^P),

since some stage i has sum_{j<i} C_j + m C_i at least that large (the split in which all are equal).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.files import sha256
from meshwright.search.problem import StageChoice, StageProblem, price, stage_bytes
from meshwright.search.space import (
    Space,
    divisors,
    even_boundaries,
    stage_counts,
    strategies,
)
from meshwright.search.stages import solve
from meshwright.search.table import Setting, build_problem
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import BatchRange, Budget, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan, Proof, StagePlan
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy

DEFAULT_TIME_LIMIT_S = 20.0
_NUM_RUNNERS_UP = 5
_LARGEST_AUTO_BATCH = 1 << 16
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    setting: Setting
    candidates: tuple[Strategy, ...]
    problem: StageProblem
    bound_s: float

    @property
    def batch(self) -> int:
        return self.setting.num_micro_batches * self.setting.micro_batch_samples

    @property
    def order(self) -> tuple[float, int, int, int]:
        return self.bound_s / self.batch, self.batch, self.setting.num_stages, self.setting.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    task: _Task
    choice: StageChoice

    @property
    def score(self) -> tuple[float, int, int, int]:
        setting = self.task.setting
        return self.choice.objective_s / self.task.batch, self.task.batch, setting.num_stages, setting.num_micro_batches


def search(request: Request, progress: Callable[[str], None] | None = None) -> Found | Infeasible:
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
        raise UserError(f"seq-len: {request.job.seq_len} is above what {request.model.name} has positions for ({limit})")
    devices = request.cluster.num_devices
    if request.num_stages is not None and devices % request.num_stages:
        raise UserError(
            f"stages: {request.num_stages} does not divide {devices} devices; use one of "
            f"{', '.join(map(str, divisors(devices)))}"
        )


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


def _search_auto(request: Request, progress: Callable[[str], None] | None) -> Found | Infeasible:
    """Double the batch until nothing fits or throughput stops growing; return the best of all sizes."""
    best: Found | None = None
    last: Infeasible | None = None
    tried: list[Tried] = []
    batch = 1
    while batch <= _LARGEST_AUTO_BATCH:
        outcome = _sweep(request, (batch,), progress)
        tried += outcome.tried
        if isinstance(outcome, Found):
            gained = _throughput(outcome.plan) > _throughput(best.plan) * (1 + _AUTO_GAIN) if best else True
            if not gained:
                break
            best = outcome
        elif best is not None:
            break
        else:
            last = outcome
            if last.nearest is not None:
                # A larger batch needs more memory still.
                break
        batch *= 2
    if best is None:
        assert last is not None  # noqa: S101 the loop ran
        return last
    return Found(plan=best.plan, runners_up=best.runners_up, tried=tuple(tried), search_s=0.0)


def _throughput(plan: Plan) -> float:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    return plan.predicted.samples_per_s


def _sweep(
    request: Request, batches: tuple[int, ...], progress: Callable[[str], None] | None
) -> Found | Infeasible:
    deadline = time.perf_counter() + request.time_limit_s
    tasks = sorted(_tasks(request, batches), key=lambda task: task.order)
    if not tasks:
        return Infeasible(reason=_why_no_task(request, batches), nearest=None, shortfall_bytes=(), tried=())
    solved: list[_Solved] = []
    tried: list[Tried] = []
    best_per_sample = lower_per_sample = np.inf
    for number, task in enumerate(tasks):
        if task.bound_s / task.batch >= best_per_sample:
            tried.append(_tried(task, None, "cannot beat the best plan"))
            continue
        if progress is not None:
            progress(f"{number + 1}/{len(tasks)}: {task.setting.num_stages} stages, "
                     f"{task.setting.num_micro_batches} micro-batches, batch {task.batch}")
        choice = _solve_task(request, task, max(0.05, deadline - time.perf_counter()))
        if choice is None:
            tried.append(_tried(task, None, "does not fit in memory"))
            continue
        solved.append(_Solved(task=task, choice=choice))
        tried.append(_tried(task, choice.objective_s, "solved"))
        best_per_sample = min(best_per_sample, choice.objective_s / task.batch)
        lower_per_sample = min(lower_per_sample, choice.lower_bound_s / task.batch)
    if not solved:
        return _infeasible(request, tasks, tuple(tried))
    ranked = sorted(solved, key=lambda s: s.score)
    best, *others = ranked
    lower_s = min(best.choice.objective_s, lower_per_sample * best.task.batch)
    return Found(
        plan=_plan(request, best, lower_s),
        runners_up=tuple(_plan(request, other, None) for other in others[:_NUM_RUNNERS_UP]),
        tried=tuple(tried),
        search_s=0.0,
    )


def _tried(task: _Task, step_s: float | None, outcome: str) -> Tried:
    return Tried(
        global_batch_size=task.batch,
        num_stages=task.setting.num_stages,
        num_micro_batches=task.setting.num_micro_batches,
        bound_s=task.bound_s,
        step_s=step_s,
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


def _solve_task(request: Request, task: _Task, time_limit_s: float) -> StageChoice | None:
    if request.space.uniform:
        return _best_uniform(request, task)
    partitions = None
    if request.space.even_stages:
        even = even_boundaries(len(request.model.layers), task.setting.num_stages)
        if even is None:
            return None
        partitions = (even,)
    choice = solve(task.problem, time_limit_s=time_limit_s, partitions=partitions)
    # The solver may stop at its time limit; no uniform plan is to be better than what is returned.
    uniform = _best_uniform(request, task)
    if choice is not None and uniform is not None and uniform.objective_s < choice.objective_s:
        return StageChoice(**{**_fields(uniform), "lower_bound_s": min(choice.lower_bound_s, uniform.objective_s)})
    return choice


def _fields(choice: StageChoice) -> dict[str, object]:
    return {name: getattr(choice, name) for name in StageChoice.__dataclass_fields__}


def _best_uniform(request: Request, task: _Task) -> StageChoice | None:
    """Return the best plan with one strategy for all blocks and even stages; the ends do not recompute."""
    bounds = even_boundaries(len(request.model.layers), task.setting.num_stages)
    if bounds is None:
        return None
    best: StageChoice | None = None
    for column, strategy in enumerate(task.candidates):
        plain = task.candidates.index(strategy.model_copy(update={"recompute": "none"}))
        chosen = (plain, *[column] * request.model.num_blocks, plain)
        times = task.problem.forward_s[np.arange(len(chosen)), list(chosen)]
        if not np.isfinite(times).all():
            continue
        if max(stage_bytes(task.problem, bounds, chosen)) > request.budget.usable_bytes:
            continue
        choice = price(task.problem, bounds, chosen)
        if best is None or choice.objective_s < best.objective_s:
            best = choice
    return None if best is None else StageChoice(**{**_fields(best), "lower_bound_s": best.objective_s})  # type: ignore[arg-type]


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
        stages=tuple(StagePlan.of(chosen[low:high]) for low, high in zip(bounds, bounds[1:], strict=False)),
        inputs_sha256=sha256(request.model, request.cluster, request.job, request.budget),
    )
    predicted = predict(plan)
    proof = None
    if lower_bound_s is not None:
        gap = max(0.0, 1.0 - lower_bound_s / predicted.step_s)
        proof = Proof(space=request.space.name, lower_bound_s=lower_bound_s, gap=gap)
    return plan.model_copy(update={"predicted": predicted, "proof": proof})


def _infeasible(request: Request, tasks: list[_Task], tried: tuple[Tried, ...]) -> Infeasible:
    """Return the plan that exceeds the budget by least, over all settings."""
    raise NotImplementedError


def _why_no_task(request: Request, batches: tuple[int, ...]) -> str:
    devices = request.cluster.num_devices
    sizes = ", ".join(map(str, batches))
    return (
        f"no strategy of space {request.space.name} can run {request.model.name} on {devices} devices with a global "
        f"batch of {sizes}: every layer's dp must divide the micro-batch, and tp its heads, ffn and padded vocabulary"
    )
