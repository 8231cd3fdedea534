"""How far predictions were from published runs of the same class: framework and kind of device.

Errors are |predicted / measured - 1| with the constants fitted without the runs' own source (`data/accuracy.yaml`).
"""

from __future__ import annotations

from functools import cache

from meshwright.files import from_data
from meshwright.spec.base import NonNegativeFloat, PositiveInt, Spec
from meshwright.spec.constants import shipped_constants
from meshwright.spec.model import BlockLayer
from meshwright.spec.run import FrameworkName, RunSpec
from meshwright.spec.shipped import read_shipped, shipped


class Errors(Spec):
    """Median and 9th decile of the error of a step's seconds over `num_runs` published runs, and which these were."""

    framework: FrameworkName | None = None
    is_datasheet: bool = False
    median: NonNegativeFloat
    p90: NonNegativeFloat
    num_runs: PositiveInt
    of: str


class _Known(Spec):
    errors: tuple[Errors, ...]


def known_errors(run: RunSpec) -> Errors | None:
    """Return the errors of published runs like `run`: of its framework, or of devices with datasheet figures only."""
    if any(isinstance(group.layer, BlockLayer) and group.layer.mlp.experts for group in run.model.groups):
        return None  # the runs were of dense models
    is_datasheet = not shipped_constants().is_fitted(run.cluster.device)
    found = [one for one in shipped_errors() if one.is_datasheet == is_datasheet]
    same = [one for one in found if one.framework == run.framework]
    general = [one for one in found if one.framework is None]
    return next(iter([*same, *general]), None)


@cache
def shipped_errors() -> tuple[Errors, ...]:
    """Return the errors that the package ships."""
    return from_data(_Known, read_shipped(shipped("accuracy.yaml")), where="accuracy.yaml").errors
