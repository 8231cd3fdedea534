"""Whether the layers of a model follow each other: what one hands on is what the next one takes, by name and shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from meshwright.spec.model import (
    AnyLayer,
    BlockLayer,
    CustomLayer,
    LayerGroup,
    MergeLayer,
    hands_on,
    relative_table,
    source_states,
    target_states,
)
from meshwright.spec.tensors import Length, TensorSpec


def why_broken(groups: Sequence[LayerGroup]) -> str | None:
    """Return why layers do not follow each other, the two groups first, or None."""
    handed = {index: hands_on(group.layer) for index, group in enumerate(groups)}
    for index, group in enumerate(groups):
        if group.num_layers > 1:
            taken = tuple(_takes(group.layer, group.layer, handed[index]))
            if reason := _differs(handed[index], taken):
                return f"groups[{index}]: {group.layer.kind} cannot follow itself {group.num_layers} times: {reason}"
    for (before, one), (after, other) in pairwise(enumerate(groups)):
        taken = tuple(_takes(other.layer, one.layer, handed[before]))
        if reason := _differs(handed[before], taken):
            return f"groups[{before}] ({one.layer.kind}) and groups[{after}] ({other.layer.kind}): {reason}"
    return None


def _takes(layer: AnyLayer, before: AnyLayer, handed: tuple[TensorSpec, ...]) -> Iterator[TensorSpec]:
    """Yield what `layer` takes after `before`, which hands on `handed`."""
    match layer:
        case MergeLayer():
            yield TensorSpec(name="hidden", shape=(layer.grid**2, layer.hidden_size))
        case CustomLayer():
            yield TensorSpec(name="hidden", shape=(layer.length, layer.hidden_size))
            yield from layer.carries
        case BlockLayer() if layer.cross_attention is not None and not _is_decoder(before):
            # The encoder's states become the source, and the embedded targets the hidden states.
            yield TensorSpec(name="hidden", shape=("seq", layer.hidden_size))
            yield target_states(layer.hidden_size)
        case BlockLayer():
            yield TensorSpec(name="hidden", shape=(layer.length, layer.hidden_size))
            if layer.cross_attention is not None:
                yield source_states(layer.hidden_size)
            elif any(tensor.name == "target" for tensor in handed):
                yield target_states(layer.hidden_size)
            if layer.attention.relative is not None and not layer.attention.relative.owns_table:
                yield relative_table(layer.attention)
        case _:
            yield TensorSpec(name="hidden", shape=(getattr(layer, "length", "seq"), layer.hidden_size))


def _is_decoder(layer: AnyLayer) -> bool:
    return getattr(layer, "cross_attention", None) is not None


def _differs(handed: tuple[TensorSpec, ...], taken: tuple[TensorSpec, ...]) -> str | None:
    if handed == taken:
        return None
    return f"{_show(handed)} is handed on, but {_show(taken)} taken; both must agree in hidden_size, length and carries"


def _show(tensors: tuple[TensorSpec, ...]) -> str:
    return " and ".join(f"{tensor.name} {_sizes(tensor.shape)}" for tensor in tensors) or "nothing"


def _sizes(shape: tuple[Length, ...]) -> str:
    return " x ".join(str(size) for size in shape)
