"""Which plans are considered: strategies of a stage, numbers of stages and micro-batches, and named sub-spaces.

Below the pipeline a stage's n devices are split by tensor parallelism (degree t | n) and data
parallelism (n / t), the latter replicated, sharded (ZeRO-2 or ZeRO-3) or both (HSDP), with either
axis holding neighbouring ranks, with or without recomputation. Degrees need not be powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import UserError
from meshwright.spec.model import BlockLayer, LayerSpec
from meshwright.spec.strategy import Strategy

DataParallel = Literal["replicate", "zero2", "zero3", "hsdp"]
_ZERO_STAGES = {"zero2": 2, "zero3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A named set of plans. `pipeline`: how many stages are tried; `uniform`: one strategy for all layers."""

    name: str
    about: str
    data_parallel: tuple[DataParallel, ...] = ("replicate", "zero2", "zero3", "hsdp")
    tensor_parallel: bool = True
    pipeline: Literal["none", "any", "all devices"] = "any"
    recompute: bool = True
    uniform: bool = False
    even_stages: bool = False


_SHARDED: tuple[DataParallel, ...] = ("replicate", "zero2", "zero3")
SPACES = {
    space.name: space
    for space in (
        Space(name="full", about="every dimension, layer by layer, stages of any size"),
        Space(
            name="base",
            about="DP, ZeRO, TP, PP and recomputation layer by layer, even stages",
            data_parallel=_SHARDED,
            even_stages=True,
        ),
        Space(
            name="galvatron",
            about="DP, ZeRO, TP, PP layer by layer, even stages, no recomputation",
            data_parallel=_SHARDED,
            recompute=False,
            even_stages=True,
        ),
        Space(
            name="3d",
            about="one TP x PP x DP strategy for all layers, even stages",
            data_parallel=("replicate",),
            recompute=False,
            uniform=True,
            even_stages=True,
        ),
        Space(
            name="uniform", about="one strategy of any kind for all layers, even stages", uniform=True, even_stages=True
        ),
        Space(
            name="dp+tp",
            about="DP and TP layer by layer, no pipeline",
            data_parallel=("replicate",),
            pipeline="none",
            recompute=False,
        ),
        Space(
            name="dp+pp",
            about="DP and PP, even stages",
            data_parallel=("replicate",),
            tensor_parallel=False,
            recompute=False,
            even_stages=True,
        ),
        Space(
            name="ddp",
            about="data parallelism alone",
            data_parallel=("replicate",),
            tensor_parallel=False,
            pipeline="none",
            recompute=False,
        ),
        Space(
            name="zero3",
            about="sharded data parallelism alone",
            data_parallel=("zero3",),
            tensor_parallel=False,
            pipeline="none",
            recompute=False,
        ),
        Space(name="tp", about="tensor parallelism alone", data_parallel=(), pipeline="none", recompute=False),
        Space(
            name="pp",
            about="pipeline parallelism alone, even stages",
            data_parallel=(),
            tensor_parallel=False,
            pipeline="all devices",
            recompute=False,
            even_stages=True,
        ),
    )
}


def find_space(name: str) -> Space:
    """Return the space called `name`, or raise UserError with the names."""
    if name not in SPACES:
        raise UserError(f"space: {name!r} is not known; choose one of {', '.join(SPACES)}")
    return SPACES[name]


def stage_counts(space: Space, num_devices: int, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of stages to try: divisors of the devices, at most one stage a layer."""
    if space.pipeline == "none":
        return (1,)
    if space.pipeline == "all devices":
        return (num_devices,) if num_devices <= num_layers else ()
    return tuple(count for count in divisors(num_devices) if count <= num_layers)


def strategies(space: Space, num_devices: int) -> tuple[Strategy, ...]:
    """Return every strategy of `space` for a stage of `num_devices` devices, in their total order."""
    found = {
        strategy.model_copy(update={"recompute": recompute, "inner": inner})
        for strategy in _degrees(space, num_devices)
        for recompute in (("none", "full") if space.recompute else ("none",))
        for inner in (("tp", "dp") if strategy.tp > 1 and strategy.dp > 1 else ("tp",))
    }
    return tuple(sorted(found, key=lambda strategy: strategy.sort_key))


def is_considered(layer: LayerSpec, strategy: Strategy, *, schedule_keeps_logits: bool, tied: bool = False) -> bool:
    """Return False for what cannot help: recomputing an embedding, or a head whose backward follows at once.

    A tied embedding must do what its head does.
    """
    if strategy.recompute == "none" or isinstance(layer, BlockLayer):
        return True
    return schedule_keeps_logits and (layer.kind == "head" or tied)


def even_boundaries(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return boundaries with equal numbers of blocks (extras first), embedding and head on the ends; None if not so.

    The first and the last of `num_layers` are the embedding and the head.
    """
    blocks, extra = divmod(num_layers - 2, num_stages)
    if blocks == 0:
        return None
    sizes = [blocks + (stage < extra) for stage in range(num_stages)]
    sizes[0] += 1
    sizes[-1] += 1
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return tuple(bounds)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _degrees(space: Space, num_devices: int) -> Iterator[Strategy]:
    for tp in divisors(num_devices) if space.tensor_parallel else (1,):
        dp = num_devices // tp
        if dp == 1:
            yield Strategy(tp=tp)
            continue
        for kind in space.data_parallel:
            if kind == "replicate":
                yield Strategy(tp=tp, dp_replicate=dp)
            elif kind == "hsdp":
                for replicas in divisors(dp)[1:-1]:
                    for zero_stage in _ZERO_STAGES.values():
                        yield Strategy(tp=tp, dp_replicate=replicas, dp_shard=dp // replicas, zero_stage=zero_stage)  # type: ignore[arg-type]
            else:
                yield Strategy(tp=tp, dp_shard=dp, zero_stage=_ZERO_STAGES[kind])  # type: ignore[arg-type]
