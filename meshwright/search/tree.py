"""The search space as decision trees: every way to split a stage's devices, and the rule that drops each one not tried.

A plan first cuts the devices into pipeline stages. Below one stage of n devices grows a tree: each level applies one
dimension (tensor parallelism, replicated or sharded data parallelism) with a degree of at least 2 that divides the
devices that are left, each dimension at most once, until none are left. A path from the root to a leaf is one way to
lay a layer out: the dimension applied first lies across the slowest links, the last one holds neighbouring devices.
Decision trees and rules T1 to T3 are those of arXiv 2307.02031.

For 8 devices and 1, 2, 4, 8 stages there are 21 + 9 + 3 + 1 = 34 paths, of which T3 keeps 11 + 7 + 3 + 1 = 22.

Nothing is dropped silently: a dropped path, or a strategy that a layer cannot use, keeps its rule and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from meshwright.spec.legality import why_illegal_dp, why_illegal_tp
from meshwright.spec.model import AnyBlock, FirstLayer, LayerSpec, MergeLayer, ModelSpec
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy

Dimension = Literal["pp", "tp", "dp_replicate", "dp_shard"]
_WORDS: dict[Dimension, str] = {"pp": "pp", "tp": "tp", "dp_replicate": "dp", "dp_shard": "sharded dp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Why something is not tried. `needed`: why no search can do without the rule; empty where it can be off."""

    name: str
    about: str
    source: str
    needed: str = ""


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            name="T1",
            about="pipeline stages are cut first, across the slowest links: one tree for each number of stages",
            source="arXiv 2307.02031, takeaway 1",
            needed="a plan's stages are cut first, so other orders can be listed but not searched",
        ),
        Rule(
            name="T2",
            about="groups are equal: a degree divides the devices that it splits",
            source="arXiv 2307.02031, takeaway 2",
            needed="a mesh has equal groups, so other degrees can be listed but not searched",
        ),
        Rule(
            name="T3",
            about="the data parallelism of a layer is replicated or sharded, never both",
            source="arXiv 2307.02031, takeaway 3",
        ),
        Rule(
            name="M1",
            about="replicas and shards lie side by side, shards inside: of orders that differ only so, one is kept",
            source="ours: the meshes that the runtime builds (spec/mesh.py)",
            needed="the runtime builds no other mesh",
        ),
        Rule(
            name="C1",
            about="the tensor-parallel degree lies within bounds",
            source="the space (deepspeed-3d: always 2); Hetu-Galvatron's max_tp_deg",
            needed="the bounds are what makes the space",
        ),
        Rule(
            name="C2",
            about="there are no more pipeline stages than a cap",
            source="Hetu-Galvatron's max_pp_deg; no named space has it",
            needed="the cap is what makes the space",
        ),
        Rule(
            name="L1",
            about="a tensor-parallel degree divides what it splits: heads, KV heads, feed-forward, padded vocabulary",
            source="spec/legality.py",
            needed="the runtime never splits unevenly",
        ),
        Rule(
            name="L2",
            about="a data-parallel degree divides the micro-batch",
            source="spec/legality.py",
            needed="samples are never dropped or padded",
        ),
        Rule(
            name="L3",
            about="the ends are recomputed only where that can save memory",
            source="ours: an embedding keeps little but its input; under 1F1B the head's backward pass comes at once",
            needed="it drops only what is slower and no smaller",
        ),
    )
}


class Branch(NamedTuple):
    """One level of a path: a dimension and its degree."""

    dimension: Dimension
    degree: int

    @property
    def label(self) -> str:
        return f"{_WORDS[self.dimension]} {self.degree}"


Branches = tuple[Branch, ...]
Order = tuple[Dimension, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A way down the tree, slowest links first; `rule` and `reason` say why it is dropped, empty where it is kept."""

    branches: Branches
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All paths below `num_stages` stages of `num_devices` devices each."""

    num_stages: int
    num_devices: int
    paths: tuple[Path, ...]

    @property
    def kept(self) -> tuple[Path, ...]:
        return tuple(path for path in self.paths if not path.rule)

    def dropped_by(self, rule: str) -> tuple[Path, ...]:
        """Return the paths that `rule` drops."""
        return tuple(path for path in self.paths if path.rule == rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """What a tree branches on, and what is allowed.

    `dimensions`: each is applied at most once. `mixes_data_parallel`: rule T3 is off. `tp_range`: the least and the
    most tensor parallelism (rule C1), 1 where there is none. `most_stages`: the cap of rule C2.
    """

    dimensions: Order
    mixes_data_parallel: bool = False
    tp_range: tuple[int, int] | None = None
    most_stages: int | None = None


def grow(branching: Branching, num_devices: int, num_stages: int = 1, *, lists_unequal: bool = False) -> Tree:
    """Return the tree below `num_stages` stages of `num_devices` devices each.

    Dimension "pp" makes the pipeline one more dimension, at any level: a look at what rule T1 drops. `lists_unequal`
    lists the degrees that do not divide, each as a path that ends there: a look at what rule T2 drops.
    """
    paths: list[Path] = []
    for branches in _branches(num_devices, branching.dimensions):
        rule, reason = _why_dropped(branches, branching, num_stages)
        paths.append(Path(branches=branches, rule=rule, reason=reason))
    if lists_unequal:
        paths += _unequal(num_devices, branching.dimensions)
    return Tree(num_stages=num_stages, num_devices=num_devices, paths=tuple(paths))


def leaves(branching: Branching, num_devices: int, num_stages: int = 1) -> Iterator[Branches]:
    """Yield the kept paths of `grow` alone, without walking what is dropped: the search needs no reasons."""

    def is_open(order: Order) -> bool:
        return not _rule_of_order(order, branching.mixes_data_parallel)

    for branches in _branches(num_devices, branching.dimensions, is_open):
        if not _bound_broken(branches, branching, num_stages):
            yield branches


def path_label(branches: Branches) -> str:
    """Return a path in words, slowest links first: tp 2 > dp 4."""
    return " > ".join(branch.label for branch in branches) or "one device"


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _branches(
    num_devices: int, unused: Order, is_open: Callable[[Order], bool] = lambda _: True, above: Branches = ()
) -> Iterator[Branches]:
    """Yield every path of equal groups that leaves no device over, in orders of dimensions that are open.

    A dimension that is closed after some others stays closed further down: no rule on the order opens one again.
    """
    if num_devices == 1:
        yield above
        return
    order: Order = tuple(branch.dimension for branch in above)
    for dimension in unused:
        rest: Order = tuple(other for other in unused if other != dimension and is_open((*order, dimension, other)))
        for degree in divisors(num_devices)[1:] if rest else (num_devices,):
            yield from _branches(num_devices // degree, rest, is_open, (*above, Branch(dimension, degree)))


def _unequal(num_devices: int, dimensions: Order, above: Branches = ()) -> Iterator[Path]:
    for dimension in dimensions:
        for degree in range(2, num_devices + 1):
            branches = (*above, Branch(dimension, degree))
            if num_devices % degree:
                reason = f"{num_devices} devices cannot be split into {degree} equal parts"
                yield Path(branches=branches, rule="T2", reason=reason)
            else:
                yield from _unequal(num_devices // degree, _without(dimensions, dimension), branches)


def _without(dimensions: Order, gone: Dimension) -> Order:
    return tuple(dimension for dimension in dimensions if dimension != gone)


def _why_dropped(branches: Branches, branching: Branching, num_stages: int) -> tuple[str, str]:
    """Return the first rule that drops a path, and the reason; two empty texts where it is kept."""
    rule = _rule_of_order(tuple(branch.dimension for branch in branches), branching.mixes_data_parallel)
    if not rule:
        return _bound_broken(branches, branching, num_stages) or ("", "")
    if rule == "T1":
        return rule, f"pp lies below {branches[0].label}, but stages are cut first"
    if rule == "M1":
        return rule, f"{path_label(_in_mesh(branches))} stands for it"
    degrees = dict(branches)
    replicas, shards = degrees["dp_replicate"], degrees["dp_shard"]
    return rule, f"dp {replicas} with sharded dp {shards}; sharded dp {replicas * shards} is tried instead"


@cache
def _rule_of_order(order: Order, mixes_data_parallel: bool) -> str:
    """Return which of the rules on the order of dimensions drops a path and all below it; empty where none does."""
    if "pp" in order[1:]:
        return "T1"
    if not {"dp_replicate", "dp_shard"} <= {*order}:
        return ""
    if not mixes_data_parallel:
        return "T3"
    return "" if order.index("dp_shard") == order.index("dp_replicate") + 1 else "M1"


def _bound_broken(branches: Branches, branching: Branching, num_stages: int) -> tuple[str, str] | None:
    """Return which of the rules on degrees drops a path, and the reason."""
    if branching.tp_range is None and branching.most_stages is None:
        return None
    degrees = dict(branches)
    if branching.tp_range is not None:
        tp, (least, most) = degrees.get("tp", 1), branching.tp_range
        if not least <= tp <= most:
            return "C1", f"tp {tp} is not {least}" if least == most else f"tp {tp} is not in {least} to {most}"
    stages = num_stages * degrees.get("pp", 1)
    if branching.most_stages is not None and stages > branching.most_stages:
        return "C2", f"{stages} stages are more than {branching.most_stages}"
    return None


def _in_mesh(branches: Branches) -> Branches:
    """Return a path with its replicas moved to just outside its shards, the order that the runtime's mesh has."""
    replicas = next(branch for branch in branches if branch.dimension == "dp_replicate")
    others = [branch for branch in branches if branch is not replicas]
    shards = next(place for place, branch in enumerate(others) if branch.dimension == "dp_shard")
    return (*others[:shards], replicas, *others[shards:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A strategy that a layer does not use: the rule (L1 to L3) and the reason."""

    strategy: Strategy
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What `num_layers` equal layers of a model may use of a stage's strategies, and why not the others."""

    layer: LayerSpec
    num_layers: int
    allowed: tuple[Strategy, ...]
    refused: tuple[Refusal, ...]


def candidates(
    model: ModelSpec, strategies: tuple[Strategy, ...], micro_batch_samples: int, schedule: ScheduleName = "1f1b"
) -> tuple[Candidates, ...]:
    """Return for each kind of layer of `model` which of a stage's `strategies` it may use, and why not the others.

    Tied ends get equal sets: they split the same vocabulary, and the embedding follows its head. `search.table` asks
    the same questions, without the words, for the problems that are solved.
    """
    found: list[Candidates] = []
    for layer in dict.fromkeys(group.layer for group in model.groups):
        allowed: list[Strategy] = []
        refused: list[Refusal] = []
        for strategy in strategies:
            rule, reason = _why_refused(
                layer, strategy, micro_batch_samples, keeps_logits=schedule == "gpipe", tied=model.tied_embedding
            )
            if rule:
                refused.append(Refusal(strategy=strategy, rule=rule, reason=reason))
            else:
                allowed.append(strategy)
        num_layers = sum(group.num_layers for group in model.groups if group.layer == layer)
        found.append(Candidates(layer=layer, num_layers=num_layers, allowed=tuple(allowed), refused=tuple(refused)))
    return tuple(found)


def why_pointless(layer: LayerSpec, strategy: Strategy, *, schedule_keeps_logits: bool, tied: bool) -> str | None:
    """Return why recomputing `layer` cannot help (rule L3), or None. A tied embedding must do what its head does."""
    if strategy.recompute == "none" or isinstance(layer, AnyBlock | MergeLayer):
        return None
    if isinstance(layer, FirstLayer) and not tied:
        return "recomputing an embedding cannot help: it keeps little but its input"
    if schedule_keeps_logits:
        return None
    if isinstance(layer, FirstLayer):
        return "a tied embedding does what its head does, and recomputing the head cannot help"
    return "recomputing a head cannot help: its backward pass follows at once"


def _why_refused(
    layer: LayerSpec, strategy: Strategy, micro_batch_samples: int, *, keeps_logits: bool, tied: bool
) -> tuple[str, str]:
    reasons = (
        ("L3", why_pointless(layer, strategy, schedule_keeps_logits=keeps_logits, tied=tied)),
        ("L1", why_illegal_tp(layer, strategy.tp)),
        ("L2", why_illegal_dp(strategy, micro_batch_samples)),
    )
    return next(((rule, reason) for rule, reason in reasons if reason), ("", ""))
