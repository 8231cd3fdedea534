"""The base of every spec type: frozen, keyword-only, strict about types, keys and finite numbers."""

from __future__ import annotations

from typing import Annotated, Literal, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field

from meshwright.errors import UserError

Dtype = Literal["fp32", "bf16"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]

_DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "int64": 8, "bool": 1}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class _FrozenMeta(type(BaseModel)):
    """Tells type checkers what `model_config` tells pydantic: specs are frozen, and so hashable."""


class Spec(BaseModel, metaclass=_FrozenMeta):
    """A frozen value. Making one from bad data raises; nothing is coerced or ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype`: the only place that knows."""
    return _DTYPE_BYTES[dtype]


def divide(total: int, parts: int, what: str) -> int:
    """Return total / parts, or raise UserError when `parts` does not divide `total`."""
    if parts < 1 or total % parts:
        raise UserError(f"{what}: {total} is not divisible by {parts}")
    return total // parts
