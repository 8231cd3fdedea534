"""The package's source files and project files, for the house tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshwright"
_HIDDEN_BUT_OURS = {".ci", ".gitignore", ".pre-commit-config.yaml"}
_MADE = {"__pycache__", "build", "dist", "runs"}
_BINARY = {".png", ".gif", ".pdf", ".bin", ".safetensors"}


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    """Return the path, relative to the package, and the syntax tree of every module."""
    return tuple((path.relative_to(PACKAGE), ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def part_of(path: Path) -> str:
    """Return the part of the package that the module `path` belongs to: its folder, or its own name."""
    return path.with_suffix("").parts[0]


def dotted(path: Path) -> str:
    """Return the module name of `path`."""
    names = (PACKAGE.name, *path.with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything that is imported, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def text_files(folder: Path = ROOT) -> Iterator[Path]:
    """Yield the project's own text files, without what tools made."""
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name not in _HIDDEN_BUT_OURS
        if hidden or path.name in _MADE or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from text_files(path)
        elif path.suffix not in _BINARY:
            yield path
