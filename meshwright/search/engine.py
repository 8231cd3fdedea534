"""The whole search: from a question to a plan with its proof, or to the plan that comes nearest to fitting."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.files import sha256
from meshwright.search.answer import DEFAULT_TIME_LIMIT_S, Found, Infeasible, Request, Stopped, Tried
from meshwright.search.problem import StageChoice, price
from meshwright.search.shortfall import Shortfall, shortfall
from meshwright.search.space import divisors, stage_counts
from meshwright.search.sweep import Progress, Sweep, sweep
from meshwright.search.task import Task
from meshwright.spec.job import BatchRange
from meshwright.spec.plan import Plan, Proof, StagePlan
from meshwright.units import show_bytes

__all__ = ["DEFAULT_TIME_LIMIT_S", "Found", "Infeasible", "Progress", "Request", "Tried", "refined", "search"]

_LARGEST_AUTO_BATCH = 1 << 16
_LEAST_TIME_S = 0.05
_ROUNDING = 1e-9  # sums of the same seconds in another order
_AUTO_GAIN = 0.01  # "auto" stops when doubling the batch gains less throughput than this


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
    outcome = replace(outcome, search_s=time.perf_counter() - started)
    return _beside_exact(request, outcome, progress) if request.space.partition == "bmw" else outcome


def refined(request: Request, plan: Plan) -> Plan:
    """Return the best plan with the stages, micro-batches and batch of `plan`, or `plan` where none is better."""
    job = request.job.model_copy(update={"global_batch_size": plan.global_batch_size})
    fixed = replace(request, job=job, num_stages=plan.num_stages, num_micro_batches=plan.num_micro_batches)
    outcome = search(fixed)
    if isinstance(outcome, Infeasible) or _samples_per_s(outcome.plan) <= _samples_per_s(plan):
        return plan
    return outcome.plan


def _beside_exact(request: Request, found: Found, progress: Progress | None) -> Found:
    """Return what the paper's loop found with the exact answer beside it, whose bound holds for both."""
    batch = found.plan.global_batch_size
    job = request.job.model_copy(update={"global_batch_size": batch})
    name = request.space.name.replace(" with bmw stages", "") + " with exact stages"
    space = replace(request.space, name=name, partition="exact")
    exact = search(replace(request, job=job, space=space), progress)
    if isinstance(exact, Infeasible) or exact.plan.proof is None or found.plan.predicted is None:
        return found
    plan = found.plan
    lower_s = min(exact.plan.proof.lower_bound_s, found.plan.predicted.step_s)
    return replace(found, plan=plan.model_copy(update={"proof": _proof(request, plan, lower_s)}), exact=exact.plan)


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
    stopped: Stopped = ""
    devices = request.cluster.num_devices
    batch = math.lcm(devices // (devices & -devices), request.num_micro_batches or 1)
    deadline = time.perf_counter() + request.time_limit_s
    while batch <= _LARGEST_AUTO_BATCH:
        left_s = max(_LEAST_TIME_S, deadline - time.perf_counter())
        outcome = _sweep(replace(request, time_limit_s=left_s), (batch,), progress)
        tried += outcome.tried
        gained = False
        stopped = stopped or (outcome.stopped if isinstance(outcome, Found) else "")
        if isinstance(outcome, Infeasible):
            nearest = min((one for one in (outcome, nearest) if one is not None), key=_over_bytes)
        elif best is None or _samples_per_s(outcome.plan) > _samples_per_s(best.plan) * (1 + _AUTO_GAIN):
            best, gained = outcome, True
        if best is not None and (time.perf_counter() > deadline or stopped == "interrupt"):
            break
        could_fit = best is None and _over_bytes(nearest) == math.inf  # no strategy at all so far
        if batch >= devices and not gained and not could_fit:
            break
        batch *= 2
    if best is not None:
        return replace(best, tried=tuple(tried), stopped=stopped)
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
    found = sweep(request, batches, progress)
    best = found.best
    if best is None:
        return _infeasible(request, found, batches)
    lower_s = min(best.choice.objective_s, found.lower_per_sample_s * best.task.batch)
    plan = _plan(request, best.task, best.choice)
    return Found(
        plan=plan.model_copy(update={"proof": _proof(request, plan, lower_s)}),
        runners_up=tuple(_plan(request, other.task, other.choice) for other in found.runners_up(best)),
        tried=found.tried(),
        search_s=0.0,
        stopped=found.stopped,
        balances=best.balances,
    )


def _plan(request: Request, task: Task, choice: StageChoice) -> Plan:
    setting = task.setting
    chosen = [task.candidates[column] for column in choice.strategies]
    bounds = choice.boundaries
    plan = Plan(
        model=request.model,
        cluster=request.cluster,
        job=request.job.model_copy(update={"global_batch_size": task.batch}),
        budget=request.budget,
        num_devices=request.cluster.num_devices,
        global_batch_size=task.batch,
        num_micro_batches=setting.num_micro_batches,
        schedule=setting.schedule,
        stages=tuple(StagePlan.of(chosen[low:high]) for low, high in pairwise(bounds)),
        inputs_sha256=sha256(request.model, request.cluster, request.job, request.budget),
    )
    return plan.model_copy(update={"predicted": predict(plan)})


def _proof(request: Request, plan: Plan, lower_bound_s: float) -> Proof:
    assert plan.predicted is not None  # noqa: S101 the caller has predicted it
    gap = 1.0 - lower_bound_s / plan.predicted.step_s
    if gap < _ROUNDING:
        gap, lower_bound_s = 0.0, plan.predicted.step_s
    return Proof(space=request.space.name, lower_bound_s=lower_bound_s, gap=gap)


def _infeasible(request: Request, found: Sweep, batches: tuple[int, ...]) -> Infeasible:
    """Return the plan whose most overfull stage is least over the budget, of all settings."""
    nearest: tuple[float, Task, Shortfall] | None = None
    for task in found.tasks:
        partitions = task.partitions()
        short = None if partitions == () else shortfall(task.build(), partitions=partitions)
        if short is not None and (nearest is None or max(short.over_bytes) < nearest[0]):
            nearest = (max(short.over_bytes), task, short)
    budget_bytes = request.budget.usable_bytes
    if nearest is None:
        return Infeasible(reason=_why_no_task(request, batches), nearest=None, shortfall_bytes=(), tried=found.tried())
    _, task, short = nearest
    plan = _plan(request, task, price(task.build(), short.boundaries, short.strategies))
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
        tried=found.tried(),
    )


def _why_no_task(request: Request, batches: tuple[int, ...]) -> str:
    devices = request.cluster.num_devices
    sizes = ", ".join(map(str, batches))
    return (
        f"no strategy of space {request.space.name} can run {request.model.name} on {devices} devices with a global "
        f"batch of {sizes}: every layer's dp must divide the micro-batch, and tp its heads, ffn and padded vocabulary"
    )
