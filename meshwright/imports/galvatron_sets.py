"""Which files of Hetu-Galvatron's profilers there are, which belong together, and which are meant.

A set is one model at one precision: computation_profiling_<precision>_<model>.json and memory_profiling_... beside
it in a folder `configs`, with its numbers in `meta_configs` next to that; and the files of one
cluster, <kind>_<N>nodes_<G>gpus_per_node.json. profile_constants.json, the constants of the 2022
artefact, holds a set for each of its models. Versions kept aside are called <name>@<hash>.json.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.errors import UserError
from meshwright.files import is_folder, shorten
from meshwright.imports.galvatron_files import read_object

Kind = Literal["computation", "memory", "all_reduce", "p2p", "overlap", "times", "meta", "artefact"]
_MODEL_FILE = re.compile(r"(computation|memory)_profiling_(?:(bf16|fp16|fp32)_)?(.+)")
_CLUSTER_FILE = re.compile(r"(allreduce_bandwidth|p2p_bandwidth|sp_time)_(\d{1,6})nodes_(\d{1,6})gpus_per_node")
_KINDS: dict[str, Kind] = {
    "computation": "computation",
    "memory": "memory",
    "allreduce_bandwidth": "all_reduce",
    "p2p_bandwidth": "p2p",
    "sp_time": "times",
}
# What a file must hold to be of a kind, where its name does not say.
_SIGNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("times", re.compile(r"(allreduce|all2all)_size_\d+_\d+MB_time")),
    ("all_reduce", re.compile(r"allreduce_size_\d+_consec_[01]")),
    ("p2p", re.compile(r"pp_size_\d+")),
    ("overlap", re.compile(r"overlap_coe")),
    ("meta", re.compile(r"n_layers?|num_hidden_layers|num_layers|depths")),
    ("memory", re.compile(r"other_memory_pp_\w+|\d+_\d+_\d+\w*")),
    ("computation", re.compile(r"layernum.*|layertype_.*")),
)
_MOST_NAMES = 12
_MOST_FILES = 20_000


@dataclass(kw_only=True)
class ProfileSet:
    """Files of one model in one folder; `label` is what it is called among others."""

    folder: Path
    label: str
    stem: str
    precision: str | None
    computation: list[Path] = field(default_factory=list[Path])
    memory: list[Path] = field(default_factory=list[Path])

    @property
    def title(self) -> str:
        """Return the name of the model."""
        return self.stem.removesuffix("_all")

    @property
    def full_stem(self) -> str:
        """Return the name of its files behind their kind."""
        return self.stem if self.precision is None else f"{self.precision}_{self.stem}"

    @property
    def has_both(self) -> bool:
        """Return whether there are times and memory."""
        return bool(self.computation and self.memory)


@dataclass(kw_only=True)
class Found:
    """All files below the given paths, by what they are."""

    sets: list[ProfileSet] = field(default_factory=list[ProfileSet])
    clusters: dict[tuple[Path, int, int], dict[Kind, list[Path]]] = field(
        default_factory=dict[tuple[Path, int, int], dict[Kind, list[Path]]]
    )
    overlaps: list[Path] = field(default_factory=list[Path])
    metas: list[Path] = field(default_factory=list[Path])
    artefacts: list[Path] = field(default_factory=list[Path])
    given: dict[Kind, list[Path]] = field(default_factory=dict[Kind, list[Path]])


# Which files there are.


def find(paths: Sequence[Path]) -> Found:
    """Return the files of Galvatron's profilers in `paths`: folders, searched to the bottom, and files."""
    found = Found()
    for path in paths:
        if is_folder(path):
            for file in _files_below(path):
                kind = _kind_of_name(file)
                if kind is not None:
                    _add(found, file, kind, path)
        else:
            kind = _kind_of_name(path) or _kind_of_content(path)
            found.given.setdefault(kind, []).append(path)
            _add(found, path, kind, path.parent)
    _pair_given(found)
    return found


def _files_below(folder: Path) -> Iterator[Path]:
    count = 0
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > _MOST_FILES:
                raise UserError(f"{folder}: holds more than {_MOST_FILES} files; name the folder of the profiles")
            if name.endswith(".json"):
                yield Path(at) / name


def _plain_stem(path: Path) -> str:
    """Return the name without ending and without the @<hash> of a version kept aside."""
    return path.stem.partition("@")[0]


def _kind_of_name(path: Path) -> Kind | None:
    stem = _plain_stem(path)
    if match := _MODEL_FILE.fullmatch(stem) or _CLUSTER_FILE.fullmatch(stem):
        return _KINDS[match[1]]
    if stem == "overlap_coefficient":
        return "overlap"
    if stem == "profile_constants":
        return "artefact"
    return "meta" if path.parent.name == "meta_configs" else None


def _kind_of_content(path: Path) -> Kind:
    """Return what a file is whose name does not say."""
    data = read_object(path)
    for kind, sign in _SIGNS:
        if any(sign.fullmatch(key) for key in data):
            return kind
    raise UserError(f"{path}: is no profile of Galvatron: none of its keys is one of theirs")


def _add(found: Found, path: Path, kind: Kind, root: Path) -> None:
    stem = _plain_stem(path)
    if kind in ("computation", "memory"):
        match = _MODEL_FILE.fullmatch(stem)
        precision, name = (match[2], match[3]) if match else (None, stem)
        same = [s for s in found.sets if (s.folder, s.stem, s.precision) == (path.parent, name, precision)]
        if not same:
            label = _label(path.parent, root, name.removesuffix("_all"))
            same = [ProfileSet(folder=path.parent, label=label, stem=name, precision=precision)]
            found.sets += same
        (same[0].computation if kind == "computation" else same[0].memory).append(path)
    elif kind in ("all_reduce", "p2p", "times"):
        match = _CLUSTER_FILE.fullmatch(stem)
        nodes, gpus = (int(match[2]), int(match[3])) if match else (0, 0)
        found.clusters.setdefault((path.parent, nodes, gpus), {}).setdefault(kind, []).append(path)
    else:
        {"overlap": found.overlaps, "meta": found.metas, "artefact": found.artefacts}[kind].append(path)


def _label(folder: Path, root: Path, name: str) -> str:
    parts = folder.relative_to(root).parts
    return "/".join([*(parts[:-1] if parts[-1:] == ("configs",) else parts), name])


def _pair_given(found: Found) -> None:
    """Put one computation and one memory file together that were named one by one, whatever they are called."""
    named = {path for paths in found.given.values() for path in paths}
    given = [one for one in found.sets if {*one.computation, *one.memory} <= named]
    if len(given) == 2 and all(len(found.given.get(kind, [])) == 1 for kind in ("computation", "memory")):  # noqa: PLR2004
        first, second = sorted(given, key=lambda one: not one.computation)
        first.memory += second.memory
        found.sets.remove(second)


# Which of them are meant.


def choose(found: Found, models: Collection[str], wanted: str | None) -> ProfileSet | str | None:
    """Return the set, or the name of a model of the 2022 artefact; None when there is no set at all."""
    sets: list[ProfileSet | str] = [*found.sets, *models]
    if wanted is not None:
        sets = [one for one in sets if _is_called(one, wanted)]
        if not sets:
            raise UserError(f"model: there is no set called {shorten(wanted)}; {_list_of([*found.sets, *models])}")
    if len(sets) > 1:
        whole = [one for one in sets if isinstance(one, str) or one.has_both]
        sets = whole if len(whole) == 1 else sets
    if len(sets) > 1:
        what = "several sets" if wanted is None else f"several sets called {wanted}"
        raise UserError(f"model: there are {what}; choose one with --model, or name its files; {_list_of(sets)}")
    return sets[0] if sets else None


def _is_called(one: ProfileSet | str, wanted: str) -> bool:
    return any(name == wanted or name.endswith(f"/{wanted}") for name in _calls(one))


def _calls(one: ProfileSet | str) -> tuple[str, ...]:
    """Return what a set may be called: where it lies and its title, or the same with all of the file's name."""
    if isinstance(one, str):
        return (one,)
    folder = one.label.removesuffix(one.title)
    return one.label, f"{folder}{one.stem}", f"{folder}{one.full_stem}"


def names(sets: Sequence[ProfileSet | str]) -> tuple[str, ...]:
    """Return a name of each set, as short as tells it from the others."""
    calls = [_calls(one) for one in sets]
    short = [known[0] for known in calls]
    return tuple(sorted({known[0] if short.count(known[0]) == 1 else known[-1] for known in calls}))


def _list_of(sets: Sequence[ProfileSet | str]) -> str:
    labels = names(sets)
    more = f" and {len(labels) - _MOST_NAMES} more" if len(labels) > _MOST_NAMES else ""
    return f"there are: {', '.join(labels[:_MOST_NAMES]) or 'none'}{more}"


def only(files: list[Path], what: str) -> Path | None:
    """Return the one file there is, None when there is none; UserError when `what` is there in several versions."""
    if len(files) > 1:
        versions = ", ".join(path.name for path in files[:_MOST_NAMES])
        raise UserError(f"{what}: there are several versions, {versions}; name the files of one")
    return files[0] if files else None


def meta_file(found: Found, chosen: ProfileSet) -> Path | None:
    """Return the file of the model's numbers: by name, or by the layer's shape where that is the name."""
    given = found.given.get("meta", [])
    if given:
        return given[0]
    near = [path for path in found.metas if path.parent.parent == chosen.folder.parent]
    named = [path for path in near if _plain_stem(path).startswith(chosen.title)]
    if named:
        return named[0]
    shape = re.search(r"hidden(\d{1,9})_head(\d{1,9})", chosen.stem)
    wanted = None if shape is None else (int(shape[1]), int(shape[2]))
    return next((path for path in near if wanted and _shape(path) == wanted), None)


def _shape(path: Path) -> tuple[object, object]:
    data = read_object(path)
    hidden = next((data[key] for key in ("dim", "n_embd", "hidden_size") if key in data), None)
    heads = next((data[key] for key in ("n_heads", "n_head", "num_attention_heads") if key in data), None)
    return hidden, heads
