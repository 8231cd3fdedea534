"""meshwright space: what is considered, as decision trees, and what is dropped by which rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from meshwright.cli.common import JsonFlag, show_json, show_line, show_view
from meshwright.cli.options import ScheduleOption, SpaceOption
from meshwright.errors import UserError
from meshwright.report.space import (
    all_rules_table,
    branch_tree,
    counts_table,
    legality_table,
    reasons_table,
    rules_table,
    spaces_table,
)
from meshwright.search.space import (
    SPACES,
    Space,
    even_boundaries,
    find_space,
    path_strategies,
    rules_of,
    stage_counts,
    strategies,
    tree,
    tree_without_t1,
    with_rule,
)
from meshwright.search.tree import RULES, Candidates, Path, Tree, candidates
from meshwright.spec import library
from meshwright.spec.model import ModelSpec
from meshwright.spec.schedule import ScheduleName
from meshwright.units import several

_MOST_DEVICES = 1 << 14  # far above any cluster: a slip of the hand is an error and not a listing without end
_LISTED = ("T1", "T2")  # no search can do without them: without them, what they drop is listed
_LAYER_RULES = ("L1", "L2", "L3")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Legality:
    """What the layers of a model may use at one number of stages; `why_not`: why there can be no such stages."""

    num_stages: int
    num_strategies: int
    layers: tuple[Candidates, ...] = ()
    why_not: str = ""


def space(
    devices: Annotated[int | None, typer.Argument(min=1, max=_MOST_DEVICES, help="Devices to split.")] = None,
    space: SpaceOption = "full",
    with_rules: Annotated[list[str] | None, typer.Option("--with", help="Switch a rule on: T3.")] = None,
    without_rules: Annotated[
        list[str] | None,
        typer.Option("--without", help="Switch T3 off, or list what T1 or T2 drop (these are never searched)."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Also show what a model's layers cannot use, and why.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="With a model: samples of a micro-batch over all devices of a stage.")
    ] = None,
    schedule: ScheduleOption = "1f1b",
    counts: Annotated[bool, typer.Option("--counts", help="Counts and rules alone, without the trees.")] = False,
    list_spaces: Annotated[bool, typer.Option("--list", help="Show the named spaces.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show the search space: all ways to split devices, which of them are tried, and by which rule others are not."""
    if list_spaces:
        if devices is not None or model is not None:
            raise UserError("space: --list shows all spaces; leave out the devices and --model")
        _show_spaces(as_json=json)
        return
    if devices is None:
        raise UserError("space: give the number of devices, such as 8, or --list for the names of the spaces")
    if (model is None) != (micro_batch is None):
        raise UserError("micro-batch: --model and --micro-batch go together, such as --model gpt2 --micro-batch 16")
    chosen, listed = _choose(space, with_rules or [], without_rules or [])
    trees = _trees(chosen, devices, listed)
    legal: list[_Legality] = []
    if model is not None and micro_batch is not None:
        legal = _legality(chosen, devices, library.model(model), micro_batch, schedule)
    if json:
        show_json(_as_json(chosen, devices, trees, listed, legal, with_paths=not counts))
        return
    if not counts:
        for one in trees:
            show_view(branch_tree(_title(one), (_row(chosen, path) for path in one.paths)))
    _show_counts(chosen, trees, listed)
    if legal:
        _show_legality(legal)


def _choose(name: str, on: list[str], off: list[str]) -> tuple[Space, tuple[str, ...]]:
    """Return the space with its rules switched, and the rules whose dropped paths are to be listed."""
    chosen = find_space(name)
    if both := sorted({*on} & {*off}):
        raise UserError(f"rule: {both[0]} is given to both --with and --without; leave out one of them")
    for rule in on:
        chosen = with_rule(chosen, rule, on=True)
    for rule in off:
        if rule not in _LISTED:
            chosen = with_rule(chosen, rule, on=False)
    return chosen, tuple(rule for rule in _LISTED if rule in off)


def _trees(space: Space, devices: int, listed: tuple[str, ...]) -> list[Tree]:
    lists_unequal = "T2" in listed
    if "T1" in listed:
        return [tree_without_t1(space, devices, lists_unequal=lists_unequal)]
    stages = _all_stages(space, devices)
    return [tree(space, devices // count, count, lists_unequal=lists_unequal) for count in stages]


def _all_stages(space: Space, devices: int) -> tuple[int, ...]:
    """Return the numbers of stages for a model that has layers enough."""
    stages = stage_counts(space, devices, devices)
    if not stages and space.fixed is not None:
        count, tp = space.fixed
        raise UserError(
            f"devices: space {space.name} has {count} stages with tp {tp}, which {devices} devices do not allow; "
            f"give a multiple of {count * tp}"
        )
    return stages


def _legality(space: Space, devices: int, model: ModelSpec, samples: int, schedule: ScheduleName) -> list[_Legality]:
    found: list[_Legality] = []
    for count in _all_stages(space, devices):
        all_of_stage = strategies(space, devices // count)
        why_not = _why_no_stages(space, model, count)
        layers = () if why_not else candidates(model, all_of_stage, samples, schedule)
        found.append(_Legality(num_stages=count, num_strategies=len(all_of_stage), layers=layers, why_not=why_not))
    return found


def _why_no_stages(space: Space, model: ModelSpec, num_stages: int) -> str:
    num_layers = len(model.layers)
    if num_stages > num_layers:
        return f"{num_stages} stages need as many layers, but {model.name} has {num_layers}"
    if space.partition == "even" and even_boundaries(num_layers, num_stages, model.merges) is None:
        return f"{num_stages} even stages need as many blocks, but {model.name} has {model.num_blocks}"
    return ""


def _title(one: Tree) -> str:
    return f"{several(one.num_stages, 'stage')} of {several(one.num_devices, 'device')}"


def _row(space: Space, path: Path) -> tuple[tuple[str, ...], str]:
    labels = tuple(branch.label for branch in path.branches)
    if path.rule:
        return labels, f"dropped by {path.rule}: {path.reason}"
    plain = (strategy.label for strategy in path_strategies(space, path.branches) if strategy.recompute == "none")
    return labels, ", ".join(plain)


def _counts(space: Space, one: Tree) -> Counter[str]:
    """Return the paths of a tree, those that each rule drops, and what is left, step by step."""
    kept = [strategy for path in one.kept for strategy in path_strategies(space, path.branches)]
    counts = Counter(path.rule for path in one.paths if path.rule)
    counts.update(
        paths=len(one.paths),
        kept=len(one.kept),
        with_zero_stages=sum(strategy.recompute == "none" for strategy in kept),
        with_recomputation=len(kept),
    )
    return counts


def _rule_states(space: Space, listed: tuple[str, ...]) -> dict[str, str]:
    """Return whether each rule that matters in a space is on, off, or has what it drops listed."""
    holding = rules_of(space)
    off = ("T3",) if "M1" in holding else ()
    states = {**dict.fromkeys(holding, "on"), **dict.fromkeys(off, "off"), **dict.fromkeys(listed, "listed")}
    return {rule: states[rule] for rule in RULES if rule in states}


def _show_counts(space: Space, trees: list[Tree], listed: tuple[str, ...]) -> None:
    counts = [_counts(space, one) for one in trees]
    total = sum(counts, Counter[str]())
    rules = [rule for rule in RULES if rule in total]
    columns = ("paths", *rules, "kept", "with_zero_stages", "with_recomputation")
    places = [("any", "") if "T1" in listed else (str(one.num_stages), str(one.num_devices)) for one in trees]
    rows = [(*place, *(each[name] for name in columns)) for place, each in zip(places, counts, strict=True)]
    if len(rows) > 1:
        rows.append(("all", "", *(total[name] for name in columns)))
    show_line(f"space {space.name}: {space.about}")
    show_view(counts_table(rules, rows))
    states = _rule_states(space, listed)
    drops = {rule: "not listed" if rule in _LISTED and is_on == "on" else total[rule] for rule, is_on in states.items()}
    show_view(rules_table((rule, is_on, drops[rule], *_words(rule)) for rule, is_on in states.items()))
    for rule in listed:
        show_line(f"{rule} is listed, not searched: {RULES[rule].needed}")


def _words(rule: str) -> tuple[str, str]:
    return RULES[rule].about, RULES[rule].source


def _show_legality(legal: list[_Legality]) -> None:
    rows: list[tuple[int | str, ...]] = []
    reasons: Counter[tuple[str, str, str]] = Counter()
    for one in legal:
        for each in one.layers:
            kind = each.layer.kind
            dropped = Counter(refusal.rule for refusal in each.refused)
            by_rule = (dropped[rule] for rule in _LAYER_RULES)
            rows.append(
                (one.num_stages, f"{each.num_layers} x {kind}", one.num_strategies, *by_rule, len(each.allowed))
            )
            reasons.update((refusal.rule, kind, refusal.reason) for refusal in each.refused)
    show_view(legality_table(_LAYER_RULES, rows))
    for one in legal:
        if one.why_not:
            show_line(f"{one.num_stages} stages are not tried: {one.why_not}")
    if reasons:
        show_view(reasons_table((rule, kind, count, why) for (rule, kind, why), count in sorted(reasons.items())))


def _show_spaces(*, as_json: bool) -> None:
    if as_json:
        spaces = [
            {"name": one.name, "about": one.about, "partition": one.partition, "rules": list(rules_of(one))}
            for one in SPACES.values()
        ]
        show_json({"spaces": spaces, "rules": [asdict(rule) for rule in RULES.values()]})
        return
    show_view(spaces_table((one.name, one.partition, " ".join(rules_of(one)), one.about) for one in SPACES.values()))
    show_view(
        all_rules_table(
            (name, "always on" if rule.needed else "switchable", *_words(name)) for name, rule in RULES.items()
        )
    )


def _as_json(
    space: Space,
    devices: int,
    trees: list[Tree],
    listed: tuple[str, ...],
    legal: list[_Legality],
    *,
    with_paths: bool,
) -> dict[str, Any]:
    return {
        "space": space.name,
        "devices": devices,
        "rules": _rule_states(space, listed),
        "trees": [
            {
                "stages": "any" if "T1" in listed else one.num_stages,
                "devices": one.num_devices,
                "counts": _counts(space, one),
                **({"paths": [_path_as_json(space, path) for path in one.paths]} if with_paths else {}),
            }
            for one in trees
        ],
        "model": [_legality_as_json(one) for one in legal],
    }


def _path_as_json(space: Space, path: Path) -> dict[str, Any]:
    branches = [{"dimension": branch.dimension, "degree": branch.degree} for branch in path.branches]
    if path.rule:
        return {"branches": branches, "dropped_by": path.rule, "reason": path.reason}
    return {"branches": branches, "strategies": [one.label for one in path_strategies(space, path.branches)]}


def _legality_as_json(legal: _Legality) -> dict[str, Any]:
    return {
        "stages": legal.num_stages,
        "why_not": legal.why_not,
        "layers": [
            {
                "kind": each.layer.kind,
                "num_layers": each.num_layers,
                "allowed": [strategy.label for strategy in each.allowed],
                "dropped": [
                    {"strategy": refusal.strategy.label, "rule": refusal.rule, "reason": refusal.reason}
                    for refusal in each.refused
                ],
            }
            for each in legal.layers
        ],
    }
