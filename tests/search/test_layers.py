"""The one-stage solver against enumeration and against the shared solver instances."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from meshwright.search import layers
from meshwright.search.layers import frontier, solve

INSTANCES = sorted(
    path
    for path in (Path(__file__).resolve().parents[3] / "shared" / "solver" / "dev").glob("*.npz")
    if not path.name.startswith("pipe_")
)


def random_case(seed: int, *, freed: bool = False, made: bool = False) -> dict[str, np.ndarray]:
    """Few layers, integer-valued times in every second case so that sums tie."""
    rng = np.random.default_rng(seed)
    layers, strategies = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    high = 4 if seed % 2 else 1000

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(0, high, shape).astype(float)

    case = {
        "layer_s": draw(layers, strategies),
        "layer_bytes": draw(layers, strategies),
        "switch_s": draw(layers, strategies, strategies) if seed % 3 else draw(strategies, strategies),
        "transient_bytes": draw(layers, strategies) * float(rng.integers(0, 3)),
    }
    if freed:
        case["transient_bytes"] = draw(layers, strategies) * float(rng.integers(1, 4))
        case["freed_bytes"] = np.floor(draw(layers, strategies) * float(rng.choice([0.1, 0.5, 1.0, 2.0])))
    if made:  # gradients that come while activations go
        case["freed_bytes"] = case["freed_bytes"] - draw(layers, strategies)
    if seed % 3 == 2:  # switch costs by layout group
        group = rng.integers(0, 2, strategies)
        case["switch_s"] = draw(2, 2)[np.ix_(group, group)]
    case["layer_s"][rng.random((layers, strategies)) < 0.1] = np.inf
    return case


def all_plans(case: dict[str, np.ndarray]) -> list[tuple[float, int, tuple[int, ...], float]]:
    """Return (time, changes, strategies, memory) of every allowed plan."""
    layers, strategies = case["layer_s"].shape
    plans = []
    for plan in itertools.product(range(strategies), repeat=layers):
        time = memory = transient = gone = 0.0
        for layer, s in reversed(list(enumerate(plan))):  # backward: what later layers freed is gone
            transient = max(transient, case["transient_bytes"][layer, s] - gone)
            gone += case["freed_bytes"][layer, s] if "freed_bytes" in case else 0.0
        for layer, s in enumerate(plan):
            time += case["layer_s"][layer, s]
            memory += case["layer_bytes"][layer, s]
            if layer:
                table = case["switch_s"]
                time += (table[layer] if table.ndim == 3 else table)[plan[layer - 1], s]
        changes = sum(a != b for a, b in itertools.pairwise(plan))
        if np.isfinite(time):
            plans.append((time, changes, plan, memory + transient))
    return plans


@pytest.mark.parametrize(("freed", "made"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(150))
def test_solve_equals_enumeration_with_its_ties(seed: int, *, freed: bool, made: bool) -> None:
    case = random_case(seed, freed=freed, made=made)
    plans = all_plans(case)
    memories = sorted({plan[3] for plan in plans})
    for budget in [*memories[:: max(1, len(memories) // 4)], -1.0, 1e9]:
        fitting = [plan for plan in plans if plan[3] <= budget]
        found = solve(**case, budget_bytes=budget)
        if not fitting:
            assert found is None
            continue
        time, _, strategies, memory = min(fitting)
        assert found is not None
        assert (found.strategies, found.time_s) == (strategies, time)
        assert found.memory_bytes == memory


def plain_time(case: dict[str, np.ndarray], budget: float) -> float | None:
    """Return the least time, from labels (time, bytes, largest moment so far) of the first layers, thinned slowly."""
    seconds, held, moment, freed, switch = (case[name] for name in CASE)
    columns = range(seconds.shape[1])
    labels = [[(seconds[0, s], held[0, s], moment[0, s])] for s in columns]
    for layer in range(1, len(seconds)):
        longer = [
            [
                (
                    time + seconds[layer, s] + switch[r, s],
                    used + held[layer, s],
                    max(high - freed[layer, s], moment[layer, s]),
                )
                for r in columns
                for time, used, high in labels[r]
                if used + held[layer, s] <= budget
            ]
            for s in columns
        ]
        labels = [thinned(some) for some in longer]
    return min((time for some in labels for time, used, high in some if used + high <= budget), default=None)


def thinned(labels: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    kept: list[tuple[float, float, float]] = []
    for time, used, high in sorted(labels):
        if not any(other[1] <= used and other[1] + other[2] <= used + high for other in kept):
            kept.append((time, used, high))
    return kept


CASE = ("layer_s", "layer_bytes", "transient_bytes", "freed_bytes", "switch_s")


@pytest.mark.parametrize("seed", range(60))
def test_peaks_of_more_layers_equal_those_of_a_plain_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    count, columns = int(rng.integers(4, 10)), int(rng.integers(2, 5))
    kinds = [0, *[1] * (count - 2), 2] if seed % 2 else rng.integers(0, 3, count)
    highs = (60, 40, int(rng.choice([60, 200])), int(rng.choice([5, 20, 60])))
    tables = [rng.integers(0, high, (3, columns)).astype(float)[kinds] for high in highs]
    case = dict(zip(CASE, [*tables, rng.integers(0, 30, (columns, columns)).astype(float)], strict=True))
    if seed % 3 == 0:  # no labels are few
        for name in ("_FEW_MOVES", "_FEW_PAIRS", "_FEW_LABELS"):
            monkeypatch.setattr(layers, name, 0)
    least = case["layer_bytes"].min(axis=1).sum()
    most = case["layer_bytes"].max(axis=1).sum() + case["transient_bytes"].max()
    for part in (0.15, 0.4, 0.7):
        budget = np.floor(least + (most - least) * part)
        found = solve(**case, budget_bytes=budget)
        assert (None if found is None else found.time_s) == plain_time(case, budget)
        assert found is None or found.memory_bytes <= budget


@pytest.mark.parametrize("seed", range(40))
def test_frontier_equals_enumeration(seed: int) -> None:
    case = random_case(seed)
    plans = sorted((plan[3], plan[0]) for plan in all_plans(case))
    expected: list[tuple[float, float]] = []
    for memory, time in plans:
        if not expected or time < expected[-1][1]:
            expected.append((memory, time))
    found = frontier(**case)
    assert list(zip(found.memory_bytes.tolist(), found.time_s.tolist(), strict=True)) == expected
    loose = frontier(**case, epsilon=0.1)
    for memory, time in expected:
        assert min(loose.time_s[loose.memory_bytes <= memory]) <= time * 1.1 * (1 + 1e-12)


@pytest.mark.skipif(not INSTANCES, reason="the shared solver instances are absent")
@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.stem)
def test_solver_instances(path: Path) -> None:
    data = np.load(path)
    for k, expected in enumerate(data["opt_raw_cost_s"]):
        found = solve(
            layer_s=data["intra_s"],
            layer_bytes=data["v_mb_raw"],
            switch_s=data["inter_s"],
            budget_bytes=float(data["max_mem_mb"] - data["other_mem_mb_raw"][k]),
        )
        cost_s = np.inf if found is None else found.time_s + float(data["other_time_s"][k])
        assert cost_s == pytest.approx(expected, rel=1e-9)


def test_decimal_bytes_meet_the_budget_exactly() -> None:
    found = solve(layer_s=[[1.0]] * 3, layer_bytes=[[0.1]] * 3, switch_s=[[0.0]], budget_bytes=0.3)
    assert found is not None


def test_nothing_allowed() -> None:
    assert solve(layer_s=[[np.inf]], layer_bytes=[[1.0]], switch_s=[[0.0]], budget_bytes=9.0) is None
