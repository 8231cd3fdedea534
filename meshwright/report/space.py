"""Trees and tables of a search space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from meshwright.report.text import plain_table


def branch_tree(title: str, paths: Iterable[tuple[tuple[str, ...], str]]) -> Tree:
    """Return paths, each its labels from the root and a remark for its leaf, as one tree that shares what is equal."""
    root = Tree(Text(title))
    nodes: dict[tuple[str, ...], Tree] = {(): root}
    for labels, remark in paths:
        for depth, label in enumerate(labels, start=1):
            here = labels[:depth]
            if here not in nodes:
                text = f"{label}: {remark}" if depth == len(labels) else label
                nodes[here] = nodes[here[:-1]].add(Text(text))
        if not labels:
            root.add(Text(remark))
    return root


def counts_table(rules: Sequence[str], rows: Iterable[Sequence[int | str]]) -> Table:
    """Return how many paths each tree has and what is left of them; the columns between are what `rules` drop."""
    dropped = [f"dropped by {rule}" for rule in rules]
    return _table(
        ("stages", "devices of each", "paths", *dropped, "kept", "with ZeRO stages", "with recomputation"), rows
    )


def rules_table(rows: Iterable[Sequence[int | str]]) -> Table:
    """Return the rules of a tree: (name, on or off, paths dropped, sentence, source)."""
    return _table(("rule", "is", "drops", "what it says", "source"), rows)


def all_rules_table(rows: Iterable[Sequence[int | str]]) -> Table:
    """Return what rules there are: (name, always on or switchable, sentence, source)."""
    return _table(("rule", "is", "what it says", "source"), rows)


def spaces_table(rows: Iterable[Sequence[int | str]]) -> Table:
    """Return named spaces: (name, how stages are cut, rules, sentence)."""
    return _table(("space", "stages", "rules", "what it holds"), rows)


def legality_table(rules: Sequence[str], rows: Iterable[Sequence[int | str]]) -> Table:
    """Return how many strategies each kind of layer may use; the columns between are what `rules` drop."""
    dropped = [f"dropped by {rule}" for rule in rules]
    return _table(("stages", "layers", "strategies", *dropped, "left"), rows)


def reasons_table(rows: Iterable[Sequence[int | str]]) -> Table:
    """Return why strategies are dropped: (rule, kinds of layers, how many, reason)."""
    return _table(("rule", "layers", "drops", "reason"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[int | str]]) -> Table:
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*map(str, row))
    return table
