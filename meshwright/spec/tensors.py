"""Lengths of a sample and the tensors that layers hand on: shapes that a model names and a job fills in."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from meshwright.spec.base import PositiveInt, Spec

Length = Literal["seq", "target_seq"] | PositiveInt


class Lengths(NamedTuple):
    """Tokens of one sample: of its text (an encoder's source), and of a decoder's targets (0: there is none)."""

    seq: int
    target_seq: int = 0

    def of(self, length: Length) -> int:
        """Return `length` in tokens."""
        match length:
            case "seq":
                return self.seq
            case "target_seq":
                return self.target_seq
            case _:
                return length


class TensorSpec(Spec):
    """A tensor that one layer hands to the next: its shape for one sample.

    `shape` entries are sizes, or the name of a length that the job fixes. `dtype` "param" is the dtype that
    layers compute in.
    """

    name: str
    shape: tuple[Length, ...]
    dtype: Literal["param", "fp32", "int64", "bool"] = "param"

    def resolve(self, lengths: Lengths) -> tuple[int, ...]:
        """Return the shape with named lengths filled in."""
        return tuple(lengths.of(size) for size in self.shape)

    def num_elements(self, lengths: Lengths) -> int:
        """Return the elements of one sample."""
        return prod(self.resolve(lengths))
