"""Parts of runs against formulas: activation bytes of one layer, states, seconds of one layer.

Short runs that differ only in their number of layers (`kind` component_memory) print what a rank has allocated after
the forward pass beside its states (`measured.extra.per_rank.*.activation_mb`); the difference of two of them over the
difference of their layers is what one layer keeps for the backward pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from published_records import Record
from published_statistics import grouped, summarise

from meshwright.cost.run_memory import run_memory
from meshwright.cost.run_time import run_time
from meshwright.units import MiB


@dataclass(frozen=True)
class Slope:
    """What one layer keeps, of two runs."""

    ids: tuple[str, str]
    model: str
    plan: str
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def slopes_of(records: Iterable[Record]) -> dict[str, Any]:
    """Return the errors of all slopes, by model, and the slopes."""
    slopes = [slope for some in grouped(records, _same_but_layers).values() for slope in _slopes(some)]
    by_model = grouped(slopes, lambda one: one.model)
    whole = [one for one in slopes if "none" in one.plan]
    return {
        "all": asdict(summarise([one.error for one in slopes])),
        "nothing_recomputed": asdict(summarise([one.error for one in whole])),
        "by_model": {name: asdict(summarise([one.error for one in some])) for name, some in by_model.items()},
        "slopes": [{**asdict(one), "error": one.error} for one in slopes],
    }


def states_of(records: Iterable[Record]) -> dict[str, Any]:
    """Return the errors of what the fuller end of a pipeline holds after the backward pass, gradients among it."""
    errors = []
    for record in records:
        ranks = (record.raw["measured"]["extra"] or {}).get("per_rank", {}).values()
        measured = max((rank["model_states_mb"] for rank in ranks), default=0) * MiB
        if record.run is not None and measured:
            stages = run_memory(record.run, "allocated").stages
            errors.append(max(stages[0].held.total_bytes, stages[-1].held.total_bytes) / measured - 1)
    return asdict(summarise(errors))


def layers_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return measured and predicted seconds of one layer, forward and backward, of `component_layer` records."""
    found = []
    for record in records:
        if record.kind != "component_layer" or record.run is None:
            continue
        measured_ms = (record.raw["measured"].get("extra") or {}).get("layer_fwd_bwd_ms")
        if not measured_ms:
            continue
        stage = run_time(record.run).stages[0]
        layers_s = stage.total_s - stage.embedding_s - stage.head_s - stage.copies_s - stage.shards_s
        found.append(
            {
                "id": record.id,
                "measured_s": measured_ms / 1e3,
                "predicted_s": layers_s / record.run.model.num_blocks,
            }
        )
    return found


def _same_but_layers(record: Record) -> str:
    raw = record.raw
    sizes = {name: value for name, value in raw["model"].items() if name not in ("layers", "name", "params_b")}
    fields = [raw["source"].get("path"), sizes, raw["parallel"], raw["batch"], raw["recompute"], raw["schedule"]]
    return json.dumps(fields, sort_keys=True)


def _slopes(records: list[Record]) -> list[Slope]:
    found = []
    records = [one for one in records if one.run is not None and one.run.pp == 1 and one.kind == "component_memory"]
    records.sort(key=lambda one: one.raw["model"]["layers"])
    for few, many in pairwise(records):
        num_layers = many.raw["model"]["layers"] - few.raw["model"]["layers"]
        measured = _measured_bytes(many) - _measured_bytes(few)
        if num_layers > 0 and measured > 0:
            predicted = _predicted_bytes(many) - _predicted_bytes(few)
            parallel, sizes = many.raw["parallel"], many.raw["model"]
            found.append(
                Slope(
                    ids=(few.id, many.id),
                    model=f"{sizes['arch']} h{sizes['hidden']} seq {sizes['seq']}",
                    plan=f"tp{parallel['tp']} {many.raw['recompute']}{' sp' if parallel['sp'] else ''}",
                    measured_bytes=measured / num_layers,
                    predicted_bytes=predicted / num_layers,
                )
            )
    return found


def _measured_bytes(record: Record) -> float:
    ranks = record.raw["measured"]["extra"]["per_rank"].values()
    return max(rank["activation_mb"] for rank in ranks) * MiB


def _predicted_bytes(record: Record) -> float:
    assert record.run is not None
    return run_memory(record.run, "allocated").stages[0].activation_bytes
