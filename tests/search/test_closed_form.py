"""Small closed-form pipelines by labels of all ranges at once, against the general solver."""

import math

import numpy as np
import pytest

from meshwright.search import stages
from meshwright.search.additive import falling
from meshwright.search.closed_form import solve_closed_form
from meshwright.search.problem import StageChoice


def solved(seed: int, *, tight: float) -> StageChoice | None:
    rng = np.random.default_rng(seed)
    num_layers, num_strategies, num_stages = int(rng.integers(3, 9)), int(rng.integers(2, 5)), int(rng.integers(2, 4))
    shape = (num_layers, num_strategies)
    times = rng.integers(1, 12, shape).astype(float)
    times[rng.random(shape) < 0.1] = math.inf
    states = rng.integers(1, 9, shape).astype(float)
    return stages.solve(
        layer_s=times,
        states_bytes=states,
        act_bytes=rng.integers(0, 3, shape),
        switch_s=rng.integers(0, 4, (num_layers, num_strategies, num_strategies)),
        border_s=0,
        in_flight=np.arange(num_stages, 0, -1),
        budget_bytes=tight * states.mean() * num_layers / num_stages,
        num_micro_batches=int(rng.integers(1, 9)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_it_equals_the_general_solver(seed: int, monkeypatch: pytest.MonkeyPatch):
    tight = 0.7 + 0.02 * seed
    quick = solved(seed, tight=tight)
    monkeypatch.setattr(stages, "is_closed_form", lambda _: False)
    general = solved(seed, tight=tight)
    assert (quick is None) == (general is None)
    if quick is not None and general is not None:
        assert quick.objective_s == pytest.approx(general.objective_s, rel=1e-12)
        assert quick.gap == 0.0


def test_too_many_labels_leave_it_to_the_general_solver(monkeypatch: pytest.MonkeyPatch):
    quick = solved(3, tight=2.0)
    monkeypatch.setattr("meshwright.search.closed_form._MOST_LABELS", 0)
    calls: list[object] = []
    monkeypatch.setattr(stages, "solve_closed_form", lambda exact: calls.append(solve_closed_form(exact)))
    general = solved(3, tight=2.0)
    assert calls == [None]
    assert quick is not None
    assert general is not None
    assert quick.objective_s == pytest.approx(general.objective_s, rel=1e-12)


@pytest.mark.parametrize("scale", [1, 1 << 59])
def test_running_minima_start_afresh_with_each_group(scale: int):
    group = np.array([0, 0, 0, 1, 1, 30])
    values = np.array([4, 4, 3, 7, 2, 3], np.int64)
    values = np.where(values == 7, scale + 7, values)
    assert falling(group, values).tolist() == [0, 2, 3, 4, 5]
