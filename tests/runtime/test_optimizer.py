"""The learning rate of a step, and which parameters decay."""

from __future__ import annotations

from math import cos, pi

import pytest
import torch
from torch import nn

from meshwright.runtime.optimizer import learning_rate, make_optimizer, set_learning_rate
from meshwright.spec.job import AdamW

SETTINGS = AdamW(lr=1e-3, warmup_steps=10, final_lr_fraction=0.1)


def rates(settings: AdamW, num_steps: int) -> list[float]:
    return [learning_rate(settings, step, num_steps) for step in range(num_steps)]


def test_it_rises_linearly_then_follows_a_cosine():
    curve = rates(SETTINGS, 110)
    assert curve[:10] == pytest.approx([1e-3 * (step + 1) / 10 for step in range(10)])
    assert curve[10] == pytest.approx(1e-3)
    assert curve[10:] == sorted(curve[10:], reverse=True)
    for step in range(10, 110):
        expected = 1e-4 + (1e-3 - 1e-4) * (1 + cos(pi * (step - 10) / 100)) / 2
        assert curve[step] == pytest.approx(expected)
    assert curve[60] == pytest.approx((1e-3 + 1e-4) / 2), "half way"


def test_it_stays_at_its_final_value_beyond_the_plan():
    assert learning_rate(SETTINGS, 110, 110) == pytest.approx(1e-4)
    assert learning_rate(SETTINGS, 500, 110) == pytest.approx(1e-4)


def test_no_warm_up_starts_at_the_peak_and_warm_up_alone_never_falls():
    assert learning_rate(SETTINGS.model_copy(update={"warmup_steps": 0}), 0, 100) == 1e-3
    assert rates(SETTINGS, 5) == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4])
    constant = SETTINGS.model_copy(update={"warmup_steps": 0, "final_lr_fraction": 1.0})
    assert rates(constant, 20) == pytest.approx([1e-3] * 20)


def test_matrices_decay_and_the_rest_does_not():
    matrix, vector = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = make_optimizer([matrix, vector], SETTINGS)
    assert all({"step", "exp_avg", "exp_avg_sq"} == set(optimizer.state[p]) for p in (matrix, vector))
    set_learning_rate(optimizer, 0.5)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(matrix.data, torch.full((2, 2), 1 - 0.5 * SETTINGS.weight_decay))
    assert torch.equal(vector.data, torch.ones(2))
