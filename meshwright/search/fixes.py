"""When nothing fits: the cheapest changes that make it fit, each verified by a search.

In the order of what they cost: what the question itself forbids (a sub-space, fixed stages and
micro-batches, GPipe), memory, more devices; a smaller batch comes last, because it seldom helps where
the number of micro-batches is free. The sequence length stays as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import UserError
from meshwright.search.engine import Found, Infeasible, Request, search
from meshwright.search.space import SPACES, divisors, stage_counts
from meshwright.spec import library
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import BatchRange, Budget
from meshwright.spec.plan import Plan
from meshwright.units import GiB, KiB, MiB, show_bytes

FIXES_TIME_LIMIT_S = 10.0
_LEAST_TIME_S = 0.1
_SEARCH_TIME_S = 1.0  # of one search of all settings, once it has a plan
_PARTS_OF_BATCH = 8
_TIMES_DEVICES = (2, 4, 8)
_DEVICES_OF_A_NODE = 8
_EXACT_TO = 1 << 10  # least memory is known to a part in this many, where it has to be searched for


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change that makes it fit, and the plan that it gives.

    `options` are to be typed in place of those given, without `leave_out`; none: no option can say it.
    """

    kind: Literal["space", "memory", "batch", "devices"]
    what: str
    options: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    plan: Plan


def fixes(request: Request, infeasible: Infeasible, *, time_limit_s: float = FIXES_TIME_LIMIT_S) -> tuple[Fix, ...]:
    """Return changes to `request`, of which `infeasible` came out, that make it fit; at most one of each kind.

    Stopped by Ctrl-C, it returns what it has.
    """
    deadline = time.perf_counter() + time_limit_s
    proposals = (_fewer_restrictions, _more_memory, _more_devices, _smaller_batch)
    found: list[Fix] = []
    for number, propose in enumerate(proposals):
        # What one kind leaves of its time goes to the next ones.
        now = time.perf_counter()
        until = now + (deadline - now) / (len(proposals) - number)
        try:
            for fix in propose(_Asked(request=request, infeasible=infeasible, until=until)):
                if fix is not None:
                    found.append(fix)
                if fix is not None or time.perf_counter() > until:
                    break
        except KeyboardInterrupt:
            break
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What nothing fits, and until when there is time to look for one kind of change."""

    request: Request
    infeasible: Infeasible
    until: float


def searched(request: Request) -> Found | Infeasible:
    """Return the answer of a search of several: where Ctrl-C ends one, it ends all."""
    outcome = search(request)
    if isinstance(outcome, Found) and outcome.stopped == "interrupt":
        raise KeyboardInterrupt
    return outcome


def fitting_plan(request: Request) -> Plan | None:
    """Return the best plan found within the time limit, or None when nothing fits or the question makes no sense."""
    try:
        outcome = searched(replace(request, num_runners_up=0))
    except UserError:  # such as a number of stages that does not divide other devices
        return None
    if isinstance(outcome, Found):
        return outcome.plan
    # Out of time, the search may know of a plan that fits only as the one that comes nearest; it is not uniform.
    fits = outcome.nearest is not None and not any(outcome.shortfall_bytes) and not request.space.uniform
    return outcome.nearest if fits else None


def with_memory(request: Request, memory_bytes: int) -> Request:
    """Return the request with another budget, of which as much is reserved as before."""
    budget = Budget(memory_bytes=memory_bytes, reserved_bytes=request.budget.reserved_bytes)
    return replace(request, budget=budget)


def least_memory(request: Request, infeasible: Infeasible, *, until: float = math.inf) -> Plan | None:
    """Return a plan with the least budget that anything fits in, where `infeasible` came out of less; None: no plan.

    The shortfall gives it to the byte where stages and layers are chosen freely. Where the space allows
    only some of those plans (one strategy for all blocks), it is a lower bound, from which it is searched for,
    `until` then.
    """
    if infeasible.nearest is None:
        return None
    low = request.budget.memory_bytes + max(infeasible.shortfall_bytes)
    plan = fitting_plan(with_memory(request, low))
    if plan is not None:
        return plan
    high = low
    while plan is None and high < low * _EXACT_TO and time.perf_counter() < until:
        high *= 2
        plan = fitting_plan(with_memory(request, high))
    low = high // 2
    while plan is not None and high - low > max(1, low // _EXACT_TO) and time.perf_counter() < until:
        middle = (low + high) // 2
        smaller = fitting_plan(with_memory(request, middle))
        if smaller is None:
            low = middle
        else:
            high, plan = middle, smaller
    return plan


def _quick_plan(asked: _Asked, request: Request) -> Plan | None:
    """Return a plan that fits `request`, which is what was asked with a change: of a few settings, or, in time, of all.

    That it fits counts, and not that it is the very best. A search of all settings cannot be stopped before it has a
    plan; one setting takes a known share of its time.
    """
    started = time.perf_counter()
    batch = _one_batch(request, asked.infeasible.nearest)
    job = request.job.model_copy(update={"global_batch_size": batch})
    plan, num_tried = None, 0
    for stages, micro_batches in _settings(request, batch, asked.infeasible.nearest):
        if plan is not None or (num_tried and time.perf_counter() > asked.until):
            break
        num_tried += 1
        alone = replace(request, job=job, num_stages=stages, num_micro_batches=micro_batches)
        plan = fitting_plan(replace(alone, time_limit_s=_LEAST_TIME_S))
    now = time.perf_counter()
    counts = stage_counts(request.space, request.cluster.num_devices, len(request.model.layers))
    whole_s = (now - started) / max(1, num_tried) * len(counts) * len(divisors(batch))
    if now + whole_s > asked.until or (plan is None and not num_tried):
        return plan
    whole = fitting_plan(replace(request, time_limit_s=min(_SEARCH_TIME_S, request.time_limit_s)))
    return max((one for one in (plan, whole) if one is not None), key=_samples_per_s, default=None)


def _settings(request: Request, batch: int, nearest: Plan | None) -> Iterator[tuple[int, int]]:
    """Yield stages and micro-batches in which little memory is needed: the nearest plan's, then full sharding."""
    devices = request.cluster.num_devices
    settings = [] if nearest is None else [(nearest.num_stages, nearest.num_micro_batches)]
    settings += [
        (stages, request.num_micro_batches or max(1, batch * stages // devices))
        for stages in stage_counts(request.space, devices, len(request.model.layers))
    ]
    for stages, micro_batches in dict.fromkeys(settings):
        is_asked = request.num_stages in (None, stages) and request.num_micro_batches in (None, micro_batches)
        if is_asked and batch % micro_batches == 0:
            yield stages, micro_batches


def _one_batch(request: Request, nearest: Plan | None) -> int:
    batch = request.job.global_batch_size
    if isinstance(batch, int):
        return batch
    if nearest is not None:
        return nearest.global_batch_size
    return batch.largest if isinstance(batch, BatchRange) else request.cluster.num_devices


def _samples_per_s(plan: Plan) -> float:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    return plan.predicted.samples_per_s


def _fewer_restrictions(asked: _Asked) -> Iterator[Fix | None]:
    """Lift what the question forbids, one thing after the other: the space, the fixed numbers, GPipe."""
    freer, options, leave_out = asked.request, (), ()
    if freer.space != SPACES["full"]:
        options, leave_out = ("--space", "full"), () if freer.space.name in SPACES else ("--partition",)
        freer = replace(freer, space=SPACES["full"])
        yield _less("all plans, not those of one space", options, leave_out, _quick_plan(asked, freer))
    fixed = {"--stages": freer.num_stages, "--micro-batches": freer.num_micro_batches}
    if dropped := tuple(name for name, value in fixed.items() if value is not None):
        leave_out = (*leave_out, *dropped)
        freer = replace(freer, num_stages=None, num_micro_batches=None)
        yield _less("other numbers of stages and micro-batches", options, leave_out, _quick_plan(asked, freer))
    if freer.schedule != "1f1b":
        options = (*options, "--schedule", "1f1b")
        freer = replace(freer, schedule="1f1b")
        yield _less("a schedule with fewer micro-batches in flight", options, leave_out, _quick_plan(asked, freer))


def _less(what: str, options: tuple[str, ...], leave_out: tuple[str, ...], plan: Plan | None) -> Fix | None:
    return None if plan is None else Fix(kind="space", what=what, options=options, leave_out=leave_out, plan=plan)


def _more_memory(asked: _Asked) -> Iterator[Fix | None]:
    """The least memory, rounded up to what is quickly typed."""
    request, infeasible, device = asked.request, asked.infeasible, asked.request.cluster.device
    if infeasible.nearest is None:
        return
    needed_bytes, text = _round_up(request.budget.memory_bytes + max(infeasible.shortfall_bytes), device.memory_bytes)
    plan = _quick_plan(asked, with_memory(request, needed_bytes))
    if plan is None:
        plan = least_memory(replace(request, time_limit_s=_SEARCH_TIME_S), infeasible, until=asked.until)
    if plan is None:
        return
    if plan.budget.memory_bytes > needed_bytes:
        needed_bytes, text = _round_up(plan.budget.memory_bytes, device.memory_bytes)
    if needed_bytes <= device.memory_bytes:
        yield Fix(kind="memory", what="more memory of each device", options=("--memory", text), plan=plan)
        return
    what = f"devices of {show_bytes(needed_bytes)}; {device.name} has {show_bytes(device.memory_bytes)}"
    yield Fix(kind="memory", what=what, plan=plan)


def _round_up(num_bytes: int, most_bytes: int) -> tuple[int, str]:
    """Return a size that is not below `num_bytes` as bytes and as a user types it; `most_bytes` is not passed."""
    unit, scale = ("MiB", MiB) if num_bytes >= GiB else ("KiB", KiB)
    rounded = -(-num_bytes // scale)
    if num_bytes <= most_bytes < rounded * scale:
        return num_bytes, f"{num_bytes}B"
    return rounded * scale, f"{rounded}{unit}"


def _smaller_batch(asked: _Asked) -> Iterator[Fix | None]:
    """The largest batch that fits, of the eighths of the batch and then its halves."""
    request, batch = asked.request, asked.request.job.global_batch_size
    if isinstance(batch, BatchRange):
        batch = batch.smallest
    if batch == "auto":
        return  # it has tried small ones
    multiple = request.num_micro_batches or 1
    sizes = {batch * part // _PARTS_OF_BATCH // multiple * multiple for part in range(1, _PARTS_OF_BATCH)}
    half = batch
    while half > multiple:
        half //= 2
        sizes.add(half // multiple * multiple)
    for size in sorted(sizes - {0, batch}, reverse=True):
        job = request.job.model_copy(update={"global_batch_size": size})
        plan = _quick_plan(asked, replace(request, job=job))
        options = ("--global-batch", str(size))
        yield None if plan is None else Fix(kind="batch", what="a smaller batch", options=options, plan=plan)


def _more_devices(asked: _Asked) -> Iterator[Fix | None]:
    """The least of 2, 4 and 8 times as many devices of the same kind.

    A plan for k times as many needs at least a kth of the memory: k devices' share would else fit on one.
    """
    request, usable_bytes = asked.request, asked.request.budget.usable_bytes
    needed_bytes = usable_bytes + max(asked.infeasible.shortfall_bytes, default=0)
    for factor in (factor for factor in _TIMES_DEVICES if needed_bytes <= factor * usable_bytes):
        larger = _times(request.cluster, factor)
        if larger.num_devices > library.MOST_DEVICES:
            return
        plan = _quick_plan(asked, replace(request, cluster=larger))
        if plan is None:
            yield None
            continue
        nodes = f" in {larger.num_nodes} nodes" if larger.num_nodes > 1 else ""
        options = ("--cluster", larger.name) if _can_be_typed(request.cluster) else ()
        yield Fix(kind="devices", what=f"{larger.num_devices} devices{nodes}", options=options, plan=plan)


def _times(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """Return `factor` times as many devices: a node is filled up to eight, then there are more nodes."""
    nodes, devices = cluster.num_nodes, cluster.devices_per_node
    while factor > 1 and nodes == 1 and 2 * devices <= _DEVICES_OF_A_NODE:
        devices, factor = 2 * devices, factor // 2
    name = _typed(nodes * factor, devices, cluster.device.name)
    return cluster.model_copy(update={"name": name, "num_nodes": nodes * factor, "devices_per_node": devices})


def _typed(num_nodes: int, devices_per_node: int, kind: str) -> str:
    return f"{devices_per_node}x{kind}" if num_nodes == 1 else f"{num_nodes}x{devices_per_node}x{kind}"


def _can_be_typed(cluster: ClusterSpec) -> bool:
    """Return whether larger clusters need no file: devices and links are the shipped ones, or measured."""
    kind = cluster.device.name
    if kind not in library.device_names():
        return False
    is_measured = bool(cluster.collective_samples or cluster.device.layer_samples)
    shipped = library.cluster(_typed(cluster.num_nodes, cluster.devices_per_node, kind))
    return is_measured or cluster.model_copy(update={"name": shipped.name}) == shipped
