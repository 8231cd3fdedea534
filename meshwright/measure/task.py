"""One thing to measure: what it is, how to say so, and how to do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.spec.profile import Key, Sample

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`blank` says what is measured, its figures are placeholders; `measure` is collective over all ranks."""

    blank: Sample
    label: str
    measure: Callable[[], Figures]

    @property
    def key(self) -> Key:
        return self.blank.key

    def run(self) -> Sample:
        return self.blank.model_copy(update=dict(self.measure()))


def ladder(smallest: int, largest: int, ratio: int) -> tuple[int, ...]:
    """Return sizes from `smallest` to `largest`, both included, each at most `ratio` times the one before."""
    sizes = [smallest]
    while sizes[-1] * ratio < largest:
        sizes.append(sizes[-1] * ratio)
    return (*sizes, largest) if largest > sizes[-1] else tuple(sizes)
