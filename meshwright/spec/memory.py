"""Constants of memory that no shape gives: what an allocator, a device and its libraries take, and how far off we are.

`data/memory.yaml` holds the values, on which published runs they were fitted, and the quantiles of what those runs
used above the prediction.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from meshwright.errors import UserError
from meshwright.files import from_data
from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from meshwright.spec.run import FrameworkName, MemoryKind
from meshwright.spec.shipped import read_shipped, shipped

CONFIDENCES = (0.5, 0.75, 0.9, 0.95, 0.99)
USUAL_CONFIDENCE = 0.95


class Excess(Spec):
    """Quantiles, at `CONFIDENCES`, of measured over predicted bytes - 1 in published runs of one kind of peak."""

    kind: MemoryKind
    framework: FrameworkName | None = None
    num_runs: PositiveInt
    quantiles: tuple[float, ...]


class MemoryConstants(Spec):
    """`workspace_bytes` are allocated by libraries (cuBLAS, attention); `reserved_factor` is reserved over allocated;

    `context_bytes` a device has in use before anything is allocated, `communicator_bytes` for each group that a rank
    talks in.
    """

    workspace_bytes: NonNegativeInt
    reserved_factor: Annotated[float, Field(ge=1)]
    context_bytes: NonNegativeInt
    communicator_bytes: NonNegativeInt
    excess: tuple[Excess, ...]
    source: str
    fitted_on: tuple[str, ...]


@cache
def shipped_memory() -> MemoryConstants:
    """Return the constants of memory that the package ships."""
    return from_data(MemoryConstants, read_shipped(shipped("memory.yaml")), where="memory.yaml")


def margin_bytes(
    predicted_bytes: NonNegativeFloat,
    kind: MemoryKind,
    framework: FrameworkName,
    confidence: float,
    constants: MemoryConstants | None = None,
) -> float:
    """Return what to leave free above `predicted_bytes` so that a run fits with `confidence`.

    It is the quantile of what published runs of that framework and kind used above their prediction, of all
    frameworks' where there are none, and never negative.
    """
    if not CONFIDENCES[0] <= confidence <= CONFIDENCES[-1]:
        raise UserError(f"confidence: {confidence:g} is not between {CONFIDENCES[0]} and {CONFIDENCES[-1]}")
    found = (constants or shipped_memory()).excess
    best = [one for one in found if one.kind == kind and one.framework == framework]
    best += [one for one in found if one.kind == kind and one.framework is None]
    best += [one for one in found if one.framework is None]
    return predicted_bytes * max(0.0, _between(best[0].quantiles, confidence)) if best else 0.0


def _between(quantiles: tuple[float, ...], confidence: float) -> float:
    """Return the quantile at `confidence`, on straight lines between the known ones."""
    known = list(zip(CONFIDENCES, quantiles, strict=True))
    for (low, at_low), (high, at_high) in pairwise(known):
        if confidence <= high:
            return at_low + (at_high - at_low) * (confidence - low) / (high - low)
    return known[-1][1]
