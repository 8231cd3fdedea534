"""The least peak of a stage's layers equals the least of all plans, also where gradients come while activations go."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.search.peaks import Peaks, least_peak


@pytest.mark.parametrize("block", range(4))
def test_least_peak_equals_enumeration(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        rng = np.random.default_rng(seed)
        layers, strategies = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        shape = (layers, strategies)
        memory, transient, freed = rng.integers(0, 50, shape), rng.integers(0, 80, shape), rng.integers(-40, 40, shape)
        peaks = Peaks(memory=memory, transient=transient, freed=freed)
        allowed = rng.random(shape) < 0.8
        allowed[np.arange(layers), rng.integers(0, strategies, layers)] = True
        plans = itertools.product(*(np.flatnonzero(row).tolist() for row in allowed))
        assert least_peak(peaks, allowed) == min(peaks.of_plan(np.array(plan))[0] for plan in plans)
