"""What a user's own runs say of predictions: factors that make them fit, from few runs."""

from __future__ import annotations

from typing import Literal

from meshwright.spec.base import PositiveFloat, PositiveInt, Spec


class Calibration(Spec):
    """Measured over predicted, as medians of `num_runs` runs on one kind of device.

    `compute_factor` and `communication_factor` scale seconds (equal where there are too few runs to tell them apart),
    `memory_factor` bytes; `time_spread_share` and `memory_spread_share` are the largest relative deviations from them.
    """

    schema_version: Literal[1] = 1
    device: str
    num_runs: PositiveInt
    compute_factor: PositiveFloat
    communication_factor: PositiveFloat
    memory_factor: PositiveFloat
    time_spread_share: float
    memory_spread_share: float
