"""The sweep: every batch size, number of stages and number of micro-batches, each solved, cheapest bound first.

For one batch size the objective is the step time, over several it is seconds per sample. Settings
whose lower bound (task.py) cannot beat the best plan in hand are dropped unsolved, most of them before
their costs are even tabulated.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from meshwright.search.answer import Request, Stopped, Tried
from meshwright.search.stages import Unfinished, better_plan
from meshwright.search.task import Solved, Task, make_tasks

Progress = Callable[[str], None]

_IMPROVED, _TABULATED_FOR_ONE = 3, 5  # runners-up: at most so many, one for so many settings that were tabulated
_LEAST_TIME_S = 0.05
_GRACE_S = 3.0  # beyond the deadline, while there is no plan at all
_WORTH_S = 0.5  # with less left, nothing hard is tried again
_ROUNDING = 1e-12


@dataclass(kw_only=True)
class Sweep:
    """What is known so far. `lower_per_sample_s` bounds all plans of the settings that were decided."""

    request: Request
    progress: Progress | None
    deadline: float
    tasks: list[Task]
    plans: list[Solved] = field(default_factory=list[Solved])
    lower_per_sample_s: float = math.inf
    stopped: Stopped = ""
    _outcomes: dict[Task, str] = field(default_factory=dict[Task, str])
    _is_late: bool = False

    @property
    def last_moment(self) -> float:
        """Return until when a plan is looked for where there is none at the deadline."""
        return self.deadline + _GRACE_S

    @property
    def best(self) -> Solved | None:
        """Return the plan in hand."""
        return min(self.plans, key=lambda plan: plan.score, default=None)

    def run(self) -> None:
        """Decide every setting, or stop at the deadline (a little later without a plan) or at an interrupt."""
        queue = [(self._order(task), task) for task in self.tasks]  # no two have the same order
        heapq.heapify(queue)
        while queue:
            if not self._is_late and self.best is None and time.perf_counter() > self.deadline:
                self._is_late = True
                queue = [(self._order(task), task) for _, task in queue]
                heapq.heapify(queue)
            _, task = heapq.heappop(queue)
            try:
                again = self._decide(task)
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                self.stopped, again = "interrupt", True
            if again:
                heapq.heappush(queue, (self._order(task), task))

        if self.stopped != "interrupt" and self.request.num_runners_up:
            self._improve_runners_up()

    def _improve_runners_up(self) -> None:
        """Find better plans of the settings that come next, by a fixed amount of work, a small share of the search's.

        What is known of a setting that was not solved is its best plan with one strategy for all blocks.
        """
        space, best = self.request.space, self.best
        if best is None or space.uniform or space.partition != "exact":
            return
        tabulated = sum(task.problem is not None for task in self.tasks)
        others = [plan for plan in self.runners_up(best) if self._outcomes.get(plan.task) != "solved"]
        for plan in others[: min(_IMPROVED, tabulated // _TABULATED_FOR_ONE)]:
            choice = better_plan(plan.task.build(), plan.choice)
            if choice is not None:
                self.plans.append(Solved(task=plan.task, choice=choice))

    def _order(self, task: Task) -> tuple[float, ...]:
        """The promising ones first; where the time is over without a plan, those that need little memory.

        What a cap has ended comes after all others.
        """
        order = (float(task.unfinished.can_widen), *task.order)
        return (task.setting.micro_batch_samples, *order) if self._is_late else order

    def tried(self) -> tuple[Tried, ...]:
        """Return what became of each setting, the promising ones first."""
        return tuple(self._tried(task) for task in sorted(self.tasks, key=lambda task: task.order))

    def runners_up(self, best: Solved) -> list[Solved]:
        """Return a plan for each of the most promising other settings, best first.

        The nearest are good plans of their settings, the others the best with one strategy for all blocks: for
        comparison, not claimed to be the best of their settings.
        """
        others: dict[Task, Solved] = {}
        for plan in sorted([*self.plans, *self._more_uniform_plans()], key=lambda plan: plan.score):
            if plan.task is not best.task:
                others.setdefault(plan.task, plan)
        return list(others.values())[: self.request.num_runners_up]

    def _decide(self, task: Task) -> bool:
        """Build or solve a task, or drop it; return whether it has to come again."""
        best = self.best
        until = self.last_moment if best is None else self.deadline
        if not self.stopped and time.perf_counter() > until:
            self.stopped = "time limit"
        if best is not None and task.bound_s >= best.per_sample_s * task.batch:
            self._outcomes[task] = "cannot beat the best plan"
        elif self.stopped:
            self.lower_per_sample_s = min(self.lower_per_sample_s, task.bound_s / task.batch)
            self._outcomes.setdefault(task, f"not solved: {self.stopped}")
        elif task.problem is None:
            return self._build(task)
        elif self.request.space.uniform:
            self._outcomes[task] = "cannot beat the best plan" if best is not None else "does not fit in memory"
        else:
            return self._solve(task, best)
        return False

    def _build(self, task: Task) -> bool:
        """Tabulate costs; the best uniform plan is the first to beat, so no uniform plan is better than the answer."""
        self._tell("tabulated", task)
        task.build()
        if math.isinf(task.bound_s):  # some layer can use no strategy
            self.tasks.remove(task)
            return False
        self.plans += self._uniform(task)
        return True

    def _uniform(self, task: Task) -> list[Solved]:
        """Return the best uniform plan of a task, if it has one: its stages are even, which the space must allow."""
        uniform = task.best_uniform() if self.request.space.partition in ("exact", "even") else None
        return [] if uniform is None else [uniform]

    def _solve(self, task: Task, best: Solved | None) -> bool:
        """Solve a task; return whether it has to come again, since its share of the time was over.

        A task gets half of the time that is left: one that is hard must not take it all from the others.
        """
        self._tell("solved", task)
        started = time.perf_counter()
        share_s = max(_LEAST_TIME_S, (self.deadline - started) / 2)
        solved, bound_s = task.solve(None if best is None else best.per_sample_s, share_s)
        if solved is not None:
            self.plans.append(solved)
            best = solved  # it has beaten the one before
            self._outcomes[task] = "solved"
        elif self._outcomes.get(task) != "solved":  # the second time it has none that beats its own
            self._outcomes[task] = (
                "does not fit in memory" if math.isinf(bound_s) else "has no plan that beats the best"
            )
        # Stopped by the time limit, the solver may know less than the quick bound.
        task.bound_s = max(bound_s, task.bound_s) if math.isfinite(bound_s) else task.bound_s
        ended = time.perf_counter()
        is_open = best is not None and bound_s < best.per_sample_s * task.batch * (1 - _ROUNDING)
        is_ended = ended - started > share_s / 2 or task.unfinished.can_widen
        if is_open and is_ended and self.deadline - ended > _WORTH_S:
            return True
        task.unfinished = Unfinished()  # a table is large
        self.lower_per_sample_s = min(self.lower_per_sample_s, max(bound_s, task.bound_s) / task.batch)
        return False

    def _more_uniform_plans(self) -> Iterator[Solved]:
        """Yield uniform plans of settings that were dropped before they were built, where runners-up are missing."""
        missing = 0 if self.stopped else self.request.num_runners_up + 1 - len({plan.task for plan in self.plans})
        unbuilt = sorted((task for task in self.tasks if task.problem is None), key=lambda task: task.order)
        for task in unbuilt[: 2 * max(0, missing)]:
            yield from self._uniform(task)

    def _tell(self, what: str, task: Task) -> None:
        if self.progress is not None:
            decided, best = len(self._outcomes), self.best
            so_far = (
                "" if best is None else f"; best so far {best.choice.objective_s:.4g} s with batch {best.task.batch}"
            )
            self.progress(f"{decided} of {len(self.tasks)} settings decided; {what}: {task.describe()}{so_far}")

    def _tried(self, task: Task) -> Tried:
        times = [plan.choice.objective_s for plan in self.plans if plan.task is task]
        return Tried(
            global_batch_size=task.batch,
            num_stages=task.setting.num_stages,
            num_micro_batches=task.setting.num_micro_batches,
            bound_s=task.bound_s,
            step_s=min(times, default=None),
            outcome=self._outcomes.get(task, "cannot beat the best plan"),
        )


def sweep(request: Request, batches: tuple[int, ...], progress: Progress | None) -> Sweep:
    """Return the settings of these batch sizes, decided."""
    deadline = time.perf_counter() + request.time_limit_s
    found = Sweep(request=request, progress=progress, deadline=deadline, tasks=list(make_tasks(request, batches)))
    found.run()
    return found
