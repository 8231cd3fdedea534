"""Published measurements as runs: every record of a file in the format of the shared `dev.jsonl` as a `Record`.

A record's run is built from its fields (sizes, degrees, batch, free text of hardware, precision, kernels and
recomputation), never from its id or source group, so that other files of the format are read alike. What a record
does not say and a framework's habit decides is listed in `assumed`; a record without a field that nothing decides has
no run, and `skipped` says which field.

`FILTERS` are the subsets that are fair to compare on; they look at raw records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from published_hardware import clock_of, cluster_of
from published_models import MEGATRON_VOCAB_MULTIPLE, MissingField, model_of
from published_software import (
    framework_of,
    has_dropout,
    held_of,
    recompute_of,
    refuse_precision,
    software_of,
)
from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.spec.run import MemoryKind, RunSpec
from meshwright.units import GiB

Rank = Literal["max", "first", "last", "ends"]
Raw = Mapping[str, Any]
_MICRO_BATCH_ALONE, _MICRO_BATCH_PIPELINED = 4, 2  # assumed at most, where the source does not print it
_GPU_NAMES = re.compile(
    r"GB200|GB300|GH200|B200|B300|H100|H200|H800|A100|A800|A10G|V100|MI300X|MI210|L40S|A6000|TITAN RTX|"
    r"RTX [234]\d{3}(?: Ti)?|T4"
)


@dataclass(frozen=True)
class Record:
    """One published measurement and the run that it describes.

    `memory_bytes_range` is lowest and highest reading of the printed value (GB as 1e9 or GiB); `memory_rank` says
    whose: the fullest, the first or last pipeline stage, or the fuller of both ("ends").
    """

    id: str
    group: str
    gpu: str
    kind: str
    run: RunSpec | None
    skipped: str | None
    assumed: tuple[str, ...]
    iter_time_s: float | None
    memory_bytes_range: tuple[float, float] | None
    memory_kind: MemoryKind | None
    memory_rank: Rank
    is_oom: bool
    raw: Raw

    @property
    def memory_bytes(self) -> float | None:
        """Return the middle of the range of readings."""
        return sum(self.memory_bytes_range) / 2 if self.memory_bytes_range else None


def read_records(path: Path | str) -> list[Record]:
    """Return the records of the JSON-lines file `path`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [record_of(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no file of records ({error})") from None


def read_sets(path: Path | str) -> list[dict[str, Any]]:
    """Return the ranking sets of `path`: each names the records ("ids") that differ only in their plan."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return list(found)


def record_of(raw: Raw) -> Record:
    """Return `raw` with its run, or with the reason why there is none."""
    assumed: list[str] = []
    run, skipped = None, None
    try:
        run = run_of(raw, assumed)
    except MissingField as reason:
        skipped = str(reason)
    except ValidationError as error:
        skipped = "; ".join(sorted({_plain(one["msg"]) for one in error.errors()}))
    except UserError as error:
        skipped = str(error)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # not what the format says
        skipped = f"unreadable field ({error})"
    norm, measured, rank = raw["norm"], raw["measured"], memory_rank_of(raw, assumed)
    memory_range = norm.get("peak_mem_gib_range")
    return Record(
        id=raw["id"],
        group=raw["source_group"],
        gpu=gpu_name(raw),
        kind=raw["kind"],
        run=run,
        skipped=skipped,
        assumed=tuple(assumed),
        iter_time_s=norm.get("iter_time_s"),
        memory_bytes_range=(memory_range[0] * GiB, memory_range[1] * GiB) if memory_range else None,
        memory_kind=memory_kind_of(raw),
        memory_rank=rank,
        is_oom=bool(measured.get("oom")),
        raw=raw,
    )


def run_of(raw: Raw, assumed: list[str]) -> RunSpec:
    """Return the run of `raw`; raises MissingField."""
    _refuse_what_no_run_says(raw, assumed)
    degrees = {name: _degree(raw, name) for name in ("tp", "cp", "pp", "ep")}
    cluster = cluster_of(raw, _num_devices(raw, degrees, assumed), assumed)
    framework = framework_of(raw, assumed)
    multiple = MEGATRON_VOCAB_MULTIPLE if framework in ("megatron", "megatron-deepspeed") else 1
    model = model_of(raw, vocab_multiple=multiple * degrees["tp"], assumed=assumed)
    split = degrees["tp"] * degrees["cp"] * degrees["pp"]
    dp, rest = divmod(cluster.num_devices, split)
    if rest or not dp:
        raise MissingField(f"parallel (tp x cp x pp = {split} does not divide {cluster.num_devices} GPUs)")
    if raw["parallel"].get("dp") not in (None, dp):
        assumed.append(f"dp {dp} instead of {raw['parallel']['dp']}, which the number of GPUs does not give")
    micro, batch = _batch(raw, dp, _most_per_micro_batch(raw, dp, degrees["pp"], framework), assumed)
    recompute, every = recompute_of(raw, assumed)
    return RunSpec(
        model=model,
        cluster=cluster,
        framework=framework,
        software=software_of(raw, framework, clock_of(raw, cluster.device.name), assumed),
        held=held_of(raw, framework),
        seq_len=_seq_len(raw),
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_parallel=bool(raw["parallel"].get("sp")) and degrees["tp"] > 1,
        virtual_stages=_virtual_stages(raw, degrees["pp"], assumed),
        zero_stage=_zero_stage(raw, framework, assumed),
        shard_ranks=_shard_ranks(raw, dp * degrees["cp"], cluster.devices_per_node),
        recompute=recompute,
        recompute_every=every,
        dropout=has_dropout(raw, model.family, assumed),
        schedule="gpipe" if str(raw.get("schedule") or "").lower().startswith("gpipe") else "1f1b",
        tp=degrees["tp"],
        cp=degrees["cp"],
        pp=degrees["pp"],
        ep=degrees["ep"],
    )


def gpu_name(raw: Raw) -> str:
    """Return the short name of the GPU: "A100-80" with its memory where that varies."""
    hardware = raw["hardware"]
    text = str(hardware.get("gpu") or "unknown")
    found = _GPU_NAMES.search(text)
    name = found.group(0) if found else text.split(" ")[0]
    memory_gb = hardware.get("gpu_mem_gb")
    if name in ("A100", "V100", "H100") and memory_gb:
        name += f"-{memory_gb}"
    return f"{name}-PCIe" if "pcie" in text.lower() else name


def memory_kind_of(raw: Raw) -> MemoryKind | None:
    """Return which peak a memory figure is: torch's allocated or reserved, or what the device has in use."""
    text = str(raw["measured"].get("mem_kind") or "").lower()
    if not text:
        return None
    if re.search(r"estimate|compil", text):
        return None
    if "reserved" in text or "torchtitan" in text:
        return "reserved"
    if re.search(r"allocated|active|torch max", text):
        return "allocated"
    return "device"


def memory_rank_of(raw: Raw, assumed: list[str]) -> Rank:
    """Return whose peak a memory figure is; of nvidia-smi's without a word on it, that of the first node."""
    text = str(raw["measured"].get("mem_kind") or "").lower()
    if "first and last" in text:
        return "ends"
    if "nvidia-smi" in text and "first" not in text:
        assumed.append("memory of the first stage (nvidia-smi)")
    if "first" in text or "nvidia-smi" in text:
        return "first"
    return "last" if "last rank" in text else "max"


def _refuse_what_no_run_says(raw: Raw, assumed: list[str]) -> None:
    task, offload = str(raw.get("task") or ""), str(raw.get("offload") or "")
    if "lora" in task.lower():
        raise MissingField(f"task ({task}: only some parameters are trained)")
    if offload and not offload.lower().startswith("activation"):
        raise MissingField(f"offload ({offload})")
    if offload:
        assumed.append("offloaded activations counted on the device")
    chosen = str(raw["parallel"].get("other") or "")
    if re.search(r"found by|not stored|\|", chosen):
        raise MissingField(f"parallel.other ({chosen}: no uniform plan)")
    refuse_precision(raw)
    extra = raw["measured"].get("extra")
    if isinstance(extra, Mapping) and extra.get("not_run"):
        raise MissingField("measured (did not run, cause not stated)")


def _degree(raw: Raw, name: str) -> int:
    value = raw["parallel"].get(name)
    if value is None and name in ("tp", "pp"):
        raise MissingField(f"parallel.{name}")
    return int(value or 1)


def _num_devices(raw: Raw, degrees: Mapping[str, int], assumed: list[str]) -> int:
    num_devices, dp = raw["hardware"].get("n_gpus"), raw["parallel"].get("dp")
    if num_devices is None and dp:
        num_devices = degrees["tp"] * degrees["cp"] * degrees["pp"] * dp
        assumed.append(f"{num_devices} GPUs, the product of the degrees")
    if num_devices is None:
        raise MissingField("hardware.n_gpus")
    return int(num_devices)


def _seq_len(raw: Raw) -> int:
    seq = raw["model"].get("seq")
    if seq is None:
        raise MissingField("model.seq")
    return int(seq)


def _most_per_micro_batch(raw: Raw, dp: int, pp: int, framework: str) -> int:
    """Return how large a micro-batch that is not stated may be; torchtitan makes as many as there are stages."""
    if pp == 1:
        return _MICRO_BATCH_ALONE
    batch = raw["batch"].get("gbs")
    if framework == "torchtitan" and batch:
        return max(1, int(batch) // (dp * pp))
    return _MICRO_BATCH_PIPELINED


def _batch(raw: Raw, dp: int, most: int, assumed: list[str]) -> tuple[int, int]:
    """Return micro-batch and global batch in samples; `most` bounds a micro-batch that is not stated."""
    fields = raw["batch"]
    micro, batch, accumulated = fields.get("mbs"), fields.get("gbs"), fields.get("grad_accum")
    if batch is None and fields.get("gbs_tokens"):
        batch = int(fields["gbs_tokens"]) // _seq_len(raw)
    if batch is None:
        if micro is None:
            raise MissingField("batch.mbs and batch.gbs")
        if accumulated is None:
            assumed.append("no gradient accumulation")
        return int(micro), int(micro * dp * (accumulated or 1))
    if micro is None:
        if accumulated:
            most = batch // (dp * accumulated)
        micro = max((size for size in (1, 2, 4, most) if size and size <= most and batch % (dp * size) == 0), default=1)
        assumed.append(f"micro-batch of {micro}")
    if batch % (dp * micro):
        rounded = max(1, round(batch / (dp * micro))) * dp * micro
        assumed.append(f"global batch {rounded} instead of {batch}, no multiple of dp x micro-batch")
        batch = rounded
    return int(micro), int(batch)


def _virtual_stages(raw: Raw, pp: int, assumed: list[str]) -> int:
    value = raw["parallel"].get("vpp")
    if pp == 1:
        return 1
    if value is None:
        is_interleaved = "interleaved" in str(raw.get("schedule") or "").lower()
        assumed.append(f"{2 if is_interleaved else 1} virtual stages")
        return 2 if is_interleaved else 1
    return int(value)


def _zero_stage(raw: Raw, framework: str, assumed: list[str]) -> Any:
    value = raw["parallel"].get("zero")
    if value is None:
        value = 3 if raw["parallel"].get("fsdp") else 0
        assumed.append(f"ZeRO stage {value} ({framework})")
    if framework == "torchtitan" and (raw["parallel"].get("pp") or 1) > 1:
        # With a pipeline it neither reshards after forward nor reduces gradients before the last micro-batch.
        assumed.append("only states sharded between steps (torchtitan with a pipeline)")
        return 1
    return int(value)


def _shard_ranks(raw: Raw, data_ranks: int, devices_per_node: int) -> int | None:
    """Return over how many ranks states are sharded, where the record says fewer than all data-parallel ones."""
    text = f"{raw['parallel'].get('other') or ''} {raw['parallel'].get('fsdp') or ''}".lower()
    found = re.search(r"sharded over (\d+)", text)
    if found:
        return min(int(found.group(1)), data_ranks)
    if re.search(r"hybrid.?shard|hsdp", text):
        return min(devices_per_node, data_ranks)
    return None


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ").split("\n")[0]


def _is_base(raw: Raw) -> bool:
    norm = raw["norm"]
    return bool(
        raw["kind"] == "end_to_end"
        and norm["plan_complete"]
        and raw["trust"] in ("A", "B")
        and raw["primary"]
        and norm["recompute_known"]
        and norm["degrees_multiply_to_gpus"]
    )


def _is_dense(raw: Raw) -> bool:
    return _is_base(raw) and not raw["model"]["n_experts"]


def _is_t1(raw: Raw) -> bool:
    group = raw["source_group"]
    return _is_dense(raw) and (
        group in ("korthikanti22", "mt-nlg")
        or (group == "narayanan21" and "t2-zero3" not in raw["id"])
        or (group == "megatron-readme" and raw["hardware"]["gpu"].startswith("A100"))
    )


def _is_t2(raw: Raw) -> bool:
    group = raw["source_group"]
    has_known_issue = "asynctp" in raw["id"] and raw["id"][-2] == "3"  # stated by the source
    return _is_dense(raw) and (
        group in ("llm-foundry", "tinyllama")
        or (
            group in ("torchtitan", "torchao")
            and raw["parallel"]["cp"] in (1, None)
            and not raw["hardware"]["gpu"].startswith("MI300")
            and not has_known_issue
        )
    )


def _is_t3(raw: Raw) -> bool:
    return (
        _is_dense(raw)
        and raw["source_group"] == "bigscience"
        and raw["hardware"]["gpu"].startswith("A100")
        and (raw["model"]["hidden"] / raw["model"]["heads"]) % 8 == 0
    )


def _is_t4(raw: Raw) -> bool:
    return (
        _is_dense(raw)
        and raw["source_group"] == "internevo"
        and not ("zall" in raw["id"] and raw["hardware"]["n_gpus"] >= 256)
    )


def _has_kind(raw: Raw, word: str) -> bool:
    return bool(raw["measured"]["peak_mem"]) and word in (raw["measured"]["mem_kind"] or "")


# Subsets of the fair comparison, by name; T are of time, M of memory (with a range). Their definitions name sources,
# because what is unfair about a source is a property of that source.
FILTERS: dict[str, Callable[[Raw], bool]] = {
    "base": _is_base,
    "dense": lambda raw: _is_dense(raw) and raw["source_group"] != "megatron-golden",
    "T1": _is_t1,
    "T2": _is_t2,
    "T3": _is_t3,
    "T4": _is_t4,
    "M1": lambda raw: _is_base(raw) and _has_kind(raw, "allocated"),
    "M2": lambda raw: _is_base(raw) and _has_kind(raw, "reserved"),
    "M3": lambda raw: _is_base(raw) and raw["source_group"] == "bigscience",
    "M4": lambda raw: raw["source_group"] == "galvatron-memprof" and not raw["id"].startswith("galv-v3"),
    "moe": lambda raw: _is_base(raw) and bool(raw["model"]["n_experts"]),
}


def chosen(records: list[Record], name: str) -> Iterator[Record]:
    """Yield the records of the subset called `name`."""
    return (record for record in records if FILTERS[name](record.raw))
