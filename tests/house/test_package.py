"""What is shipped: the public names, the data files, the console script, the pinned versions."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from typing import Any, get_args

import pytest

import meshwright
from meshwright.spec.accuracy import shipped_errors
from meshwright.spec.constants import shipped_constants
from meshwright.spec.frameworks import default_software
from meshwright.spec.library import device, device_names, model, model_names
from meshwright.spec.memory import shipped_memory
from meshwright.spec.run import FrameworkName
from tests.house.source import PACKAGE, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def top_level_names(tree: ast.Module) -> set[str]:
    """Return what a module binds at its top level: imports, assignments, functions and classes."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def test_all_is_what_is_public():
    names = top_level_names(ast.parse((PACKAGE / "__init__.py").read_text()))
    exported = list(getattr(meshwright, "__all__", []))
    assert sorted(exported) == sorted(name for name in names if not name.startswith("_"))
    assert all(hasattr(meshwright, name) for name in exported)


def test_every_data_file_is_shipped_and_loads():
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["meshwright"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert shipped == files

    data = PACKAGE / "spec" / "data"
    loaded = {data / "devices.yaml", PACKAGE / "py.typed"}
    assert all(device(name).name == name for name in device_names())
    for name in model_names():
        assert model(name).name == name
        loaded.add(data / "models" / f"{name}.json")
    assert shipped_constants().source
    assert shipped_memory().source
    assert all(0 <= errors.median <= errors.p90 for errors in shipped_errors())
    assert all(default_software(name) for name in get_args(FrameworkName))
    loaded |= {data / "constants.yaml", data / "memory.yaml", data / "accuracy.yaml", data / "frameworks.yaml"}
    assert files == loaded, "a data file that no test loads"


def test_every_shipped_model_says_where_it_comes_from():
    for path in (PACKAGE / "spec" / "data" / "models").iterdir():
        assert '"_source"' in path.read_text(), path.name


def test_the_console_script_exists():
    module, function = PROJECT["project"]["scripts"]["meshwright"].split(":")
    if not (PACKAGE / "cli" / "__init__.py").exists():
        pytest.skip("the cli is not written yet")
    assert callable(getattr(importlib.import_module(module), function))


def test_every_dependency_is_pinned():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    ranges = PROJECT["project"]["dependencies"] + [entry for extra in extras for entry in extra]
    wanted = {re.split(r"[<>=!~\[ ]", entry)[0].lower().replace("_", "-") for entry in ranges}
    assert wanted <= pinned
