"""Where two models differ, in the words of a model file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from meshwright.files import shorten
from meshwright.spec.model import ModelSpec

# What a model is called, and how long a job's samples are when it does not say, changes no weight and no mathematics.
_DOES_NOT_COUNT = ("name", "usual_seq_len", "usual_target_seq_len")


def first_difference(one: ModelSpec, other: ModelSpec, *, heads_count: bool = True) -> str | None:
    """Return the first field in which two models differ, with both values (`one`'s first), or None.

    Without `heads_count` the last layers may differ, and with them whether weights are tied.
    """
    fields = [_fields(model, heads_count=heads_count) for model in (one, other)]
    found = next(_differences(fields[0], fields[1], ""), None)
    return None if found is None else f"{found[0]}: {_shown(found[1])}, not {_shown(found[2])}"


def _fields(model: ModelSpec, *, heads_count: bool) -> dict[str, Any]:
    data = model.model_dump(mode="json", exclude=set(_DOES_NOT_COUNT))
    if not heads_count:
        del data["tied_embedding"]
        data["groups"] = data["groups"][:-1]
    # What differs in kind is said first: a reader then knows why the sizes do.
    return {"family": data.pop("family"), **data}


def _differences(one: Any, other: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        ones, others = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        if ones.get("kind") != others.get("kind"):
            yield f"{where}.kind", ones.get("kind"), others.get("kind")
            return
        for name in {**ones, **others}:
            yield from _differences(ones.get(name), others.get(name), f"{where}.{name}" if where else name)
    elif isinstance(one, list) and isinstance(other, list):
        mine, theirs = cast("list[Any]", one), cast("list[Any]", other)
        for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
            yield from _differences(left, right, f"{where}[{index}]")
        if len(mine) != len(theirs):
            yield f"{where}: entries", len(mine), len(theirs)
    elif one != other:
        yield where, one, other


def _shown(value: Any) -> str:
    return "none" if value is None else str(value) if isinstance(value, str) else shorten(value)
