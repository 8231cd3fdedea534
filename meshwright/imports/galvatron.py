"""A profile set of Hetu-Galvatron: one model's and one cluster's files as one value, and what they lack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import UserError
from meshwright.files import shorten
from meshwright.imports.galvatron_2022 import Artefact, read_artefact
from meshwright.imports.galvatron_files import (
    Computation,
    Data,
    ForwardTime,
    LayerMemory,
    Memory,
    OtherMemory,
    Place,
    read_all_reduce,
    read_collective_times,
    read_computation,
    read_memory,
    read_object,
    read_overlap,
    read_p2p,
)
from meshwright.imports.galvatron_sets import Found, Kind, ProfileSet, choose, find, meta_file, names, only

_ABOUT: dict[Kind, str] = {
    "all_reduce": "allreduce_bandwidth_<N>nodes_<G>gpus_per_node.json",
    "p2p": "p2p_bandwidth_<N>nodes_<G>gpus_per_node.json",
    "times": "sp_time_<N>nodes_<G>gpus_per_node.json",
    "overlap": "overlap_coefficient.json",
}
_PLACES: dict[Place, str] = {
    "alone": "other_memory_pp_off",
    "first": "other_memory_pp_on_first",
    "last": "other_memory_pp_on_last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One cluster. Bus bandwidths by (ranks, whether consecutive); seconds by (operation, ranks, message bytes)."""

    num_nodes: int
    gpus_per_node: int
    all_reduce_bytes_per_s: Mapping[tuple[int, bool], float]
    p2p_bytes_per_s: Mapping[int, float]
    collective_s: Mapping[tuple[str, int, int], float]
    overlap_slowdown: float | None

    @property
    def num_gpus(self) -> int:
        """Return the number of ranks."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class GalvatronProfile:
    """One profile set in bytes and seconds. `missing` names what a whole set would have beside this.

    `precision` is bf16, fp16 or fp32, None where no file names it; `seq_len` the length that the file name
    gives, for keys without one; `meta` the model's numbers as its file has them. `notes` say what was left out.
    """

    name: str
    precision: str | None
    seq_len: int | None
    times: tuple[ForwardTime, ...] = ()
    layers: tuple[LayerMemory, ...] = ()
    others: tuple[OtherMemory, ...] = ()
    hardware: Hardware | None = None
    meta: Data | None = None
    meta_file: str = ""
    artefact: Artefact | None = None
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is missing."""
        return not self.missing


def read_galvatron(
    paths: Sequence[str | Path], *, model: str | None = None, hardware: str | None = None
) -> GalvatronProfile:
    """Return the profile set in folders (searched to the bottom) or files.

    `model` picks one of several sets by its name, `hardware` one of several clusters as
    NODESxGPUS. Raises UserError in one line for a broken file, and for a choice that is open.
    """
    found = find([Path(path) for path in paths])
    models = {f"vldb22/{name}": artefact for path in found.artefacts for name, artefact in read_artefact(path).items()}
    chosen = choose(found, models, model)
    if isinstance(chosen, str):
        return _of_artefact(chosen, models[chosen], found.artefacts)
    near = chosen.folder if chosen is not None else None
    cluster, cluster_files, missing = _hardware(found, near, hardware)
    if chosen is None and cluster is None:
        raise UserError(f"{paths[0]}: holds no profile of Galvatron: no computation_profiling_*.json and no hardware")
    if chosen is None:
        missing = ["computation_profiling_*.json: no file", "memory_profiling_*.json: no file", *missing]
        return GalvatronProfile(
            name="hardware", precision=None, seq_len=None, hardware=cluster, files=cluster_files, missing=tuple(missing)
        )
    return _of_set(found, chosen, cluster, cluster_files, missing)


def set_names(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the names of all sets below `paths`, as `model` takes them."""
    found = find([Path(path) for path in paths])
    models = [f"vldb22/{name}" for path in found.artefacts for name in read_artefact(path)]
    return names([*found.sets, *models])


def _of_set(
    found: Found, chosen: ProfileSet, cluster: Hardware | None, cluster_files: tuple[str, ...], missing: list[str]
) -> GalvatronProfile:
    computation, memory = (only(files, chosen.label) for files in (chosen.computation, chosen.memory))
    meta = meta_file(found, chosen)
    read = Computation(times=(), dropped=()) if computation is None else read_computation(computation)
    tables = Memory(layers=(), others=()) if memory is None else read_memory(memory)
    lacking = [
        f"{kind}_profiling_{chosen.full_stem}.json: no file"
        for kind, path in (("computation", computation), ("memory", memory))
        if path is None
    ]
    lacking += _lacking(computation, read.times, memory, tables)
    lacking += [] if meta else [f"meta_configs: no file for {chosen.title}"]
    length = re.search(r"seqlen(\d{1,9})", chosen.stem)
    name = "" if computation is None else computation.name
    return GalvatronProfile(
        name=chosen.title,
        precision=chosen.precision,
        seq_len=None if length is None else int(length[1]),
        times=read.times,
        layers=tables.layers,
        others=tables.others,
        hardware=cluster,
        meta=None if meta is None else read_object(meta),
        meta_file="" if meta is None else str(meta),
        files=(*(str(path) for path in (computation, memory, meta) if path is not None), *cluster_files),
        missing=(*lacking, *missing),
        notes=tuple(f"{name}: {key}: not above zero, noise" for key in read.dropped),
    )


def _lacking(
    computation: Path | None,
    times: tuple[ForwardTime, ...],
    memory: Path | None,
    tables: Memory,
) -> Iterator[str]:
    """Yield the keys that the two files lack."""
    timed = {time.layer_type for time in times}
    stored = {layer.layer_type for layer in tables.layers}
    wanted = {kind for kind in timed | stored if kind is not None} or {0}
    if computation is not None:
        for kind in sorted(wanted - timed):
            yield f"{computation.name}: layertype_{kind}: no time, and no two runs to make it from"
        if None not in timed:
            yield f"{computation.name}: layertype_other: no time"
    if memory is not None:
        for kind in sorted(wanted - stored):
            yield f"{memory.name}: layertype_{kind}: no table, only raw runs"
        for place in sorted(_PLACES.keys() - {other.place for other in tables.others}):
            yield f"{memory.name}: {_PLACES[place]}: no table"


def _of_artefact(label: str, artefact: Artefact, files: list[Path]) -> GalvatronProfile:
    """Return a model of the 2022 artefact; its communication is kept as the bandwidths of one stage."""
    hardware = Hardware(
        num_nodes=1,
        gpus_per_node=8,
        all_reduce_bytes_per_s=artefact.bus_bytes_per_s(1),
        p2p_bytes_per_s={},
        collective_s={},
        overlap_slowdown=artefact.overlap_slowdown,
    )
    return GalvatronProfile(
        name=label,
        precision="fp32",
        seq_len=None,
        times=artefact.times,
        layers=artefact.layer_memories,
        others=(artefact.other,),
        hardware=hardware,
        artefact=artefact,
        files=tuple(map(str, files)),
        missing=("p2p_bandwidth: not among the constants of 2022", "sp_time: not among the constants of 2022"),
    )


def _hardware(
    found: Found, near: Path | None, wanted: str | None
) -> tuple[Hardware | None, tuple[str, ...], list[str]]:
    """Return the cluster, its files and what it lacks: the one that was asked for, nearest to the model's files."""
    clusters = {at: kinds for at, kinds in found.clusters.items() if wanted in (None, f"{at[1]}x{at[2]}")}
    if wanted is not None and not clusters:
        known = ", ".join(sorted({f"{nodes}x{gpus}" for _, nodes, gpus in found.clusters})) or "none"
        raise UserError(f"hardware: there is no cluster {shorten(wanted)} (nodes x GPUs); there are: {known}")
    if not clusters:
        return None, (), [f"{about}: no file" for about in _ABOUT.values()]

    def fitness(at: tuple[Path, int, int]) -> tuple[int, int, int]:
        shared = 0 if near is None else sum(a == b for a, b in zip(at[0].parts, near.parts, strict=False))
        return shared, len(clusters[at]), at[1] * at[2]

    at = max(clusters, key=fitness)
    folder, nodes, gpus = at
    overlaps = [path for path in found.overlaps if path.parent == folder] or found.given.get("overlap", [])
    kinds: dict[Kind, list[Path]] = {**clusters[at], "overlap": overlaps}
    files = {kind: path for kind, paths in kinds.items() if (path := only(paths, str(folder))) is not None}
    bandwidths: Mapping[tuple[int, bool], float] = read_all_reduce(files["all_reduce"]) if "all_reduce" in files else {}
    times: Mapping[tuple[str, int, int], float] = read_collective_times(files["times"]) if "times" in files else {}
    if not nodes:  # the name does not say: the largest group is the node
        nodes, gpus = 1, max([1, *(ranks for ranks, _ in bandwidths), *(ranks for _, ranks, _ in times)])
    cluster = Hardware(
        num_nodes=nodes,
        gpus_per_node=gpus,
        all_reduce_bytes_per_s=bandwidths,
        p2p_bytes_per_s=read_p2p(files["p2p"]) if "p2p" in files else {},
        collective_s=times,
        overlap_slowdown=read_overlap(files["overlap"]) if "overlap" in files else None,
    )
    missing = [
        f"{_ABOUT[kind].replace('<N>', str(nodes)).replace('<G>', str(gpus))}: no file"
        for kind in _ABOUT
        if kind not in files
    ]
    if "all_reduce" in files:
        missing += _missing_groups(files["all_reduce"], cluster)
    return cluster, tuple(str(path) for path in files.values()), missing


def _missing_groups(path: Path, cluster: Hardware) -> Iterator[str]:
    """Yield the groups without a bandwidth: every power of two, consecutive and strided, all ranks consecutive only."""
    ranks = 2
    while ranks <= cluster.num_gpus:
        for consecutive in (True, False) if ranks < cluster.num_gpus else (True,):
            if (ranks, consecutive) not in cluster.all_reduce_bytes_per_s:
                yield f"{path.name}: allreduce_size_{ranks}_consec_{int(consecutive)}: no bandwidth"
        ranks *= 2
