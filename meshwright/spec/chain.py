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
    for index, group in enumerate(groups):
        layer = group.layer
        if group.num_layers > 1 and (reason := _differs(hands_on(layer), _taken_after(layer, layer))):
            return f"groups[{index}]: {layer.kind} cannot follow itself {group.num_layers} times: {reason}"
    for (before, one), (after, other) in pairwise(enumerate(groups)):
        if reason := _differs(hands_on(one.layer), _taken_after(one.layer, other.layer)):
            return f"groups[{before}] ({one.layer.kind}) and groups[{after}] ({other.layer.kind}): {reason}"
    return None


def takes(layer: AnyLayer, *, starts_decoder: bool, has_target: bool) -> Iterator[TensorSpec]:
    """Yield what a layer after the first takes, hidden states first.

    `starts_decoder`: what comes before are an encoder's states, which become the source, and the embedded targets.
    `has_target`: embedded targets travel through an encoder's block.
    """
    match layer:
        case MergeLayer():
            yield TensorSpec(name="hidden", shape=(layer.grid**2, layer.hidden_size))
        case CustomLayer():
            yield TensorSpec(name="hidden", shape=(layer.length, layer.hidden_size))
            yield from layer.carries
        case BlockLayer() if starts_decoder:
            yield TensorSpec(name="hidden", shape=("seq", layer.hidden_size))
            yield target_states(layer.hidden_size)
        case BlockLayer():
            yield TensorSpec(name="hidden", shape=(layer.length, layer.hidden_size))
            if layer.cross_attention is not None:
                yield source_states(layer.hidden_size)
            elif has_target:
                yield target_states(layer.hidden_size)
            if layer.attention.relative is not None and not layer.attention.relative.owns_table:
                yield relative_table(layer.attention)
        case _:
            yield TensorSpec(name="hidden", shape=(getattr(layer, "length", "seq"), layer.hidden_size))


def _taken_after(before: AnyLayer, layer: AnyLayer) -> tuple[TensorSpec, ...]:
    starts = _has_source(layer) and not _has_source(before)
    has_target = any(tensor.name == "target" for tensor in hands_on(before))
    return tuple(takes(layer, starts_decoder=starts, has_target=has_target))


def _has_source(layer: AnyLayer) -> bool:
    return isinstance(layer, BlockLayer) and layer.cross_attention is not None


def _differs(handed: tuple[TensorSpec, ...], taken: tuple[TensorSpec, ...]) -> str | None:
    if handed == taken:
        return None
    return f"{_show(handed)} is handed on, but {_show(taken)} taken; both must agree in hidden_size, length and carries"


def _show(tensors: tuple[TensorSpec, ...]) -> str:
    return " and ".join(f"{tensor.name} {_sizes(tensor.shape)}" for tensor in tensors) or "nothing"


def _sizes(shape: tuple[Length, ...]) -> str:
    return " x ".join(str(size) for size in shape)
