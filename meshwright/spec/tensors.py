"""Lengths of a sample, the tensors that layers hand on, and their parameters: shapes that a model names."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from pydantic import model_validator

from meshwright.spec.base import NonNegativeInt, PositiveInt, Spec, divide

EXPERTS = "mlp.experts."
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


class ParameterSpec(Spec):
    """One parameter of a layer. `tp_dim` None: every tensor-parallel rank holds all of it.

    `is_looked_up`: its rows are looked up or added, not multiplied with. `acts_on_split` marks a replicated parameter
    that works on split activations (a norm over heads), so that its gradient must be summed over the tensor-parallel
    ranks.
    """

    name: str
    shape: tuple[PositiveInt, ...]
    tp_dim: NonNegativeInt | None = None
    is_looked_up: bool = False
    acts_on_split: bool = False

    @model_validator(mode="after")
    def _check(self) -> ParameterSpec:
        if not self.shape:
            raise ValueError(f"shape of {self.name} is empty; give at least one size")
        if self.tp_dim is not None and self.tp_dim >= len(self.shape):
            raise ValueError(f"tp_dim ({self.tp_dim}) of {self.name} must be below its {len(self.shape)} dimensions")
        return self

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_product(self) -> bool:
        """Whether tokens are multiplied with it."""
        return len(self.shape) > 1 and not self.is_looked_up

    @property
    def is_of_experts(self) -> bool:
        """Whether this is the weight of all routed experts, which expert parallelism splits by expert."""
        return self.name.startswith(EXPERTS)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of `tp` ranks holds."""
        if self.tp_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.tp_dim] = divide(shape[self.tp_dim], tp, f"{self.name}: dimension {self.tp_dim} over tp")
        return tuple(shape)
