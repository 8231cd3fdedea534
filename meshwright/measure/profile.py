"""One profile: what a search for a job will ask for, measured in two passes and kept as it comes.

Two passes some time apart see what a few repeats in a row do not: that a machine is slower in one
minute than in the next. A sample's spread covers both. What is measured is handed to `keep` every
few seconds, so that an interruption loses little, and what a `previous` profile has is not measured
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.measure.collectives import collective_tasks
from meshwright.measure.layers import layer_tasks
from meshwright.measure.overlap import overlap_tasks
from meshwright.measure.rates import rate_tasks
from meshwright.measure.task import Task, ladder
from meshwright.measure.timing import REPEATS
from meshwright.measure.units import unit_tasks
from meshwright.measure.ways import Way, make_ways, ranks_per_node
from meshwright.spec.base import Dtype, dtype_bytes
from meshwright.spec.job import JobSpec
from meshwright.spec.legality import why_illegal_tp
from meshwright.spec.model import AnyBlock, ModelSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.profile import Profile, Sample

_PASSES = 2
_KEEP_EVERY_S = 3.0
_SMALLEST_MESSAGE_BYTES, _USUAL_MESSAGE_BYTES, _LARGEST_MESSAGE_BYTES = 1 << 10, 1 << 22, 1 << 30
_MESSAGE_RATIO, _UNIT_RATIO = 64, 16


class AnotherMachineError(UserError):
    """A profile that is there was measured elsewhere."""

    on_every_rank = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search will be asked: a model and a job with at most `batch` samples a step; no model: the machine."""

    model: ModelSpec | None
    job: JobSpec
    batch: int


def measure_profile(
    device: torch.device,
    name: str,
    question: Question,
    *,
    previous: Profile | None,
    show: Callable[[str], object],
    keep: Callable[[Profile], object],
) -> Profile:
    """Return the profile of the running process group. Collective; every rank has the same samples.

    `previous` must be the same on every rank. Raises AnotherMachineError when it is not of this one.
    """
    blank = Profile(
        device=name,
        backend="cuda" if device.type == "cuda" else "cpu",
        num_ranks=dist.get_world_size(),
        ranks_per_node=ranks_per_node(),
        torch_version=str(torch.__version__),
    )
    _refuse_another_machine(blank, previous)
    found = {} if previous is None else {sample.key: sample for sample in previous.samples}
    wanted = _tasks(device, question)
    todo = [[task for task in wanted if _passes_done(found.get(task.key)) <= number] for number in range(_PASSES)]
    total, number = sum(map(len, todo)), 0
    if previous is not None:
        show(f"{len(found)} samples are here already; {total} to measure")
    kept_at = time.monotonic()
    for tasks in todo:
        for task in tasks:
            number += 1
            show(f"{number} of {total}: {task.label}")
            sample = task.run()
            before = found.get(task.key)
            found[task.key] = sample if before is None else before.joined(sample)
            if time.monotonic() - kept_at > _KEEP_EVERY_S:
                keep(blank.with_samples(tuple(found.values()), is_complete=False))
                kept_at = time.monotonic()
    profile = blank.with_samples(tuple(found.values()), is_complete=True)
    keep(profile)
    return profile


def _refuse_another_machine(blank: Profile, previous: Profile | None) -> None:
    if previous is None:
        return
    for field in ("device", "backend", "num_ranks", "ranks_per_node", "torch_version"):
        theirs, ours = getattr(previous, field), getattr(blank, field)
        if theirs != ours:
            raise AnotherMachineError(
                f"output: the profile that is there has {field} {theirs}, but this run has {ours}; "
                "write to another file, or start afresh with --fresh"
            )


def _passes_done(sample: Sample | None) -> int:
    return 0 if sample is None else sample.repeats // REPEATS


def _tasks(device: torch.device, question: Question) -> list[Task]:
    ways = make_ways()
    job = question.job
    dtypes: tuple[Dtype, ...] = ("fp32",) if job.param_dtype == "fp32" else (job.param_dtype, "fp32")
    messages = ladder(_SMALLEST_MESSAGE_BYTES, _largest_message_bytes(question), _MESSAGE_RATIO)
    tasks = [
        *rate_tasks(device, dtypes),
        *collective_tasks(device, ways, messages, dtypes),
        *overlap_tasks(device, ways),
    ]
    if question.model is not None:
        tasks += layer_tasks(device, question.model, job, question.batch)
        tasks += unit_tasks(device, ways, _unit_sizes(question.model, job, ways), job)
    return tasks


def _largest_message_bytes(question: Question) -> int:
    """Return the largest tensor that a step moves: hidden states of the whole batch, or a layer's gradients."""
    model, job = question.model, question.job
    if model is None:
        return _USUAL_MESSAGE_BYTES
    hidden = question.batch * job.seq_len * model.layers[0].hidden_size * dtype_bytes(job.param_dtype)
    elements = max(p.num_elements for layer in set(model.layers) for p in layer_parameters(layer))
    largest = max(hidden, elements * dtype_bytes(job.reduce_dtype), 2 * _SMALLEST_MESSAGE_BYTES)
    return min(_LARGEST_MESSAGE_BYTES, largest)


def _unit_sizes(model: ModelSpec, job: JobSpec, ways: tuple[Way, ...]) -> tuple[int, ...]:
    """Return bytes of parameters, from the smallest share of a block that a rank can hold to the largest layer."""
    degrees = {1, *(way.size for way in ways)}
    sizes = [
        sum(p.num_elements for p in layer_parameters(layer)) // tp * dtype_bytes(job.param_dtype)
        for layer in set(model.layers)
        for tp in degrees
        if isinstance(layer, AnyBlock) or tp == 1
        if why_illegal_tp(layer, tp) is None
    ]
    return ladder(min(sizes), min(_LARGEST_MESSAGE_BYTES, max(sizes)), _UNIT_RATIO)
