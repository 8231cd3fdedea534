"""The whole search: from a question to a plan with its proof, or to the plan that comes nearest to fitting."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise
from typing import get_args

from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.files import sha256
from meshwright.search.answer import DEFAULT_TIME_LIMIT_S, Found, Infeasible, Request, Stopped, Tried
from meshwright.search.problem import StageChoice, price
from meshwright.search.shortfall import Shortfall, least_overflow, shortfall
from meshwright.search.space import divisors, stage_counts
from meshwright.search.sweep import Progress, Sweep, sweep
from meshwright.search.task import Solved, Task
from meshwright.spec.job import BatchRange
from meshwright.spec.plan import Plan, Proof, StagePlan
from meshwright.spec.sample import sample_lengths
from meshwright.spec.schedule import ScheduleName
from meshwright.units import show_bytes

__all__ = ["DEFAULT_TIME_LIMIT_S", "Found", "Infeasible", "Progress", "Request", "Tried", "refined", "search"]

_LARGEST_AUTO_BATCH = 1 << 16
_LEAST_TIME_S = 0.05
_FEW_SIZES = 32  # batch sizes of a range that are all tried
_ROUNDING = 1e-9  # sums of the same seconds in another order
_AUTO_GAIN = 0.005  # "auto" stops when so many doublings of the batch in a row gain less throughput than this
_AUTO_PATIENCE = 3
_AUTO_SHARES = 3  # of the time that is left one batch size gets one


def search(request: Request, progress: Progress | None = None) -> Found | Infeasible:
    """Return the best plan of `request.space`, or why there is none."""
    started = time.perf_counter()
    _check(request)
    if request.space.partition == "bmw":
        return _beside_exact(request, progress)
    return _search(request, progress, started)


def _search(request: Request, progress: Progress | None, started: float) -> Found | Infeasible:
    if request.job.global_batch_size == "auto":
        outcome = _search_auto(request, progress)
    else:
        outcome = _sweep(request, _batch_sizes(request.job.global_batch_size), progress)
    if isinstance(outcome, Found):
        outcome = _or_of_less(request, outcome, started)
    return outcome if isinstance(outcome, Infeasible) else replace(outcome, search_s=time.perf_counter() - started)


def _or_of_less(request: Request, found: Found, started: float) -> Found:
    """Return `found`, or where it is not proved the plan of fewer strategies if that is better.

    Without recomputation and hybrid sharding a search mostly ends with a proof, and its plans are plans of the whole
    space. So a larger space is not worse than that one, whatever a cap of labels or the time left of it.
    """
    proof, space, batch = found.plan.proof, request.space, request.job.global_batch_size
    left_s = request.time_limit_s - (time.perf_counter() - started)
    fewer = replace(space, recompute=False, data_parallel=tuple(kind for kind in space.data_parallel if kind != "hsdp"))
    is_larger = space.partition == "exact" and not space.uniform and fewer != space
    is_unsure = proof is not None and proof.gap > 0 and found.stopped != "interrupt"
    if proof is None or batch == "auto" or not (is_larger and is_unsure and left_s > 0 and request.num_runners_up):
        return found
    batches = _batch_sizes(batch)
    other = _sweep(replace(request, space=fewer, time_limit_s=left_s), batches, None)
    if isinstance(other, Infeasible) or _samples_per_s(other.plan) <= _samples_per_s(found.plan):
        return found
    plan = other.plan
    lower_s = proof.lower_bound_s / found.plan.global_batch_size * plan.global_batch_size
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    proved = _proof(request, plan, min(lower_s, plan.predicted.step_s))
    runners_up = (found.plan.model_copy(update={"proof": None}), *found.runners_up)
    return replace(found, plan=plan.model_copy(update={"proof": proved}), runners_up=runners_up)


def refined(request: Request, plan: Plan) -> Plan:
    """Return the best plan with the stages, micro-batches and batch of `plan`, or `plan` where none is better."""
    job = request.job.model_copy(update={"global_batch_size": plan.global_batch_size})
    fixed = replace(request, job=job, num_stages=plan.num_stages, num_micro_batches=plan.num_micro_batches)
    outcome = search(fixed)
    if isinstance(outcome, Infeasible) or _samples_per_s(outcome.plan) <= _samples_per_s(plan):
        return plan
    return outcome.plan


def _beside_exact(request: Request, progress: Progress | None) -> Found | Infeasible:
    """Return what the paper's loop finds with the exact answer beside it, whose bound holds for both.

    The loop may use half of the time, the exact search what is left.
    """
    started = time.perf_counter()
    found = _search(replace(request, time_limit_s=request.time_limit_s / 2), progress, started)
    if isinstance(found, Infeasible):
        return found
    batch = found.plan.global_batch_size
    job = request.job.model_copy(update={"global_batch_size": batch})
    name = request.space.name.replace(" with bmw stages", "") + " with exact stages"
    space = replace(request.space, name=name, partition="exact")
    left_s = max(_LEAST_TIME_S, request.time_limit_s - (time.perf_counter() - started))
    exact = search(replace(request, job=job, space=space, time_limit_s=left_s), progress)
    if isinstance(exact, Infeasible) or exact.plan.proof is None or found.plan.predicted is None:
        return found
    plan = found.plan
    lower_s = min(exact.plan.proof.lower_bound_s, found.plan.predicted.step_s)
    return replace(found, plan=plan.model_copy(update={"proof": _proof(request, plan, lower_s)}), exact=exact.plan)


def _check(request: Request) -> None:
    sample_lengths(request.model, request.job.seq_len, request.job.target_seq_len)
    if request.schedule not in get_args(ScheduleName):
        raise UserError(f"schedule: {request.schedule!r} is not one of {', '.join(get_args(ScheduleName))}")
    if not (math.isfinite(request.time_limit_s) and request.time_limit_s > 0):
        raise UserError(f"time-limit: {request.time_limit_s} is not a positive number of seconds")
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
    """Return the batch sizes to try: of a short range all, of a long one its ends, powers of two and 3/2 of them."""
    if isinstance(wanted, int):
        return (wanted,)
    if wanted.largest - wanted.smallest < _FEW_SIZES:
        return tuple(range(wanted.smallest, wanted.largest + 1))
    sizes = {wanted.smallest, wanted.largest}
    power = 1
    while power <= wanted.largest:
        sizes.update(size for size in (power, power + power // 2) if wanted.smallest <= size <= wanted.largest)
        power *= 2
    return tuple(sorted(sizes))


def _search_auto(request: Request, progress: Progress | None) -> Found | Infeasible:
    """Double the batch until nothing fits or throughput stops growing; return the best of all sizes.

    It starts at the least size that every device can have a sample of, so that dp of every degree comes to divide it
    (the odd part of the number of devices, and what the micro-batches need, times a power of two), and looks
    at smaller ones only where nothing of that size fits.
    """
    devices = request.cluster.num_devices
    least = math.lcm(devices // (devices & -devices), request.num_micro_batches or 1)
    first = least
    while first < min(devices, _LARGEST_AUTO_BATCH):
        first *= 2
    deadline = time.perf_counter() + request.time_limit_s
    upwards = _Doubling(request, progress, deadline)
    batch = first
    while batch <= _LARGEST_AUTO_BATCH and upwards.tries(batch):
        batch *= 2
    batch = first // 2
    while upwards.best is None and batch >= least and batch % least == 0:
        upwards.tries(batch)
        batch //= 2
    if upwards.best is not None:
        return replace(upwards.best, tried=tuple(upwards.tried), stopped=upwards.stopped)
    if upwards.nearest is None:
        raise UserError(f"micro-batches: {request.num_micro_batches} need a batch above {_LARGEST_AUTO_BATCH}")
    return upwards.nearest


class _Doubling:
    """The best plan of the batch sizes tried so far, or the plan that comes nearest to fitting."""

    def __init__(self, request: Request, progress: Progress | None, deadline: float) -> None:
        self._request, self._progress, self._deadline = request, progress, deadline
        self.best: Found | None = None
        self.nearest: Infeasible | None = None
        self.tried: list[Tried] = []
        self.stopped: Stopped = ""
        self._to_beat, self._in_vain = 0.0, 0  # samples a second at the last gain, and sizes tried since

    def tries(self, batch: int) -> bool:
        """Search one size; return whether a larger one may be better."""
        left_s = max(_LEAST_TIME_S, (self._deadline - time.perf_counter()) / _AUTO_SHARES)
        outcome = _sweep(replace(self._request, time_limit_s=left_s), (batch,), self._progress)
        self.tried += outcome.tried
        if isinstance(outcome, Infeasible):
            self.nearest = min((one for one in (outcome, self.nearest) if one is not None), key=_over_bytes)
            return self.best is None and _over_bytes(self.nearest) == math.inf  # no strategy at all so far
        self.stopped = self.stopped or outcome.stopped
        samples_per_s = _samples_per_s(outcome.plan)
        if self.best is None or samples_per_s > _samples_per_s(self.best.plan):
            self.best = outcome
        self._in_vain += 1
        if samples_per_s > self._to_beat * (1 + _AUTO_GAIN):
            self._to_beat, self._in_vain = samples_per_s, 0
        if self._in_vain >= _AUTO_PATIENCE or self.stopped == "interrupt":
            return False
        is_late = time.perf_counter() >= self._deadline
        self.stopped = "time limit" if is_late else self.stopped
        return not is_late


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
        outcome = _infeasible(request, found, batches)
        if isinstance(outcome, Infeasible):
            return outcome
        best = outcome
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
    return Proof(space=request.space.name + _fixed(request, plan), lower_bound_s=lower_bound_s, gap=gap)


def _fixed(request: Request, plan: Plan) -> str:
    """Return what the request leaves no choice of, and the batch sizes of which `plan` is the best."""
    fixed = [(request.num_stages, "stages"), (request.num_micro_batches, "micro-batches")]
    said = [f"{count} {what}" for count, what in fixed if count is not None]
    batch = request.job.global_batch_size
    if isinstance(batch, BatchRange):
        sizes = _batch_sizes(batch)
        is_whole = len(sizes) == batch.largest - batch.smallest + 1
        tried = f"{batch.smallest} to {batch.largest}" if is_whole else ", ".join(map(str, sizes))
        said.append(f"batch sizes {tried}")
    elif batch == "auto":  # each size is searched by itself
        said.append(f"batch {plan.global_batch_size}")
    return "".join(f", {what}" for what in said)


def _nearest(found: Sweep) -> tuple[Task, Shortfall] | None:
    """Return the plan whose most overfull stage is least over the budget, of all settings, the first of equal ones.

    When there was no time for all, it is of those that have been looked at.
    """
    known = [task for task in found.tasks if task.problem is not None] or found.tasks[:1]
    bounds: list[tuple[float, int]] = []
    cuts = [task.partitions() for task in known]
    for number, (task, partitions) in enumerate(zip(known, cuts, strict=True)):
        if partitions != ():
            bounds.append((least_overflow(task.build(), partitions=partitions), number))
    nearest: tuple[float, int, Shortfall] | None = None
    for bound, number in sorted(bounds):
        if nearest is not None and bound > nearest[0]:
            break
        if nearest is not None and time.perf_counter() > found.last_moment:
            found.stopped = "time limit"
            break
        short = shortfall(known[number].build(), partitions=cuts[number])
        if short is not None and (nearest is None or (max(short.over_bytes), number) < nearest[:2]):
            nearest = max(short.over_bytes), number, short
    return None if nearest is None else (known[nearest[1]], nearest[2])


def _infeasible(request: Request, found: Sweep, batches: tuple[int, ...]) -> Infeasible | Solved:
    """Return the plan that comes nearest to fitting and what it needs; or the plan, where it fits after all.

    That is where the time was over before its setting was solved.
    """
    nearest = _nearest(found)
    if nearest is None:
        return Infeasible(reason=_why_no_task(request, batches), nearest=None, shortfall_bytes=(), tried=found.tried())
    task, short = nearest
    choice = price(task.build(), short.boundaries, short.strategies)
    if found.stopped and max(short.over_bytes) <= 0 and not request.space.uniform:
        return Solved(task=task, choice=choice)
    over = tuple(max(0, math.ceil(over)) for over in short.over_bytes)
    worst = short.worst_stage
    reason = (
        f"the smallest plan needs up to {show_bytes(short.stage_bytes[worst])} on each device of stage {worst} "
        f"(the bound that the search keeps to), {show_bytes(over[worst])} more than the "
        f"{show_bytes(request.budget.usable_bytes)} there are"
    )
    if found.stopped:
        reason = f"no plan was found before the time limit, and not all settings were looked at; of those, {reason}"
    return Infeasible(
        reason=reason,
        nearest=_plan(request, task, choice),
        shortfall_bytes=over,
        tried=found.tried(),
        stopped=found.stopped,
    )


def _why_no_task(request: Request, batches: tuple[int, ...]) -> str:
    devices = request.cluster.num_devices
    sizes = ", ".join(map(str, batches))
    return (
        f"no strategy of space {request.space.name} can run {request.model.name} on {devices} devices with a global "
        f"batch of {sizes}: every layer's dp must divide the micro-batch, and tp its heads, ffn and padded vocabulary"
    )
