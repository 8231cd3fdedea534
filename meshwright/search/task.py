"""One setting of the sweep: stages, micro-batches and batch size; its bounds, its costs when asked for, its answers.

With T the sum over layers of the forward + backward seconds, no 1F1B or GPipe pipeline of P stages and m
micro-batches takes less than

    T / (1 - (1 - 1/m)^P),

since some stage i has sum_{j<i} C_j + m C_i at least that large (the split in which all are equal). The
first bound takes the least T of compute alone. The second, of tabulated costs, counts communication and
memory: the stages together hold at least every layer's states and one micro-batch's activations, so

    T >= max over lam >= 0 of  sum over layers of min over strategies (F + B + lam memory) - lam (sum of budgets).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.cost.compute import layer_compute
from meshwright.cost.predict import report_sync_s
from meshwright.search.answer import Request
from meshwright.search.balance import Balance, memory_balanced, solve_balanced, time_balanced
from meshwright.search.labels import Floats
from meshwright.search.problem import StageChoice, StageProblem
from meshwright.search.space import divisors, even_boundaries, stage_counts, strategies
from meshwright.search.stages import Unfinished, solve_below
from meshwright.search.table import Setting, build_problem
from meshwright.search.uniform import best_uniform
from meshwright.spec.legality import why_illegal
from meshwright.spec.strategy import Strategy

_MULTIPLIERS = 2.0 ** np.arange(-8, 9)
_ROUNDING = 1e-12

Partitions = tuple[tuple[int, ...], ...]


@dataclass(kw_only=True, eq=False)
class Task:
    """A setting. `problem` is None until `build`; then `bound_s` is sharper."""

    request: Request
    setting: Setting
    candidates: tuple[Strategy, ...]
    bound_s: float
    problem: StageProblem | None = field(default=None)
    unfinished: Unfinished = field(default_factory=Unfinished)

    @property
    def batch(self) -> int:
        return self.setting.num_micro_batches * self.setting.micro_batch_samples

    @property
    def order(self) -> tuple[float, int, int, int]:
        """The promising ones first: by the bound a sample, then fewer of everything."""
        return self.bound_s / self.batch, self.batch, self.setting.num_stages, self.setting.num_micro_batches

    def describe(self) -> str:
        return f"{self.setting.num_stages} stages, {self.setting.num_micro_batches} micro-batches, batch {self.batch}"

    def build(self) -> StageProblem:
        """Tabulate the costs, once."""
        if self.problem is None:
            self.problem = self._tabulated()
            self.bound_s = max(self.bound_s, _bound_with_communication_s(self.problem))
        return self.problem

    def _tabulated(self) -> StageProblem:
        """Return the tables; those of another budget are the same but for the budget."""
        tables = self.request.tables
        if tables is None:
            return build_problem(self.setting, self.candidates)
        key = replace(self.setting, budget_bytes=0), self.candidates
        if key not in tables:
            tables[key] = build_problem(self.setting, self.candidates)
        known = tables[key]
        return replace(known, budget_bytes=np.full(known.num_stages, float(self.setting.budget_bytes)))

    def partitions(self) -> Partitions | None:
        """Return the boundaries that the space allows: None for any."""
        match self.request.space.partition:
            case "even":
                bounds = _even(self.setting)
            case "memory":
                bounds = memory_balanced(self.build())
            case "time":
                bounds = time_balanced(self.build())
            case _:
                return None
        return () if bounds is None else (bounds,)

    def solve(self, beat_per_sample_s: float | None, time_limit_s: float) -> tuple[Solved | None, float]:
        """Return the best plan if it beats so many seconds a sample, and a bound on all plans."""
        problem = self.build()
        if self.request.space.partition == "bmw" and self.setting.num_stages > 1:
            beat_s = None if beat_per_sample_s is None else beat_per_sample_s * self.batch
            found = solve_balanced(problem, beat_s=beat_s, time_limit_s=time_limit_s)
            if found.choice is None:
                return None, math.inf
            return Solved(task=self, choice=found.choice, balances=found.balances), self.bound_s
        partitions = self.partitions()
        if partitions == ():
            return None, math.inf
        beat_s = None if beat_per_sample_s is None else beat_per_sample_s * self.batch
        choice, bound_s = solve_below(
            problem, beat_s=beat_s, time_limit_s=time_limit_s, partitions=partitions, unfinished=self.unfinished
        )
        return None if choice is None else Solved(task=self, choice=choice), bound_s

    def best_uniform(self) -> Solved | None:
        """Return the best plan with one strategy for all blocks and even stages; the ends do not recompute."""
        bounds = _even(self.setting)
        choice = None if bounds is None else best_uniform(self.build(), self.candidates, bounds)
        return None if choice is None else Solved(task=self, choice=choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A plan of a task."""

    task: Task
    choice: StageChoice
    balances: tuple[Balance, ...] = ()

    @property
    def per_sample_s(self) -> float:
        return self.choice.objective_s / self.task.batch

    @property
    def score(self) -> tuple[float, int, int, int]:
        setting = self.task.setting
        return self.per_sample_s, self.task.batch, setting.num_stages, setting.num_micro_batches


def make_tasks(request: Request, batches: tuple[int, ...]) -> Iterator[Task]:
    """Yield every setting in which each layer has a strategy, with the bound of compute alone."""
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
                    wanted=request.wanted,
                )
                candidates = tuple(s for s in everything if setting.micro_batch_samples % s.dp == 0)
                bound_s = _bound_of_compute_s(setting, candidates)
                if math.isfinite(bound_s):
                    yield Task(request=request, setting=setting, candidates=candidates, bound_s=bound_s)


def _bound_of_compute_s(setting: Setting, candidates: tuple[Strategy, ...]) -> float:
    """Return the bound at the top with compute alone; inf: some layer cannot run."""
    # Only the degrees count, and of equal ones the first stands for all.
    distinct = {(s.tp, s.dp): s for s in reversed(candidates)}
    least_s = 0.0
    for group in setting.model.groups:
        seconds = math.inf
        for (tp, dp), strategy in distinct.items():
            if why_illegal(group.layer, strategy, setting.micro_batch_samples) is None:
                samples = setting.micro_batch_samples // dp
                found = layer_compute(group.layer, tp, samples, setting.job, setting.cluster.device)
                seconds = min(seconds, found.forward_s + found.backward_s)
        least_s += group.num_layers * seconds
    return _bound_s(setting.num_stages, setting.num_micro_batches, least_s) + report_sync_s(
        setting.cluster.num_devices, setting.cluster
    )


def _bound_with_communication_s(problem: StageProblem) -> float:
    """Return the bound at the top, plus the seconds that every stage spends once a step; inf: a layer cannot run."""
    once_s, micro_batches = float(problem.stage_step_s.min()), problem.num_micro_batches
    held = problem.in_flight.min()
    memory = problem.states_bytes + held * problem.act_bytes
    seconds = problem.forward_s + problem.backward_s
    if problem.num_stages == 1:
        return _least_sum(micro_batches * seconds + problem.step_s, memory, problem) + once_s
    return _bound_s(problem.num_stages, micro_batches, _least_sum(seconds, memory, problem)) + once_s


def _least_sum(seconds: Floats, memory: Floats, problem: StageProblem) -> float:
    """Return the bound of T at the top; inf: a layer cannot run."""
    rows, counts = np.unique(np.stack([seconds, memory], axis=1), axis=0, return_counts=True)
    seconds, memory = rows[:, 0], rows[:, 1]
    least_s = float(counts @ seconds.min(axis=1))
    extra = problem.tied_extra_bytes
    room = float(problem.budget_bytes.sum()) - (0.0 if extra is None else float(extra.min()))
    fastest = np.where(seconds == seconds.min(axis=1, keepdims=True), memory, np.inf).min(axis=1)
    over = float(counts @ fastest) - room
    if not math.isfinite(least_s) or over <= 0:
        return least_s
    best_s, scale = least_s, least_s / room
    for factor in _MULTIPLIERS:
        weighted = (seconds + factor * scale * np.where(np.isfinite(memory), memory, 0.0)).min(axis=1)
        best_s = max(best_s, float(counts @ weighted) - factor * scale * room)
    return best_s * (1 - _ROUNDING)


def _bound_s(num_stages: int, num_micro_batches: int, least_s: float) -> float:
    if num_stages == 1:
        return num_micro_batches * least_s
    return least_s / (1.0 - (1.0 - 1.0 / num_micro_batches) ** num_stages)


def _even(setting: Setting) -> tuple[int, ...] | None:
    model = setting.model
    return even_boundaries(len(model.layers), setting.num_stages, model.merges)
