"""The planner as a function: from names or specs to a plan, or the reason why none fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from meshwright.cost.calibrate import calibrated_budget, calibrated_cluster
from meshwright.cost.fit import fitted_cluster
from meshwright.cost.margin import margin_of
from meshwright.errors import UserError
from meshwright.files import make_spec, read_spec, write_spec
from meshwright.search.engine import DEFAULT_TIME_LIMIT_S, Found, Infeasible, Request, search
from meshwright.search.space import Partition, Space, find_space, with_rule
from meshwright.spec import library
from meshwright.spec.base import Dtype
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import AdamW, Budget, JobSpec, parse_batch
from meshwright.spec.memory import USUAL_CONFIDENCE
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.profile import Profile
from meshwright.spec.sample import sample_lengths
from meshwright.spec.schedule import ScheduleName
from meshwright.units import parse_bytes, show_bytes


def plan(  # noqa: PLR0913 all but two by keyword, as on the command line
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    *,
    global_batch: int | str,
    seq_len: int | None = None,
    target_seq_len: int | None = None,
    memory: int | str | None = None,
    reserve: int | str | None = None,
    memory_confidence: float | None = None,
    dtype: Dtype = "bf16",
    dropout: float = 0.0,
    optimizer: AdamW | None = None,
    profile: Profile | str | Path | None = None,
    calibration: Calibration | str | Path | None = None,
    space: str = "full",
    partition: Partition | None = None,
    rules: Mapping[str, bool] | None = None,
    schedule: ScheduleName = "1f1b",
    stages: int | None = None,
    micro_batches: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Callable[[str], None] | None = None,
) -> Found | Infeasible:
    """Return the fastest plan to train `model` on `cluster`, or why nothing fits.

    `model` and `cluster` are specs, library names ("llama-2-7b", "8xa100-sxm-40g") or paths.
    `global_batch` counts samples of `seq_len` tokens (default: what is usual for the model, where anything is; a
    decoder beside an encoder has `target_seq_len`): a number, "8..512" or "auto". `memory` is
    what one device may use (default: all it has), of which `reserve` is held back, or what published
    runs say is needed to fit with `memory_confidence` (0.95 by default on GPUs, where neither memory, reserve
    nor a profile is given). A `profile` replaces the cluster's rates by measured ones, a `calibration` scales
    predictions by what own runs took. `partition` cuts stages in another way than the
    space does; `dropout` is the share of hidden states that training drops; `rules` switches T3 of the
    decision trees on or off. Raises UserError for bad input.
    """
    request = make_request(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        target_seq_len=target_seq_len,
        memory=memory,
        reserve=reserve,
        memory_confidence=memory_confidence,
        dtype=dtype,
        dropout=dropout,
        optimizer=optimizer,
        profile=profile,
        calibration=calibration,
        space=space,
        partition=partition,
        rules=rules,
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        time_limit_s=time_limit_s,
    )
    return search(request, progress)


def make_request(  # noqa: PLR0913 as `plan`
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    *,
    global_batch: int | str,
    seq_len: int | None = None,
    target_seq_len: int | None = None,
    memory: int | str | None = None,
    reserve: int | str | None = None,
    memory_confidence: float | None = None,
    dtype: Dtype = "bf16",
    dropout: float = 0.0,
    optimizer: AdamW | None = None,
    profile: Profile | str | Path | None = None,
    calibration: Calibration | str | Path | None = None,
    space: str = "full",
    partition: Partition | None = None,
    rules: Mapping[str, bool] | None = None,
    schedule: ScheduleName = "1f1b",
    stages: int | None = None,
    micro_batches: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
) -> Request:
    """Return what a search is asked, from the arguments of `plan`."""
    model_spec = library.model(model) if isinstance(model, str) else model
    cluster_spec = library.cluster(cluster) if isinstance(cluster, str) else cluster
    if profile is not None:
        measured = profile if isinstance(profile, Profile) else read_spec(Profile, profile)
        cluster_spec = fitted_cluster(cluster_spec, measured)
    budget = make_budget(cluster_spec, memory, reserve, memory_confidence, is_measured=profile is not None)
    if calibration is not None:
        cluster_spec, budget = calibrated(cluster_spec, budget, calibration)
    batch = parse_batch(global_batch) if isinstance(global_batch, str) else global_batch
    lengths = sample_lengths(model_spec, seq_len, target_seq_len)
    job = make_spec(
        JobSpec,
        global_batch_size=batch,
        seq_len=lengths.seq,
        target_seq_len=lengths.target_seq or None,
        param_dtype=dtype,
        dropout=dropout,
        optimizer=optimizer or AdamW(),
    )
    return Request(
        model=model_spec,
        cluster=cluster_spec,
        job=job,
        budget=budget,
        space=_space(space, partition, rules or {}),
        schedule=schedule,
        num_stages=stages,
        num_micro_batches=micro_batches,
        time_limit_s=time_limit_s,
    )


def _space(name: str, partition: Partition | None, rules: Mapping[str, bool]) -> Space:
    space = find_space(name, partition)
    for rule, on in rules.items():
        space = with_rule(space, rule, on=on)
    return space


def calibrated(
    cluster: ClusterSpec, budget: Budget, calibration: Calibration | str | Path
) -> tuple[ClusterSpec, Budget]:
    """Return cluster and budget as the user's own runs say. Raises UserError for a calibration of another device."""
    known = calibration if isinstance(calibration, Calibration) else read_spec(Calibration, calibration)
    return calibrated_cluster(cluster, known), calibrated_budget(budget, known)


def make_budget(
    cluster: ClusterSpec,
    memory: int | str | None,
    reserve: int | str | None = None,
    confidence: float | None = None,
    *,
    is_measured: bool = False,
) -> Budget:
    """Return the budget of one device; UserError when it is more than the device has.

    What is held back is `reserve`, or the margin of a `confidence`; who says neither, nor how much memory there is,
    nor has measured the device, gets the margin of 0.95.
    """
    memory_bytes = parse_bytes(memory) if isinstance(memory, str) else memory
    reserved_bytes = parse_bytes(reserve, field="reserve") if isinstance(reserve, str) else reserve
    available = cluster.device.memory_bytes
    if memory_bytes is not None and memory_bytes > available:
        raise UserError(f"memory: {memory} is more than a {cluster.device.name} has ({show_bytes(available)})")
    if confidence is not None and reserved_bytes is not None:
        raise UserError("memory-confidence: says what to hold back, and so does reserve; give one of them")
    if memory_bytes is None and reserved_bytes is None and not is_measured:
        confidence = USUAL_CONFIDENCE if confidence is None else confidence
    memory_bytes = available if memory_bytes is None else memory_bytes
    if confidence is not None:
        reserved_bytes = margin_of(memory_bytes, cluster, confidence)
    return make_spec(Budget, memory_bytes=memory_bytes, reserved_bytes=reserved_bytes or 0)


def load_plan(path: str | Path) -> Plan:
    """Return the plan in the file `path`. Raises UserError in one line."""
    return read_spec(Plan, path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` to `path` as canonical JSON, whole or not at all."""
    write_spec(plan, path)
