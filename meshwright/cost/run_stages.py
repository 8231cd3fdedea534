"""Which layers a pipeline stage of a uniform run holds.

Blocks are split evenly where that goes. Otherwise, where embedding and head count as a block each and the sum divides,
the first and the last stage have one block less (Megatron's account_for_embedding/loss_in_pipeline_split, and the split
of BLOOM); else the first stages have one more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.spec.model import BlockLayer, LayerSpec, ModelSpec


class Stage(NamedTuple):
    """What one stage holds: blocks by shape with their count, and whether embedding and head."""

    blocks: tuple[tuple[BlockLayer, int], ...]
    is_first: bool
    is_last: bool


@lru_cache(maxsize=1024)
def interned(model: ModelSpec) -> ModelSpec:
    """Return a model equal to `model` whose layers are the first equal ones met.

    Caches keyed by layers then find them by identity, and need not compare field by field.
    """
    groups = tuple(group.model_copy(update={"layer": _interned_layer(group.layer)}) for group in model.groups)
    return model.model_copy(update={"groups": groups})


@lru_cache(maxsize=4096)
def _interned_layer(layer: LayerSpec) -> LayerSpec:
    return layer


@lru_cache(maxsize=4096)
def stages_of(model: ModelSpec, num_stages: int) -> tuple[Stage, ...]:
    """Return the stages of `model`, first to last."""
    stages: list[Stage] = []
    begin = 0
    for index, count in enumerate(_block_counts(model.num_blocks, num_stages)):
        blocks = _between(model, begin, begin + count)
        stages.append(Stage(blocks, is_first=index == 0, is_last=index == num_stages - 1))
        begin += count
    return tuple(stages)


def _block_counts(num_blocks: int, num_stages: int) -> list[int]:
    each, left = divmod(num_blocks, num_stages)
    if left and (num_blocks + 2) % num_stages == 0:
        counts = [(num_blocks + 2) // num_stages] * num_stages
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    return [each + (index < left) for index in range(num_stages)]


def _between(model: ModelSpec, begin: int, end: int) -> tuple[tuple[BlockLayer, int], ...]:
    found: list[tuple[BlockLayer, int]] = []
    at = 0
    for group in model.groups:
        if isinstance(group.layer, BlockLayer):
            count = min(end, at + group.num_layers) - max(begin, at)
            if count > 0:
                found.append((group.layer, count))
            at += group.num_layers
    return tuple(found)
