"""What a user's own runs say of predictions: factors that make them fit, from few runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshwright.spec.base import PositiveInt, Spec

MOST_FACTOR = 10.0  # beyond it, either way, the runs are not what was predicted
Factor = Annotated[float, Field(ge=1 / MOST_FACTOR, le=MOST_FACTOR)]
Spread = Annotated[float, Field(ge=0, le=1e3)]


class Calibration(Spec):
    """Measured over predicted, as medians of `num_runs` runs on one kind of device.

    `compute_factor` and `communication_factor` scale seconds (equal where there are too few runs to tell them apart),
    `memory_factor` bytes; `time_spread_share` and `memory_spread_share` are the largest relative deviations from them.
    """

    schema_version: Literal[1] = 1
    device: str
    num_runs: PositiveInt
    compute_factor: Factor
    communication_factor: Factor
    memory_factor: Factor
    time_spread_share: Spread
    memory_spread_share: Spread
