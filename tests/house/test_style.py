"""Rules of the house that a linter does not know: sizes, units in names, plain text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.source import ROOT, modules, text_files

MAX_MODULE_LINES, MAX_FUNCTION_LINES = 600, 60
UNITS = ("_bytes", "_s", "_ns", "_flops", "_tokens", "_samples", "_bytes_per_s", "_flops_per_s", "_tokens_per_s")
NEEDS_UNIT = {"memory", "mem", "time", "latency", "bandwidth", "throughput", "duration"}
# Folders that exist on one machine only. Written so that it does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|opt|mnt|Users)/")


def numeric_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every field, argument and function that is typed int or float."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.Name(id=kind)) if is_numeric(kind):
                yield node.lineno, name
            case ast.FunctionDef(name=name, returns=ast.Name(id=kind)) if is_numeric(kind):
                yield node.lineno, name
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=kind)) if is_numeric(kind):
                yield node.lineno, name


def is_numeric(kind: str) -> bool:
    return kind in {"int", "float", "PositiveInt", "PositiveFloat", "NonNegativeInt", "NonNegativeFloat"}


def test_names_carry_units():
    """A share of something measured (memory_efficiency, balance of memory) has no unit."""
    bad: list[str] = []
    for path, tree in modules():
        for line, name in numeric_names(tree):
            words = name.strip("_").split("_")
            is_share = words[-1] in {"balance", "efficiency", "factor", "fraction", "scale", "share", "weight"}
            if NEEDS_UNIT & set(words) and not is_share and not name.endswith(UNITS):
                bad.append(f"{path}:{line} {name}")
    assert not bad


def test_sizes():
    bad: list[str] = []
    for path, tree in modules():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = {f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in nodes}
        bad += [f"{where}: {length} lines" for where, length in lengths.items() if length > MAX_FUNCTION_LINES]
        num_lines = max((getattr(node, "end_lineno", None) or 0 for node in ast.walk(tree)), default=0)
        if num_lines > MAX_MODULE_LINES:
            bad.append(f"{path}: {num_lines} lines")
    assert not bad


def test_modules_say_what_they_are_for():
    assert not [str(path) for path, tree in modules() if not ast.get_docstring(tree)]


def test_text_is_ascii_and_names_no_machine():
    bad: list[str] = []
    for path in text_files():
        where = path.relative_to(ROOT)
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.isascii():
                bad.append(f"{where}:{number}: not ASCII")
            elif MACHINE_PATH.search(line.decode()):
                bad.append(f"{where}:{number}: a path of one machine")
    assert not bad


def test_nothing_shipped_reads_outside_the_project():
    bad = [
        f"{path}: {node.value}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "../" in node.value
    ]
    assert not bad
