"""The base of every spec type: frozen, keyword-only, strict about types, keys and finite numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field

from meshwright.errors import UserError

Dtype = Literal["fp32", "bf16"]
LONGEST_SEQ = 1 << 26  # tokens; the longest contexts published are 10 million
LARGEST_INT = (1 << 63) - 1  # of the integers that arrays hold
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]

_DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "int64": 8, "bool": 1}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class _FrozenMeta(type(BaseModel)):
    """Tells type checkers what `model_config` tells pydantic: specs are frozen, and so hashable."""


class Spec(BaseModel, metaclass=_FrozenMeta):
    """A frozen value. Making one from bad data raises; nothing is coerced or ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __hash__(self) -> int:
        """Return the hash of all fields; it is kept, because specs are the keys of every cache of the cost model."""
        return self._hash

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, and without what was derived from the old ones (cached properties)."""
        copied = super().model_copy(update=update, deep=deep)
        values = vars(copied)
        for name in values.keys() - type(self).model_fields.keys():
            del values[name]
        return copied

    @cached_property
    def _hash(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in type(self).model_fields)))


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype`: the only place that knows."""
    return _DTYPE_BYTES[dtype]


def divide(total: int, parts: int, what: str) -> int:
    """Return total / parts, or raise UserError when `parts` does not divide `total`."""
    if parts < 1 or total % parts:
        raise UserError(f"{what}: {total} is not divisible by {parts}")
    return total // parts
