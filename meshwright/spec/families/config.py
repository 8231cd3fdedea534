"""Typed access to a `config.json`: every wrong or missing field is one line that names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from meshwright.errors import UserError
from meshwright.files import shorten
from meshwright.spec.parts import LARGEST_SIZE, MlpSpec

LARGEST_NUMBER = 1e18
ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    # Three names of the tanh approximation.
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
}
_FEWEST_CLASSES = 2  # one label is a regression, with another loss


class Config:
    """The fields of one `config.json`. `where` names the file in error lines.

    A field that is absent or null takes the reader's default, or is an error when there is none.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self.where = where

    def error(self, field: str, problem: str) -> UserError:
        """Return (not raise) the error line about `field`."""
        return UserError(f"{self.where}: {field}: {problem}")

    def get(self, field: str) -> Any:
        """Return the raw value of `field`, None when absent."""
        return self._fields.get(field)

    def is_null(self, field: str) -> bool:
        """Return whether `field` is there and null, where that means something else than absent."""
        return field in self._fields and self._fields[field] is None

    def values(self) -> Collection[Any]:
        """Return all raw values."""
        return self._fields.values()

    def count(self, field: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
        """Return a positive whole number up to `most`."""
        return self._counted(field, self._value(field, default), most)

    def counts(self, field: str, *, most: int = LARGEST_SIZE) -> tuple[int, ...]:
        """Return a list of at least one positive whole number, each up to `most`."""
        value = self._value(field, None)
        if not isinstance(value, list) or not value:
            given = "an empty list" if value == [] else shorten(value)
            raise self.error(field, f"must be a list of positive whole numbers, not {given}")
        return tuple(self._counted(field, entry, most) for entry in cast("list[Any]", value))

    def side(self, field: str) -> int:
        """Return the side of a square: one number, or height and width that agree."""
        if not isinstance(self.get(field), list):
            return self.count(field)
        sides = self.counts(field)
        if len(sides) != 2 or sides[0] != sides[1]:  # noqa: PLR2004 height and width
            raise self.error(field, f"must be square: one number, or the same twice, not {list(sides)}")
        return sides[0]

    def number(self, field: str, default: float | None = None) -> float:
        """Return a positive number up to LARGEST_NUMBER, and so finite."""
        value = self._value(field, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not value > 0:  # so for NaN too
            raise self.error(field, f"must be a positive number, not {shorten(value)}")
        if value > LARGEST_NUMBER:
            raise self.error(field, f"must be at most {LARGEST_NUMBER:g}, not {shorten(value)}")
        return float(value)

    def flag(self, field: str, *, default: bool) -> bool:
        """Return a true or false."""
        value = self._value(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {shorten(value)}")
        return value

    def choice(self, field: str, allowed: Mapping[str, str], default: str) -> str:
        """Return what the text in `field` means according to `allowed`."""
        value = self._value(field, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(field, f"{shorten(value)} is not supported; allowed: {', '.join(allowed)}")
        return allowed[value]

    def architecture(self, allowed: Mapping[str, str], default: str) -> str:
        """Return what the one class in `architectures` means according to `allowed`."""
        value = self.get("architectures")
        if value is None or value == []:
            return default
        names = cast("list[Any]", value) if isinstance(value, list) else [value]
        if len(names) != 1 or not isinstance(names[0], str) or names[0] not in allowed:
            shown = ", ".join(str(name) for name in names)
            raise self.error("architectures", f"{shorten(shown)} is not supported; allowed: {', '.join(allowed)}")
        return allowed[names[0]]

    def num_classes(self) -> int:
        """Return the classes of a classifier: the entries of `id2label`, or `num_labels`, or 2."""
        self.refuse_unless("problem_type", ["single_label_classification"], "another loss than cross-entropy")
        labels = self.get("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise self.error("id2label", f"must be an object, not {shorten(labels)}")
        named = len(cast("dict[str, Any]", labels)) if labels else None
        count = self.count("num_labels", named or _FEWEST_CLASSES)
        if named is not None and named != count:
            raise self.error("num_labels", f"{count}, but id2label has {named} entries")
        if count < _FEWEST_CLASSES:
            raise self.error("id2label" if named else "num_labels", "one label is a regression, which is not supported")
        return count

    def section(self, field: str) -> Config:
        """Return the object in `field` as a Config of its own; an empty one when absent."""
        value = self.get(field)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, not {shorten(value)}")
        return Config(cast("dict[str, Any]", value), f"{self.where}: {field}")

    def refuse_unless(self, field: str, allowed: Collection[object], why: str) -> None:
        """Raise unless `field` is absent, null or one of `allowed`, since anything else changes the mathematics."""
        value = self.get(field)
        if value is not None and value not in allowed:
            choices = " or ".join(str(choice).lower() for choice in allowed) or "leave it out"
            raise self.error(field, f"{shorten(value)} is not supported ({why}); allowed: {choices}")

    def divisible(self, field: str, total: int, parts_field: str, parts: int) -> int:
        """Return total / parts, the values of `field` and `parts_field`, or raise."""
        if total % parts:
            raise self.error(parts_field, f"{parts} does not divide {field} ({total})")
        return total // parts

    def mlp(self, ffn_size: int, act_field: str, *, default_act: str, gated: bool, bias: bool) -> MlpSpec:
        """Return the feed-forward part whose activation `act_field` names."""
        activation = self.choice(act_field, ACTIVATIONS, default_act)
        # Through plain data, because only validation narrows `str` to the names that MlpSpec knows.
        data = {"ffn_size": ffn_size, "gated": gated, "activation": activation, "bias": bias}
        return MlpSpec.model_validate(data)

    def _counted(self, field: str, value: Any, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, f"must be a positive whole number, not {shorten(value)}")
        if value > most:
            raise self.error(field, f"must be at most {most}, not {shorten(value)}")
        return value

    def _value(self, field: str, default: object) -> Any:
        value = self._fields.get(field)
        if value is not None:
            return value
        if default is None:
            raise self.error(field, "required, but missing")
        return default
