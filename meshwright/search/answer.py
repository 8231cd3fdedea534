"""What a search is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.search.balance import Balance
from meshwright.search.problem import StageProblem
from meshwright.search.space import Space
from meshwright.search.wanted import Wanted
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import Budget, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import ScheduleName

DEFAULT_TIME_LIMIT_S = 20.0
Stopped = Literal["", "time limit", "interrupt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a search is asked.

    `tables`: what searches that differ in memory, time limit or the like tabulate once (None: each for itself).
    """

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    budget: Budget
    space: Space
    schedule: ScheduleName = "1f1b"
    num_stages: int | None = None
    num_micro_batches: int | None = None
    wanted: Wanted | None = None
    num_runners_up: int = 5
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    tables: dict[object, StageProblem] | None = field(default=None, compare=False, repr=False)


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
    """The best plan, the best plans of other settings in order, and what became of every setting.

    `stopped`: why it ended before every setting was decided (the gap of the proof says what that may cost).
    After the paper's loop: the exact answer over the same strategies, and how balanced the loop's partitions were.
    """

    plan: Plan
    runners_up: tuple[Plan, ...]
    tried: tuple[Tried, ...]
    search_s: float
    stopped: Stopped = ""
    exact: Plan | None = None
    balances: tuple[Balance, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan fits: the plan that comes nearest, and by how many bytes each of its stages exceeds the budget.

    `stopped`: the time was over before every setting was looked at; then a plan may fit all the same.
    """

    reason: str
    nearest: Plan | None
    shortfall_bytes: tuple[int, ...]
    tried: tuple[Tried, ...]
    stopped: Stopped = ""
