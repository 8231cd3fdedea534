"""Searches of encoders with decoders and of Swin: where stages are cut, and that nothing is better."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshwright
from meshwright import Found, Infeasible, Plan
from meshwright.cost.predict import predict
from meshwright.search.problem import price
from meshwright.search.space import SPACES, divisors, even_boundaries, strategies
from meshwright.search.table import Setting, build_problem
from meshwright.spec.job import JobSpec
from meshwright.spec.legality import why_illegal
from meshwright.spec.library import cluster, model
from meshwright.spec.model import BlockLayer, LayerGroup, MergeLayer, ModelSpec
from meshwright.spec.strategy import Strategy
from tests.plans import by_hand
from tests.search.uniform import all_strategies, bound_bytes, step_s

LENGTHS: dict[str, dict[str, int]] = {
    "tiny-t5": {"seq_len": 48, "target_seq_len": 32},
    "tiny-swin": {"seq_len": 14**2},
}
NAMES = list(LENGTHS)


def found(spec: ModelSpec | str, ranks: str, name: str, **options: Any) -> Found:
    outcome = meshwright.plan(spec, ranks, **LENGTHS[name], **options)
    assert isinstance(outcome, Found), outcome
    return outcome


def smallest(name: str) -> ModelSpec:
    """Return the model with one block of each kind."""
    spec = model(name)
    if name == "tiny-t5":
        embedding, *_, head = spec.layers
        first, last = spec.layers[2], spec.layers[3]
        assert isinstance(first, BlockLayer)
        assert isinstance(last, BlockLayer)
        assert first.attention.relative is not None
        owner = first.attention.model_copy(
            update={"relative": first.attention.relative.model_copy(update={"owns_table": True})}
        )
        layers = [
            embedding,
            first.model_copy(update={"attention": owner}),
            last.model_copy(update={"carries": ()}),
            head,
        ]
    else:
        layers = [spec.layers[index] for index in (0, 2, 3, 5, 6)]
    groups = tuple(LayerGroup(num_layers=1, layer=layer) for layer in layers)
    return ModelSpec.model_validate(spec.model_dump() | {"groups": groups})


def plans_of(name: str, num_stages: int) -> Iterator[Plan]:
    """Yield every plan of the smallest model on two ranks with batch 4, priced by `predict`."""
    spec = smallest(name)
    everything = sorted(all_strategies(2 // num_stages), key=lambda strategy: strategy.sort_key)
    for cut in itertools.combinations(range(1, len(spec.layers)), num_stages - 1):
        bounds = (0, *cut, len(spec.layers))
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        for micro_batches in (1, 2, 4):
            choices = [
                [
                    strategy
                    for strategy in everything
                    if why_illegal(layer, strategy, 4 // micro_batches) is None
                    and (strategy.recompute == "none" or isinstance(layer, BlockLayer | MergeLayer))
                ]
                for layer in spec.layers
            ]
            for chosen in itertools.product(*choices):
                if spec.tied_embedding and chosen[0] != chosen[-1]:
                    continue
                plan = by_hand(
                    spec, "2xcpu", list(chosen), batch=4, sizes=sizes, micro_batches=micro_batches, **LENGTHS[name]
                )
                yield plan.model_copy(update={"predicted": predict(plan)})


@cache
def every_plan(name: str) -> tuple[Plan, ...]:
    # Swin has a layer more, and on one stage 8 ways for each: too many plans.
    counts = (1, 2) if name == "tiny-t5" else (2,)
    return tuple(plan for count in counts for plan in plans_of(name, count))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_no_plan_of_the_smallest_model_is_better(name: str, share: float):
    plans = every_plan(name)
    needs = sorted(max(bound_bytes(plan)) for plan in plans)
    budget = int(needs[0] + share * (needs[-1] - needs[0]))
    best_s = min(step_s(plan) for plan in plans if max(bound_bytes(plan)) <= budget)
    stages = None if name == "tiny-t5" else 2
    outcome = found(smallest(name), "2xcpu", name, global_batch=4, memory=budget, stages=stages)
    assert step_s(outcome.plan) == pytest.approx(best_s, rel=1e-9)
    assert max(bound_bytes(outcome.plan)) <= budget
    assert outcome.plan.proof is not None
    assert outcome.plan.proof.gap == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_may_be_cut_anywhere(name: str, num_stages: int):
    """Inside an encoder, between it and its decoder, before and after patches are merged; each cut as predicted."""
    spec = model(name)
    ranks = cluster("8xa100-sxm-40g")
    setting = Setting(
        model=spec,
        cluster=ranks,
        job=JobSpec(global_batch_size=16, **LENGTHS[name]),
        budget_bytes=ranks.device.memory_bytes,
        num_stages=num_stages,
        num_micro_batches=4,
        micro_batch_samples=4,
        schedule="1f1b",
    )
    candidates = strategies(SPACES["full"], setting.stage_devices)
    problem = build_problem(setting, candidates)
    rng = np.random.default_rng(num_stages)
    for cut in itertools.combinations(range(1, len(spec.layers)), num_stages - 1):
        chosen = [int(rng.choice(np.flatnonzero(np.isfinite(row)))) for row in problem.forward_s]
        if spec.tied_embedding:
            both = np.isfinite(problem.forward_s[0] + problem.forward_s[-1])
            chosen[0] = chosen[-1] = int(rng.choice(np.flatnonzero(both)))
        bounds = (0, *cut, len(spec.layers))
        plan = by_hand(
            spec,
            ranks,
            [candidates[column] for column in chosen],
            batch=16,
            sizes=[high - low for low, high in itertools.pairwise(bounds)],
            micro_batches=4,
            **LENGTHS[name],
        )
        priced, predicted = price(problem, bounds, tuple(chosen)), predict(plan)
        assert priced.objective_s == pytest.approx(predicted.step_s, rel=1e-12)
        assert priced.stage_bytes == tuple(stage.bound_bytes for stage in predicted.stages)


@pytest.mark.parametrize("name", NAMES)
def test_the_best_of_all_cuts_is_found(name: str):
    """A rank for each of four stages and memory for all: nothing but cuts and micro-batches to choose."""
    spec = model(name)
    layers = len(spec.layers)
    best = {}
    for cut in itertools.combinations(range(1, layers), 3):
        bounds = (0, *cut, layers)
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        for micro_batches in divisors(16):
            plan = by_hand(
                spec,
                "4xcpu",
                [Strategy()] * layers,
                batch=16,
                sizes=sizes,
                micro_batches=micro_batches,
                **LENGTHS[name],
            )
            best[bounds, micro_batches] = predict(plan).step_s
    outcome = found(name, "4xcpu", name, global_batch=16, stages=4)
    plan = outcome.plan
    assert step_s(plan) == pytest.approx(min(best.values()), rel=1e-9)
    assert step_s(plan) == pytest.approx(best[plan.boundaries, plan.num_micro_batches], rel=1e-12)
    first_of_next = {"tiny-t5": 3, "tiny-swin": 4}[name]  # the decoder's first block; the one after merged patches
    assert first_of_next in plan.boundaries


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("memory", ["3MiB", None])
def test_full_is_never_worse_and_prices_are_predictions(name: str, memory: str | None):
    options: dict[str, Any] = {"global_batch": 8, "memory": memory}
    outcomes = {space: meshwright.plan(name, "4xcpu", space=space, **LENGTHS[name], **options) for space in SPACES}
    full = outcomes["full"]
    assert isinstance(full, Found)
    for space, outcome in outcomes.items():
        if isinstance(outcome, Infeasible):
            two_heads_four_ranks = (name, space) == ("tiny-swin", "tp")
            assert memory is not None or two_heads_four_ranks
            continue
        assert step_s(outcome.plan) == pytest.approx(predict(outcome.plan).step_s, rel=1e-12)
        assert bound_bytes(outcome.plan) == [stage.bound_bytes for stage in predict(outcome.plan).stages]
        assert step_s(full.plan) <= step_s(outcome.plan) * (1 + 1e-9), space
        assert outcome.plan.proof is not None


def test_merges_stay_with_the_block_before_them():
    swin = model("tiny-swin")
    assert swin.merges == (3,)
    # Embedding, block, block, merge, block, block, classifier.
    assert even_boundaries(7, 1, swin.merges) == (0, 7)
    assert even_boundaries(7, 2, swin.merges) == (0, 4, 7)
    assert even_boundaries(7, 3, swin.merges) == (0, 4, 5, 7)
    assert even_boundaries(7, 4, swin.merges) == (0, 2, 4, 5, 7)
    assert even_boundaries(7, 5, swin.merges) is None


@pytest.mark.parametrize("num_layers", [5, 8, 13])
@pytest.mark.parametrize("num_stages", range(1, 6))
def test_even_stages_have_as_many_blocks_with_any_merges(num_layers: int, num_stages: int):
    inner = range(2, num_layers - 2)
    for merges in itertools.chain(itertools.combinations(inner, 1), itertools.combinations(inner, 2)):
        blocks = [layer for layer in range(1, num_layers - 1) if layer not in merges]
        bounds = even_boundaries(num_layers, num_stages, merges)
        if len(blocks) < num_stages:
            assert bounds is None
            continue
        assert bounds is not None
        counts = [sum(low <= b < high for b in blocks) for low, high in itertools.pairwise(bounds)]
        assert sum(counts) == len(blocks)
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
        assert not set(bounds) & set(merges)


def test_even_spaces_cut_swin_so():
    plan = found("tiny-swin", "4xcpu", "tiny-swin", global_batch=8, space="base", stages=4).plan
    assert plan.boundaries == (0, 2, 4, 5, 7)
    assert Strategy() in plan.strategies
