"""The cells of the paper's evaluation: models, clusters and budgets, and the ways to plan that are compared.

After arXiv 2307.02031, section 6. A cell is a model on a cluster with a memory budget; a row of it is a named space of
plans, from which the search takes the plan with the most samples a second over a range of global batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.cost.predict import predict
from meshwright.search.balance import stage_sizes
from meshwright.search.engine import Found, Request, search
from meshwright.search.planner import make_request
from meshwright.search.space import Partition
from meshwright.spec import library
from meshwright.spec.base import Dtype
from meshwright.spec.plan import Plan

# Rows: the spaces of the paper's baselines, of its own steps (galvatron, base, biobj, bmw) and ours.
ROWS = (
    "ddp", "zero3", "tp", "pp", "3d", "deepspeed-3d", "dp+tp", "dp+pp", "alpa-like", "uniform",
    "galvatron", "base", "biobj", "bmw", "full",
)  # fmt: skip
HUGE = (
    "bert-huge-32", "bert-huge-48", "vit-huge-32", "vit-huge-48", "t5-large-32", "t5-large-48", "t5-512-4-32",
    "t5-512-4-48", "swin-huge-32", "swin-huge-48",
)  # fmt: skip
XHUGE = ("bert-xhuge", "vit-xhuge")
GPT3 = ("gpt3-15b", "gpt3-39b", "gpt3-65b")
GPT3_SEQ_LEN = 2048
# The largest batch a device: so many samples that throughput no longer grows with them.
MOST_SAMPLES = {"vit": 128, "swin": 128, "bert": 32, "t5": 32, "gpt3": 16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Cells of one cluster. `budgets`: memory a device may use, None for what the device has less the usual margin."""

    cluster: str
    models: tuple[str, ...]
    budgets: tuple[str | None, ...]
    dtype: Dtype


SETTINGS = (
    Setting(cluster="8xrtx-titan-24g", models=HUGE, budgets=("8GB", "12GB", "16GB", "20GB"), dtype="fp32"),
    Setting(cluster="2x8xrtx-titan-24g", models=HUGE, budgets=("8GB", "16GB"), dtype="fp32"),
    Setting(cluster="2x8xa100-sxm-40g", models=HUGE, budgets=("8GB", "16GB"), dtype="bf16"),
    Setting(cluster="8x8xa100-sxm-40g", models=XHUGE, budgets=("16GB", "32GB"), dtype="bf16"),
    Setting(cluster="4x8xa100-sxm-80g", models=GPT3, budgets=(None,), dtype="bf16"),
    Setting(cluster="8x8xa100-sxm-80g", models=GPT3, budgets=(None,), dtype="bf16"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one cluster with one budget."""

    cluster: str
    model: str
    budget: str | None
    dtype: Dtype
    overlaps: bool = True

    @property
    def name(self) -> str:
        return f"{self.model} on {self.cluster} at {self.budget or 'all memory'}"


def cells() -> list[Cell]:
    """Return every cell."""
    return [
        Cell(cluster=setting.cluster, model=model, budget=budget, dtype=setting.dtype)
        for setting in SETTINGS
        for model in setting.models
        for budget in setting.budgets
    ]


def solved(
    cell: Cell, row: str, *, time_limit_s: float, partition: Partition | None = None, num_stages: int | None = None
) -> dict[str, Any]:
    """Return the best plan of a row of `cell` as plain data; `samples_per_s` 0 where nothing fits."""
    outcome = search(_request(cell, row, time_limit_s, partition, num_stages))
    result: dict[str, Any] = {
        "cluster": cell.cluster,
        "model": cell.model,
        "budget": cell.budget,
        "row": row,
        "partition": partition or "exact",
        "num_stages": num_stages,
        "overlaps": cell.overlaps,
        "samples_per_s": 0.0,
    }
    if not isinstance(outcome, Found):
        return result | {"reason": outcome.reason}
    return result | _described(outcome) | {"search_s": outcome.search_s}


def _request(cell: Cell, row: str, time_limit_s: float, partition: Partition | None, num_stages: int | None) -> Request:
    cluster = library.cluster(cell.cluster)
    if not cell.overlaps:
        cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"overlap_slowdown": None})})
    family = cell.model.partition("-")[0]
    return make_request(
        cell.model,
        cluster,
        global_batch=f"{cluster.num_devices}..{cluster.num_devices * MOST_SAMPLES[family]}",
        seq_len=GPT3_SEQ_LEN if family == "gpt3" else None,
        memory=cell.budget,
        dtype=cell.dtype,
        space=row,
        partition=partition,
        stages=num_stages,
        time_limit_s=time_limit_s,
    )


def _described(found: Found) -> dict[str, Any]:
    plan, predicted = found.plan, found.plan.predicted
    assert predicted is not None
    read_again = Plan.model_validate_json(plan.model_dump_json())
    again = predict(read_again)
    return {
        "samples_per_s": predicted.samples_per_s,
        "step_s": predicted.step_s,
        "batch": plan.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "layers": stage_sizes(plan.boundaries),
        "num_strategies": len(set(plan.strategies)),
        "is_uniform": len(set(plan.strategies[1:-1])) == 1,
        "strategies": sorted({strategy.label for strategy in plan.strategies}),
        "gap": plan.proof.gap if plan.proof is not None else None,
        "stopped": found.stopped,
        "margin_bytes": plan.budget.usable_bytes - again.peak_bytes,
        "reprices": read_again == plan and again.step_s == predicted.step_s,
        "balances": [
            {"name": b.name, "layers": stage_sizes(b.boundaries), "alpha_t": b.alpha_t, "alpha_m": b.alpha_m}
            for b in found.balances
        ],
    }
