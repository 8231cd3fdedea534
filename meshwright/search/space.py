"""Which plans are considered: strategies of a stage, numbers of stages and micro-batches, and named sub-spaces.

Below the pipeline a stage's devices are split as its decision tree says (`search.tree`, which is the one definition of
what is tried): tensor parallelism and data parallelism, the latter replicated, sharded (ZeRO-2 or ZeRO-3) or both
(HSDP), in either order. Each path that the tree keeps becomes strategies: one for each ZeRO stage of the space, with
and without recomputation. Degrees need not be powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import UserError
from meshwright.search.tree import RULES, Branches, Branching, Dimension, Tree, divisors, grow, leaves, why_pointless
from meshwright.spec.model import LayerSpec
from meshwright.spec.strategy import Strategy

DataParallel = Literal["replicate", "zero2", "zero3", "hsdp"]
Partition = Literal["exact", "bmw", "even", "memory", "time"]
PARTITIONS: dict[Partition, str] = {
    "exact": "any boundaries, the best",
    "bmw": "the boundaries that the paper's loop comes to (search/balance.py)",
    "even": "equal numbers of blocks",
    "memory": "the least memory on the fullest stage, every layer under the strategy that needs least",
    "time": "the least time on the slowest stage, every layer under its fastest strategy",
}
_ZERO_STAGES: dict[DataParallel, Literal[2, 3]] = {"zero2": 2, "zero3": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A named set of plans. `pipeline`: how many stages are tried; `uniform`: one strategy for all blocks.

    `fixed`: the one (stages, tp) that is tried, as far as there are devices for it. `data_parallel` "hsdp": replicas
    and shards in one layer, of the ZeRO stages named beside it (rule T3 is off).
    """

    name: str
    about: str
    data_parallel: tuple[DataParallel, ...] = ("replicate", "zero2", "zero3", "hsdp")
    tensor_parallel: bool = True
    pipeline: Literal["none", "any", "all devices"] = "any"
    recompute: bool = True
    uniform: bool = False
    partition: Partition = "exact"
    fixed: tuple[int, int] | None = None


_SHARDED: tuple[DataParallel, ...] = ("replicate", "zero2", "zero3")
SPACES = {
    space.name: space
    for space in (
        Space(name="full", about="every dimension, layer by layer, stages of any size"),
        Space(
            name="base",
            about="DP, ZeRO, TP, PP and recomputation layer by layer, even stages",
            data_parallel=_SHARDED,
            partition="even",
        ),
        Space(
            name="galvatron",
            about="DP, ZeRO, TP, PP layer by layer, even stages, no recomputation",
            data_parallel=_SHARDED,
            recompute=False,
            partition="even",
        ),
        Space(
            name="biobj",
            about="DP, ZeRO, TP, PP layer by layer, stages balanced by the paper's loop, no recomputation",
            data_parallel=_SHARDED,
            recompute=False,
            partition="bmw",
        ),
        Space(
            name="bmw",
            about="DP, ZeRO, TP, PP and recomputation layer by layer, stages balanced by the paper's loop",
            data_parallel=_SHARDED,
            partition="bmw",
        ),
        Space(
            name="3d",
            about="one TP x PP x DP strategy for all layers, even stages",
            data_parallel=("replicate",),
            recompute=False,
            uniform=True,
            partition="even",
        ),
        Space(
            name="deepspeed-3d",
            about="the experts' rule: 2 stages, TP 2, DP for the rest, the same for all layers",
            data_parallel=("replicate",),
            recompute=False,
            uniform=True,
            partition="even",
            fixed=(2, 2),
        ),
        Space(
            name="uniform", about="one strategy of any kind for all layers, even stages", uniform=True, partition="even"
        ),
        Space(
            name="alpa-like",
            about="an approximation of Alpa: DP, ZeRO-2 and TP layer by layer, stages of any size on equal meshes, "
            "no recomputation",
            data_parallel=("replicate", "zero2"),
            recompute=False,
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
            partition="even",
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
            partition="even",
        ),
    )
}


def find_space(name: str, partition: str | None = None) -> Space:
    """Return the space called `name`, with another way to cut stages where one is given; UserError with the names."""
    if name not in SPACES:
        raise UserError(f"space: {name!r} is not known; choose one of {', '.join(SPACES)}")
    space = SPACES[name]
    if partition is None or partition == space.partition:
        return space
    if partition not in PARTITIONS:
        raise UserError(f"partition: {partition!r} is not known; choose one of {', '.join(PARTITIONS)}")
    if space.uniform:
        raise UserError(f"partition: space {name} has even stages; drop the option, or use space full or base")
    return replace(space, name=f"{name} with {partition} stages", partition=partition)


def stage_counts(space: Space, num_devices: int, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of stages to try: divisors of the devices, at most one stage a layer."""
    if space.fixed is not None:
        stages, tp = space.fixed
        return (stages,) if num_devices % (stages * tp) == 0 and stages <= num_layers else ()
    if space.pipeline == "none":
        return (1,)
    if space.pipeline == "all devices":
        return (num_devices,) if num_devices <= num_layers else ()
    return tuple(count for count in divisors(num_devices) if count <= num_layers)


def strategies(space: Space, num_devices: int) -> tuple[Strategy, ...]:
    """Return every strategy of `space` for a stage of `num_devices` devices, in their total order."""
    found = [strategy for path in leaves(_branching(space), num_devices) for strategy in path_strategies(space, path)]
    return tuple(sorted(found, key=lambda strategy: strategy.sort_key))


def tree(space: Space, num_devices: int, num_stages: int = 1, *, lists_unequal: bool = False) -> Tree:
    """Return the decision tree of `space` below `num_stages` stages of `num_devices` devices each."""
    return grow(_branching(space), num_devices, num_stages, lists_unequal=lists_unequal)


def tree_without_t1(space: Space, num_devices: int, *, lists_unequal: bool = False) -> Tree:
    """Return one tree over all devices with the pipeline at any level; what T1 drops of it is listed, never searched.

    Raises UserError for a space whose number of stages is not free.
    """
    if space.pipeline != "any" or space.fixed is not None:
        raise UserError(f"rule: T1 has nothing to drop in space {space.name}, whose stages are fixed; use space full")
    branching = _branching(space)
    return grow(replace(branching, dimensions=("pp", *branching.dimensions)), num_devices, lists_unequal=lists_unequal)


def path_strategies(space: Space, path: Branches) -> tuple[Strategy, ...]:
    """Return the strategies of a path that the tree keeps: its degrees, with the ZeRO stages and recomputation."""
    degrees = dict(path)
    tp, replicas, shards = (degrees.get(dimension, 1) for dimension in ("tp", "dp_replicate", "dp_shard"))
    dp_is_innermost = tp > 1 and replicas * shards > 1 and path[-1].dimension != "tp"
    plain = [
        Strategy(
            tp=tp,
            dp_replicate=replicas,
            dp_shard=shards,
            zero_stage=zero_stage,
            inner="dp" if dp_is_innermost else "tp",
        )
        for zero_stage in (_zero_stages(space) if shards > 1 else (0,))
    ]
    if not space.recompute:
        return tuple(plain)
    return (*plain, *(strategy.model_copy(update={"recompute": "full"}) for strategy in plain))


def rules_of(space: Space) -> tuple[str, ...]:
    """Return the names of the rules that can drop paths in `space`."""
    bounded = ("C1",) if space.fixed is not None else ()
    if not _has_both(space):
        return ("T1", "T2", *bounded)
    return ("T1", "T2", "M1" if "hsdp" in space.data_parallel else "T3", *bounded)


def with_rule(space: Space, rule: str, *, on: bool) -> Space:
    """Return `space` with rule T3 switched on or off. Raises UserError for a rule that cannot be switched."""
    if rule not in RULES:
        raise UserError(f"rule: {rule!r} is not known; T3 can be switched on or off")
    if RULES[rule].needed:
        raise UserError(f"rule: {rule} cannot be switched: {RULES[rule].needed}; only T3 can")
    if not _has_both(space):
        raise UserError(
            f"rule: T3 is about replicas and shards in one layer, and space {space.name} does not have both; "
            "use space full, base or bmw"
        )
    kinds = space.data_parallel
    if on == ("hsdp" not in kinds):
        return space
    kinds = tuple(kind for kind in kinds if kind != "hsdp") if on else (*kinds, "hsdp")
    return replace(space, name=f"{space.name} {'with' if on else 'without'} T3", data_parallel=kinds)


def is_considered(layer: LayerSpec, strategy: Strategy, *, schedule_keeps_logits: bool, tied: bool = False) -> bool:
    """Return False for what cannot help: recomputing an embedding, or a head whose backward follows at once.

    A tied embedding must do what its head does.
    """
    return why_pointless(layer, strategy, schedule_keeps_logits=schedule_keeps_logits, tied=tied) is None


def even_boundaries(num_layers: int, num_stages: int, merges: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    """Return boundaries with equal numbers of blocks (extras first), embedding and head on the ends; None if not so.

    The first and the last of `num_layers` are the embedding and the head. Layers of indices `merges` are no blocks
    either: they stay with the block before them.
    """
    blocks = [layer for layer in range(1, num_layers - 1) if layer not in merges]
    each, extra = divmod(len(blocks), num_stages)
    if each == 0:
        return None
    bounds, first = [0], 0
    for stage in range(num_stages - 1):
        first += each + (stage < extra)
        bounds.append(blocks[first])
    return (*bounds, num_layers)


def _branching(space: Space) -> Branching:
    has: dict[Dimension, bool] = {
        "tp": space.tensor_parallel,
        "dp_replicate": "replicate" in space.data_parallel,
        "dp_shard": bool(_zero_stages(space)),
    }
    return Branching(
        dimensions=tuple(dimension for dimension, is_there in has.items() if is_there),
        mixes_data_parallel="hsdp" in space.data_parallel,
        tp_range=None if space.fixed is None else (space.fixed[1], space.fixed[1]),
    )


def _zero_stages(space: Space) -> tuple[Literal[2, 3], ...]:
    return tuple(stage for kind, stage in _ZERO_STAGES.items() if kind in space.data_parallel)


def _has_both(space: Space) -> bool:
    return "replicate" in space.data_parallel and bool(_zero_stages(space))
