"""Who may import whom: data flows one way, and planning needs no torch."""

from __future__ import annotations

import subprocess
import sys

from tests.house.source import PACKAGE, ROOT, dotted, imports, modules, part_of

BASE = {"errors", "units", "files"}  # may import each other, and everyone may import them
# Each part, the parts that it may import beside itself, and the third-party packages.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "units": (set(), set()),
    "files": (set(), {"pydantic", "yaml"}),
    "spec": (set(), {"pydantic"}),
    "cost": ({"spec"}, {"numpy"}),
    "search": ({"spec", "cost"}, {"numpy"}),
    "imports": ({"spec"}, {"pydantic"}),
    "report": ({"spec"}, {"jinja2", "matplotlib", "rich"}),
    "export": ({"spec"}, set()),
    "models": ({"spec"}, {"numpy", "safetensors", "torch"}),
    "measure": ({"spec", "models", "runtime"}, {"numpy", "torch"}),
    "runtime": ({"spec", "models"}, {"numpy", "safetensors", "PIL", "sklearn", "tensorboard", "tokenizers", "torch"}),
    "cli": (
        {"spec", "cost", "search", "imports", "report", "export", "models", "measure", "runtime"},
        {"click", "pydantic", "rich", "torch", "typer"},
    ),
    "__init__": ({"spec", "cost", "search"}, set()),
    "__main__": ({"cli"}, set()),
}
NEEDS_TORCH = {"models", "measure", "runtime"}
NOT_FOR_PLANNING = (
    "torch",
    "safetensors",
    "tokenizers",
    "tensorboard",
    "transformers",
    "scipy",
    "sklearn",
    "PIL",
    "matplotlib",
)


def test_every_part_is_in_the_table():
    assert {part_of(path) for path, _ in modules()} <= ALLOWED.keys()


def test_imports_point_one_way():
    bad: list[str] = []
    for path, tree in modules():
        part = part_of(path)
        allowed = ALLOWED[part][0] | BASE | {part}
        for name in imports(tree):
            names = name.split(".")
            if names[0] == PACKAGE.name and len(names) > 1 and names[1] not in allowed:
                bad.append(f"{path}: {name}")
    assert not bad


def test_third_party_packages_are_those_of_the_table():
    bad: list[str] = []
    for path, tree in modules():
        known = ALLOWED[part_of(path)][1] | sys.stdlib_module_names | {PACKAGE.name}
        bad += [f"{path}: {name}" for name in imports(tree) if name.split(".")[0] not in known]
    assert not bad


def test_planning_imports_without_torch():
    """Import every module but those that need torch, with torch and other heavy packages out of reach."""
    names = [dotted(path) for path, _ in modules() if part_of(path) not in {*NEEDS_TORCH, "__main__"}]
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in NOT_FOR_PLANNING)
    code = f"import sys; {blocked}import {', '.join(names)}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_folder_is_a_package():
    """A folder without an __init__.py would be left out of the wheel."""
    folders = {(PACKAGE / path).parent for path, _ in modules()}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]
