"""What a user insists on for all blocks of a plan: "tp=8", "zero=3 pp=4", "recompute=none m=16"."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.spec.strategy import Strategy

_NUMBERS = {
    "tp": "tp",
    "dp": "dp",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "zero": "zero_stage",
    "pp": "num_stages",
    "m": "num_micro_batches",
}
_CHOICES = {"recompute": ("none", "full"), "inner": ("tp", "dp")}
_ABOUT = "write such as 'tp=8' or 'pp=4 zero=3 recompute=full'; names are " + ", ".join((*_NUMBERS, *_CHOICES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """None: anything. `dp` counts all data-parallel ranks, replicated or sharded."""

    text: str = ""
    tp: int | None = None
    dp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    zero_stage: int | None = None
    recompute: str | None = None
    inner: str | None = None
    num_stages: int | None = None
    num_micro_batches: int | None = None

    def allows(self, strategy: Strategy) -> bool:
        """Return whether a block may use `strategy`."""
        names = ("tp", "dp", "dp_replicate", "dp_shard", "zero_stage", "recompute", "inner")
        return all(getattr(self, name) in (None, getattr(strategy, name)) for name in names)


def parse_wanted(text: str) -> Wanted:
    """Return what `text` insists on. Raises UserError in one line."""
    found: dict[str, int | str] = {}
    for part in text.replace(",", " ").split():
        name, sign, value = part.partition("=")
        if not sign or name not in (*_NUMBERS, *_CHOICES):
            raise UserError(f"why-not: {part!r} is not understood; {_ABOUT}")
        field = _NUMBERS.get(name, name)
        if field in found:
            raise UserError(f"why-not: {name} is given twice")
        found[field] = _number(name, value) if name in _NUMBERS else _choice(name, value)
    if not found:
        raise UserError(f"why-not: nothing is asked; {_ABOUT}")
    return Wanted(text=text, **found)  # type: ignore[arg-type]


def _number(name: str, value: str) -> int:
    least = 0 if name == "zero" else 1
    if not value.isascii() or not value.isdigit() or len(value) > 9 or int(value) < least:  # noqa: PLR2004 a device count
        raise UserError(f"why-not: {name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def _choice(name: str, value: str) -> str:
    if value not in _CHOICES[name]:
        raise UserError(f"why-not: {name} must be {' or '.join(_CHOICES[name])}, not {value!r}")
    return value
