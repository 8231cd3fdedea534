"""The arrays that the solvers see say what `predict` says, for any plan."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from meshwright.cost.predict import predict
from meshwright.search.problem import price
from meshwright.search.space import SPACES, strategies
from meshwright.search.table import Setting, build_problem
from meshwright.spec.job import JobSpec
from meshwright.spec.legality import why_illegal
from meshwright.spec.library import cluster, model
from meshwright.spec.model import ModelSpec
from meshwright.spec.schedule import ScheduleName
from tests.plans import by_hand, cut


def setting(
    spec: ModelSpec,
    cluster_name: str,
    *,
    stages: int,
    micro_batches: int,
    samples: int,
    seq_len: int = 64,
    schedule: ScheduleName = "1f1b",
) -> Setting:
    ranks = cluster(cluster_name)
    return Setting(
        model=spec,
        cluster=ranks,
        job=JobSpec(global_batch_size=micro_batches * samples, seq_len=seq_len),
        budget_bytes=ranks.device.memory_bytes,
        num_stages=stages,
        num_micro_batches=micro_batches,
        micro_batch_samples=samples,
        schedule=schedule,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "gpt2"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_any_plan_costs_what_predict_says(name: str, stages: int, schedule: ScheduleName, micro_batches: int):
    """Random strategies and boundaries: step time, busy times and bytes of the arrays are those of the plan."""
    rng = random.Random(f"{name} {stages} {schedule}")
    spec = model(name)
    given = setting(spec, "2x4xa100-sxm-40g", stages=stages, micro_batches=micro_batches, samples=8, schedule=schedule)
    candidates = strategies(SPACES["full"], given.stage_devices)
    problem = build_problem(given, candidates)
    for _ in range(12):
        chosen = [rng.choice(np.flatnonzero(np.isfinite(row)).tolist()) for row in problem.forward_s]
        if spec.tied_embedding:
            shared = np.flatnonzero(np.isfinite(problem.forward_s[0] + problem.forward_s[-1])).tolist()
            chosen[0] = chosen[-1] = rng.choice(shared)
        cuts = sorted(rng.sample(range(1, len(spec.layers)), stages - 1))
        bounds = (0, *cuts, len(spec.layers))
        plan = by_hand(
            spec,
            given.cluster,
            [candidates[column] for column in chosen],
            batch=8 * micro_batches,
            seq_len=64,
            sizes=[high - low for low, high in pairwise(bounds)],
            micro_batches=micro_batches,
            schedule=schedule,
        )
        priced, predicted = price(problem, bounds, tuple(chosen)), predict(plan)
        assert priced.objective_s == pytest.approx(predicted.step_s, rel=1e-12)
        assert priced.stage_bytes == tuple(stage.bound_bytes for stage in predicted.stages)
        for stage in predicted.stages:
            assert stage.bound_bytes >= stage.peak_bytes
            is_full = stage.in_flight == micro_batches
            if micro_batches == 1 or not is_full:
                assert stage.bound_bytes == stage.peak_bytes
        for index, stage in enumerate(predicted.stages):
            assert priced.stage_forward_s[index] == pytest.approx(stage.micro_batch.forward.total_s, rel=1e-12)
            assert priced.stage_backward_s[index] == pytest.approx(stage.micro_batch.backward.total_s, rel=1e-12)
            assert priced.stage_step_s[index] == pytest.approx(stage.step.total_s, rel=1e-12)


@pytest.mark.parametrize("samples", [1, 2, 6, 8])
def test_what_is_illegal_is_infinite(samples: int):
    spec = model("tiny-llama")  # 2 KV heads: tp 4 and 8 are for the ends only
    given = setting(spec, "8xcpu", stages=1, micro_batches=2, samples=samples)
    candidates = tuple(s for s in strategies(SPACES["full"], 8) if s.recompute == "none")
    problem = build_problem(given, candidates)
    for layer, row in zip(spec.layers, problem.forward_s, strict=True):
        legal = [why_illegal(layer, strategy, samples) is None for strategy in candidates]
        assert np.isfinite(row).tolist() == legal
    for name in ("backward_s", "step_s", "states_bytes", "act_bytes", "transient_bytes", "freed_bytes"):
        assert (np.isfinite(getattr(problem, name)) == np.isfinite(problem.forward_s)).all(), name


def test_equal_layers_have_equal_rows_and_the_budget_is_everywhere():
    given = setting(cut(model("tiny-gpt2"), 7), "8xcpu", stages=2, micro_batches=4, samples=8)
    problem = build_problem(given, strategies(SPACES["base"], 4))
    assert problem.num_layers == 9
    assert (problem.forward_s[1:-1] == problem.forward_s[1]).all()
    assert problem.budget_bytes.tolist() == [given.budget_bytes] * 2
    assert problem.in_flight.tolist() == [2, 1]
    assert problem.tied


@pytest.mark.parametrize(("schedule", "micro_batches"), [("1f1b", 4), ("1f1b", 1), ("gpipe", 4), ("gpipe", 1)])
def test_what_layers_free(schedule: ScheduleName, micro_batches: int):
    """Activations; with one pass less the gradients that come meanwhile; nothing where several passes make them."""
    given = setting(model("tiny-llama"), "8xcpu", stages=2, micro_batches=micro_batches, samples=8, schedule=schedule)
    problem = build_problem(given, strategies(SPACES["base"], 4))
    if micro_batches == 1:
        assert problem.freed_bytes is not None
        assert (problem.freed_bytes <= problem.act_bytes).all()
        assert (problem.freed_bytes[np.isfinite(problem.act_bytes)] < 0).any()
    elif schedule == "gpipe":
        assert problem.freed_bytes is None
    else:
        assert problem.freed_bytes is not None
        assert (problem.freed_bytes == problem.act_bytes).all()
