"""Why this plan: what binds it, what the next best plans lose, what memory buys, and why not another one.

Everything is asked of the search again, with the question that the plan itself holds: model,
cluster, job, budget and space. A question "why not tp=8" is a search for the best plan that has it.

Seconds are those of one step on the slowest stage, term by term: they and its bubble add up to the step. Bytes of a
stage are those of the bound that the search keeps to: states + activations in flight + transients.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from meshwright.cost.layer import backward_passes
from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.search.curve import Point, curve_until
from meshwright.search.engine import DEFAULT_TIME_LIMIT_S, Found, Progress, Request
from meshwright.search.fixes import searched
from meshwright.search.space import SPACES, Space, divisors, find_space, stage_counts, strategies
from meshwright.search.wanted import Wanted
from meshwright.spec.legality import why_illegal
from meshwright.spec.model import AnyBlock, MergeLayer, ModelSpec
from meshwright.spec.plan import Plan, Prediction
from meshwright.spec.strategy import Strategy
from meshwright.units import GiB, show_bytes, show_seconds

_NEAR = 0.9  # a stage that needs this share of its budget is bound by memory
_ROUNDING = 1e-9  # sums of the same seconds in another order
_SAME_PRICE = 1e-6

_WORDS = {
    "tp": "tp",
    "dp": "dp",
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "zero_stage": "zero",
    "recompute": "recompute",
    "inner": "inner",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What keeps a plan from being faster: the memory of `stage`, or its time; `term` is the largest part of it.

    `share`: of the budget that the stage needs, or of the step that the term takes.
    """

    what: Literal["memory", "time"]
    stage: int
    term: str
    share: float
    stages_bytes: tuple[Mapping[str, int], ...]
    stages_s: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A plan held against another one, a step of equal numbers of samples: positive seconds are lost."""

    plan: Plan
    slower_s: float
    slower_fraction: float
    terms_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """The best plan with the plan's own budget, and the one with `extra_bytes` more (0: the device has no more).

    `gap`: no plan with the extra memory is faster than `after` by more than this fraction; None: not known.
    """

    extra_bytes: int
    before: Plan
    after: Plan
    gap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything on one plan. `others` are the search's own answer, where it is another plan, and its runners-up.

    `cut_short`: what the time limit left unfinished or undone, in words.
    """

    plan: Plan
    binding: Binding
    others: tuple[Against, ...]
    curve: tuple[Point, ...] = ()
    more_memory: MoreMemory | None = None
    cut_short: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans: what differs in what they are for, and the second held against the first."""

    differs: tuple[str, ...]
    first: Binding
    second: Binding
    against: Against


Verdict = Literal["already so", "illegal", "not in the space", "does not fit", "slower", "equal", "faster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The answer to "why not ...": `plan` is the best one that has it, or, where none fits, the one that comes nearest.

    `over_bytes`: by how much each stage of the nearest plan exceeds the budget.
    """

    wanted: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    plan: Plan | None = None
    against: Against | None = None
    stages_bytes: tuple[Mapping[str, int], ...] = ()
    over_bytes: tuple[int, ...] = ()


def explain(
    plan: Plan,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    curve: bool = True,
    progress: Progress | None = None,
) -> Explanation:
    """Return why `plan` is as it is; without `curve`, nothing on what other budgets would give.

    The search for other plans may take `time_limit_s`, the curve what it leaves of twice that.
    """
    until = time.perf_counter() + 2 * time_limit_s
    request = replace(request_of(plan, time_limit_s=time_limit_s), tables={})
    tell = progress or _nobody
    tell("searching for other plans")
    outcome = searched(request)
    found = (outcome.plan, *outcome.runners_up) if isinstance(outcome, Found) else ()
    others = tuple(against(other, plan) for other in found if not _is_same(other, plan))
    cut_short = ["the search for other plans"] if outcome.stopped else []
    points: tuple[Point, ...] = ()
    if curve:
        # The bound of the plan's own proof may be of another space; that of the search just now holds.
        known = (plan.model_copy(update={"proof": None}), *found)
        points, also = curve_until(request, known, until, progress=tell)
        cut_short += also
    return Explanation(
        plan=plan,
        binding=binding(plan),
        others=others,
        curve=points,
        more_memory=_more_memory(request, points),
        cut_short=tuple(cut_short),
    )


def compare(first: Plan, second: Plan) -> Comparison:
    """Return how two plans differ, and which terms make one of them faster."""
    return Comparison(
        differs=_differences(first, second),
        first=binding(first),
        second=binding(second),
        against=against(second, first),
    )


def why_not(plan: Plan, wanted: Wanted, *, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> WhyNot:
    """Return the best plan that has what is `wanted`, or why there is none."""
    if _has(plan, wanted):
        return WhyNot(wanted=wanted.text, verdict="already so", plan=plan)
    request = request_of(plan, time_limit_s=time_limit_s)
    if reasons := _why_impossible(request, wanted):
        return WhyNot(wanted=wanted.text, verdict="illegal", reasons=reasons)
    if reasons := _why_outside(request, wanted):
        return WhyNot(wanted=wanted.text, verdict="not in the space", reasons=reasons)
    if reasons := _why_illegal(request, wanted):
        return WhyNot(wanted=wanted.text, verdict="illegal", reasons=reasons)
    asked = replace(request, wanted=wanted, num_stages=wanted.num_stages, num_micro_batches=wanted.num_micro_batches)
    outcome = searched(asked)
    if isinstance(outcome, Found):
        held = against(outcome.plan, plan)
        return WhyNot(wanted=wanted.text, verdict=_verdict(held), plan=outcome.plan, against=held)
    if outcome.nearest is None:
        return WhyNot(wanted=wanted.text, verdict="illegal", reasons=(outcome.reason,))
    return WhyNot(
        wanted=wanted.text,
        verdict="does not fit",
        reasons=(outcome.reason,),
        plan=outcome.nearest,
        stages_bytes=stages_bytes(outcome.nearest),
        over_bytes=outcome.shortfall_bytes,
    )


def request_of(plan: Plan, *, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> Request:
    """Return the question that `plan` answers, for its own batch size; the full space where its own is not known."""
    return Request(
        model=plan.model,
        cluster=plan.cluster,
        job=plan.job.model_copy(update={"global_batch_size": plan.global_batch_size}),
        budget=plan.budget,
        space=_space_of(plan),
        schedule=plan.schedule,
        time_limit_s=time_limit_s,
    )


def check_plan(plan: Plan, *, where: str) -> None:
    """Raise UserError when there is nothing to explain, or when the prediction is not that of the plan."""
    if plan.predicted is None:
        raise UserError(
            f"{where}: predicted: is null, and without a prediction there is nothing to explain; "
            "write the plan with meshwright plan -o, or fill in what meshwright predict --json prints"
        )
    if plan.num_devices != plan.cluster.num_devices:
        raise UserError(
            f"{where}: num_devices: the plan uses {plan.num_devices} of the cluster's {plan.cluster.num_devices} "
            "devices; describe the cluster that it uses"
        )
    now = as_priced_now(plan)
    if now is not plan:
        raise UserError(
            f"{where}: predicted: {show_seconds(plan.predicted.step_s)} a step is not the price of this plan "
            f"({show_seconds(_predicted(now).step_s)}): its model, cluster, job or stages were changed since, or "
            "another version priced it; plan again, or fill in what meshwright predict --json prints"
        )


def as_priced_now(plan: Plan) -> Plan:
    """Return `plan` itself where it has its price or none at all; else with the price of today and without a proof."""
    if plan.predicted is None or _agree(plan.predicted, now := predict(plan)):
        return plan
    return plan.model_copy(update={"predicted": now, "proof": None})


def binding(plan: Plan) -> Binding:
    """Return what binds the plan: the fullest stage where it is near its budget, else the slowest one."""
    memory, times = stages_bytes(plan), stages_s(plan)
    fullest = max(range(plan.num_stages), key=lambda stage: memory[stage]["bound_bytes"])
    share = memory[fullest]["bound_bytes"] / plan.budget.usable_bytes
    if share >= _NEAR:
        parts = {name: memory[fullest][name] for name in ("states_bytes", "activation_bytes", "transient_bytes")}
        term = max(parts, key=lambda name: parts[name])
        return Binding(what="memory", stage=fullest, term=term, share=share, stages_bytes=memory, stages_s=times)
    slowest = _slowest_stage(plan)
    term = max(times[slowest], key=lambda name: times[slowest][name])
    share = times[slowest][term] / _predicted(plan).step_s
    return Binding(what="time", stage=slowest, term=term, share=share, stages_bytes=memory, stages_s=times)


def stages_s(plan: Plan) -> tuple[Mapping[str, float], ...]:
    """Return the seconds of a step of each stage by term; with the bubble they add up to the step."""
    return tuple(stage.step_sorts_s(plan.num_micro_batches) for stage in _predicted(plan).stages)


def slowest_s(plan: Plan) -> Mapping[str, float]:
    """Return the seconds of a step of the slowest stage by term."""
    return _predicted(plan).stages[_slowest_stage(plan)].step_sorts_s(plan.num_micro_batches)


def stages_bytes(plan: Plan) -> tuple[Mapping[str, int], ...]:
    """Return the bytes of each stage by term, their sum (the bound), and the exact peak."""
    found: list[Mapping[str, int]] = []
    for stage in _predicted(plan).stages:
        states, held = stage.states.total_bytes, stage.in_flight * stage.activation_bytes
        if backward_passes(plan.schedule, plan.num_micro_batches) != "steady":  # gradients come while activations go
            states -= stage.states.gradient_bytes
        found.append(
            {
                "states_bytes": states,
                "activation_bytes": held,
                "transient_bytes": stage.bound_bytes - states - held,
                "bound_bytes": stage.bound_bytes,
                "peak_bytes": stage.peak_bytes,
                "budget_bytes": plan.budget.usable_bytes,
            }
        )
    return tuple(found)


def against(plan: Plan, best: Plan) -> Against:
    """Return `plan` held against `best`, both for the samples of a step of `best`."""
    times = best.global_batch_size / plan.global_batch_size
    own_s, best_s = _step_s(plan) * times, _step_s(best)
    own_terms, best_terms = slowest_s(plan), slowest_s(best)
    return Against(
        plan=plan,
        slower_s=own_s - best_s,
        slower_fraction=own_s / best_s - 1.0,
        terms_s={name: own_terms[name] * times - best_terms[name] for name in best_terms},
    )


def _differences(first: Plan, second: Plan) -> tuple[str, ...]:
    """Return in words what two plans are not both for."""
    pairs = {
        "model": (first.model, second.model, first.model.name, second.model.name),
        "cluster": (first.cluster, second.cluster, first.cluster.name, second.cluster.name),
        "job": (request_of(first).job, request_of(second).job, _job_in_words(first), _job_in_words(second)),
        "budget": (
            first.budget,
            second.budget,
            show_bytes(first.budget.usable_bytes),
            show_bytes(second.budget.usable_bytes),
        ),
    }
    return tuple(
        f"{name}: {one} and {other}" if one != other else f"{name}: {one} in both, but not the same in detail"
        for name, (mine, yours, one, other) in pairs.items()
        if mine != yours
    )


def _job_in_words(plan: Plan) -> str:
    return f"batch {plan.global_batch_size} x {plan.job.seq_len} tokens in {plan.job.param_dtype}"


def _nobody(line: str) -> None:
    """Take a line of progress that nobody wants to see."""


def _more_memory(request: Request, points: tuple[Point, ...]) -> MoreMemory | None:
    """Return what another GiB buys, from the curve; None when the plan's own budget is not on it."""
    own_bytes = request.budget.memory_bytes
    more_bytes = min(own_bytes + GiB, max(own_bytes, request.cluster.device.memory_bytes))
    at = {point.memory_bytes: point for point in points}
    if own_bytes not in at or more_bytes not in at:
        return None
    before, after = at[own_bytes], at[more_bytes]
    return MoreMemory(extra_bytes=more_bytes - own_bytes, before=before.plan, after=after.plan, gap=after.gap)


def _why_impossible(request: Request, wanted: Wanted) -> tuple[str, ...]:
    """Return why no plan at all on these devices and with this batch has what is wanted; empty: one may."""
    devices, num_layers = request.cluster.num_devices, len(request.model.layers)
    batch, stages, micro_batches = request.job.batch_size, wanted.num_stages, wanted.num_micro_batches
    possible = [count for count in divisors(devices) if count <= num_layers]
    if stages is not None and stages not in possible:
        return (f"pp={stages}: {devices} devices and {num_layers} layers allow {_listed(possible)} stages",)
    if micro_batches is not None and batch % micro_batches:
        return (f"m={micro_batches} does not divide the global batch of {batch}; allowed: {_listed(divisors(batch))}",)
    counts = possible if stages is None else [stages]
    reasons = [_why_no_strategy(devices // count, wanted) for count in counts]
    return () if "" in reasons else tuple(dict.fromkeys(reasons))


def _why_no_strategy(devices: int, wanted: Wanted) -> str:
    """Return the fewest wishes that no strategy on the devices of a stage fulfils together; empty: they can be met."""
    everything = _every_strategy(devices)
    where = f"the {devices} devices of a stage" if devices > 1 else "the one device of a stage"
    asked = {name: getattr(wanted, name) for name in _WORDS if getattr(wanted, name) is not None}
    for size in range(1, len(asked) + 1):
        for names in combinations(asked, size):
            if any(all(getattr(strategy, name) == asked[name] for name in names) for strategy in everything):
                continue
            words = " and ".join(f"{_WORDS[name]}={asked[name]}" for name in names)
            if size > 1:
                why = ""
                if {"tp", "zero_stage"} <= {*names} and asked["tp"] == devices:
                    why = ": tp takes them all, and ZeRO shards over data-parallel ranks"
                return f"{words} exclude each other on {where}{why}"
            values = sorted({getattr(strategy, names[0]) for strategy in everything})
            return f"{words} is not possible on {where}; possible: {_listed(values)}"
    return ""


def _every_strategy(devices: int) -> tuple[Strategy, ...]:
    """Return the strategies of the full space and those that no space has, but that can be priced: ZeRO-1."""
    found = strategies(SPACES["full"], devices)
    return found + tuple(s.model_copy(update={"zero_stage": 1}) for s in found if s.dp_shard > 1)


def _why_outside(request: Request, wanted: Wanted) -> tuple[str, ...]:
    """Return why the space has no such plan; empty: it has."""
    if any(_matching(request.space, request, wanted).values()):
        return ()
    name = request.space.name
    where = f"on {request.cluster.num_devices} devices"
    reason = f"space {name} has no plan with {wanted.text} {where}: {request.space.about}"
    if any(_matching(SPACES["full"], request, wanted).values()):
        return (reason, "space full has such plans: plan again with --space full")
    return (reason,)


def _why_illegal(request: Request, wanted: Wanted) -> tuple[str, ...]:
    """Return which blocks can use none of the strategies that have what is wanted, and by which rules; empty: all can.

    Blocks have to be able to under one number of micro-batches; the rules are those under the fewest.
    """
    batch = request.job.batch_size
    counts = divisors(batch) if wanted.num_micro_batches is None else (wanted.num_micro_batches,)
    broken: dict[str, list[str]] = {}
    for candidates in _matching(request.space, request, wanted).values():
        for count in counts if candidates else ():
            rules = _broken_rules(request.model, candidates, batch // count)
            if not rules:
                return ()
            if count == counts[0]:
                for rule, labels in rules.items():
                    broken.setdefault(rule, []).extend(labels)
    return tuple(f"{rule} ({', '.join(labels)})" for rule, labels in broken.items())


def _broken_rules(model: ModelSpec, candidates: list[Strategy], micro_batch_samples: int) -> dict[str, list[str]]:
    """Return, by rule, the labels of the strategies that it forbids for blocks that can use none."""
    found: dict[str, list[str]] = {}
    first = 0
    for group in model.groups:
        last = first + group.num_layers - 1
        where = f"blocks {first}-{last}" if last > first else f"block {first}"
        rules = [(strategy, why_illegal(group.layer, strategy, micro_batch_samples)) for strategy in candidates]
        if isinstance(group.layer, AnyBlock) and all(rule is not None for _, rule in rules):
            for strategy, rule in rules:
                found.setdefault(f"{where}: {rule}", []).append(strategy.label)
        first += 0 if isinstance(group.layer, MergeLayer) else group.num_layers  # merges are no blocks
    return found


def _matching(space: Space, request: Request, wanted: Wanted) -> dict[int, list[Strategy]]:
    """Return the strategies of `space` that have what is wanted, by number of stages."""
    devices = request.cluster.num_devices
    counts = stage_counts(space, devices, len(request.model.layers))
    return {
        count: [strategy for strategy in strategies(space, devices // count) if wanted.allows(strategy)]
        for count in counts
        if wanted.num_stages in (None, count)
    }


def _has(plan: Plan, wanted: Wanted) -> bool:
    layers = zip(plan.model.layers, plan.strategies, strict=True)
    return (
        wanted.num_stages in (None, plan.num_stages)
        and wanted.num_micro_batches in (None, plan.num_micro_batches)
        and all(wanted.allows(strategy) for layer, strategy in layers if isinstance(layer, AnyBlock))
    )


def _verdict(held: Against) -> Verdict:
    if abs(held.slower_fraction) <= _ROUNDING:
        return "equal"
    return "slower" if held.slower_fraction > 0 else "faster"


def _space_of(plan: Plan) -> Space:
    """Return the space that the plan is the best of: "full", or as "base with exact stages" (search/space.py)."""
    if plan.proof is None:
        return SPACES["full"]
    name, _, cut = plan.proof.space.partition(",")[0].partition(" with ")
    try:
        return find_space(name, cut.removesuffix(" stages") or None)
    except UserError:  # of another version, or of a plan that a person wrote
        return SPACES["full"]


def _slowest_stage(plan: Plan) -> int:
    stages = _predicted(plan).stages
    return max(range(len(stages)), key=lambda stage: stages[stage].busy_s)


def _agree(stored: Prediction, now: Prediction) -> bool:
    """Return whether two predictions are the same price, up to the rounding of another machine."""
    if len(stored.stages) != len(now.stages):
        return False
    pairs: list[tuple[float, float]] = [(stored.step_s, now.step_s)]
    for old, new in zip(stored.stages, now.stages, strict=True):
        pairs += [(old.busy_s, new.busy_s), (old.peak_bytes, new.peak_bytes), (old.bound_bytes, new.bound_bytes)]
        pairs += [(old.states.total_bytes, new.states.total_bytes), (old.in_flight, new.in_flight)]
    return all(abs(old - new) <= _SAME_PRICE * max(abs(old), abs(new)) for old, new in pairs)


def _is_same(one: Plan, other: Plan) -> bool:
    return one.stages == other.stages and one.num_micro_batches == other.num_micro_batches


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None  # noqa: S101 `check_plan` and the search see to it
    return plan.predicted


def _step_s(plan: Plan) -> float:
    return _predicted(plan).step_s


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
