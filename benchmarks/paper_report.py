"""docs/evaluation.md and its plots, from the results of paper_evaluation.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Result = dict[str, Any]
Key = tuple[str, str, str]
# What published runs were missed by: median and 9th decile of dense models (docs/cost-model.md).
BAND_MEDIAN, BAND_P90 = 0.033, 0.128
GAINS = ("uniform", "galvatron", "alpa-like", "bmw")
STEPS = {
    "ddp": "data parallelism",
    "dp+pp": "pipelines, even stages",
    "3d": "tensor parallelism, one strategy for all layers",
    "galvatron": "sharded data parallelism, a strategy for each layer",
    "base": "recomputation",
    "bmw": "stages balanced by the paper's loop",
    "full": "stages of any size, exactly; hybrid sharding",
}
_COMMAND = "python benchmarks/paper_evaluation.py --json benchmarks/data/paper_evaluation.json --report docs"
_ALL = "all, less the usual margin"


def write_report(known: Result, folder: Path) -> None:
    """Write evaluation.md and evaluation-*.png into `folder`."""
    by_cell = cells_of(known["results"])
    plot_gains(by_cell, folder / "evaluation-gains.png")
    plot_budgets(known["results"], folder / "evaluation-budgets.png")
    (folder / "evaluation.md").write_text("\n".join(lines(known, by_cell)) + "\n")


def cells_of(results: list[Result]) -> dict[Key, dict[str, Result]]:
    """Return the rows of each (cluster, model, budget)."""
    found: dict[Key, dict[str, Result]] = {}
    for result in results:
        if result["part"] == "cells":
            key = result["cluster"], result["model"], result["budget"] or _ALL
            found.setdefault(key, {})[result["row"]] = result
    return found


def lines(known: Result, by_cell: dict[Key, dict[str, Result]]) -> Iterator[str]:
    """Yield the page."""
    yield from _head(known)
    yield from _tables(by_cell)
    yield from _gains(by_cell)
    yield from _steps(by_cell)
    yield from _ranks(by_cell)
    yield from _checks(by_cell)
    yield from _partitions(known["results"])
    yield from _overlap(known["results"])


def _head(known: Result) -> Iterator[str]:
    took = f"{known['took_s'] / 60:.0f} minutes"
    yield f"""# The paper's evaluation, as an ablation of the search space

All numbers on this page are **predicted** by meshwright's cost model; nothing here was run. A row is a space of plans
named as in arXiv 2307.02031 (section 6) and searched by our solver, not another system: the page says what a space is
worth under one model, and claims nothing about the software that others wrote. `alpa-like` is an approximation: Alpa
also cuts clusters into unequal meshes, which no space here can express.

    {_COMMAND}

{len(known["results"])} searches of at most {known["time_limit_s"]:g} s, and {known["num_again"]} of them, which
this ended, again with {known["again_limit_s"]:g} s; {known["jobs"]} side by side: {took}.

How to read it: the global batch is swept from one sample a device up (8 GPUs: to 256 samples of text or 1,024 images;
GPT-3: 16 samples a device); a cell has the most samples a second over these batches, and the batch that has it. Every
row may cut its batch into micro-batches (gradient accumulation without a pipeline, 1F1B with one). Titan RTX: fp32
without tensor cores, as the constants of the paper's artefact; A100: bf16 compute, fp32 states. Memory is what one
device may use. BERT and T5-Large: 512 tokens (and 512 targets); T5-512/4: 512 and 4; ViT and Swin: 224 x 224 pixels;
GPT-3: 2,048 tokens. `-` means that nothing fits or that the space has no plan. A star marks a search that its time
limit ended; where a smaller space then beat `full`, `full` was searched again with five times the limit.
"""


def _tables(by_cell: dict[Key, dict[str, Result]]) -> Iterator[str]:
    clusters = list(dict.fromkeys(cluster for cluster, _, _ in by_cell))
    for cluster in clusters:
        yield f"## {cluster}\n"
        rows = list(next(rows for (name, _, _), rows in by_cell.items() if name == cluster))
        rows.sort(key=_order)
        yield "| model | memory | " + " | ".join(rows) + " |"
        yield "|---|---|" + "--:|" * len(rows)
        for (name, model, budget), found in sorted(by_cell.items(), key=lambda item: _cell_order(item[0])):
            if name == cluster:
                yield f"| {model} | {budget} | " + " | ".join(_entry(found.get(row)) for row in rows) + " |"
        yield ""


def _entry(result: Result | None) -> str:
    if result is None or not result["samples_per_s"]:
        return "-"
    star = "*" if result["stopped"] else ""
    return f"{_number(result['samples_per_s'])}{star} ({result['batch']})"


def _gains(by_cell: dict[Key, dict[str, Result]]) -> Iterator[str]:
    yield "## What `full` gains\n"
    yield (
        "Samples a second of `full` over another row, less one, over all cells in which that row has a plan, zeros "
        f"included. The cost model missed published runs by {100 * BAND_MEDIAN:.1f} % at the median and "
        f"{100 * BAND_P90:.1f} % at the 9th decile; errors of two plans of one model on one machine are mostly shared, "
        "so smaller gains may be real, but they are not shown.\n"
    )
    yield "| over | cells | zero | median | p90 | max | above 3.3 % | above 12.8 % | row has no plan |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in GAINS:
        gains = gains_over(by_cell, row)
        none = sum(1 for found in by_cell.values() if found["full"]["samples_per_s"] and not _speed(found, row))
        zero = sum(1 for gain in gains if gain < 1e-6)
        cells = [f"{100 * share:.1f} %" for share in (median(gains), _decile(gains), max(gains))]
        above = [sum(1 for gain in gains if gain > band) for band in (BAND_MEDIAN, BAND_P90)]
        yield f"| {row} | {len(gains)} | {zero} | " + " | ".join(cells) + f" | {above[0]} | {above[1]} | {none} |"
    yield "\n![Gains of full over other rows, sorted](evaluation-gains.png)\n"
    for model in dict.fromkeys(model for _, model, _ in by_cell):
        shares = [
            found["full"]["samples_per_s"] / _speed(found, "uniform") - 1
            for (_, name, _), found in by_cell.items()
            if name == model and _speed(found, "uniform")
        ]
        if shares:
            yield f"- {model}: over one strategy for all layers {_range(shares)}"
    yield ""


def gains_over(by_cell: dict[Key, dict[str, Result]], row: str) -> list[float]:
    """Return the gains of `full` over `row`, sorted."""
    return sorted(
        found["full"]["samples_per_s"] / _speed(found, row) - 1 for found in by_cell.values() if _speed(found, row)
    )


def _steps(by_cell: dict[Key, dict[str, Result]]) -> Iterator[str]:
    yield "## Dimensions one by one\n"
    yield "Each row adds to the one before. Share: samples a second over those of `full`, where both have a plan.\n"
    yield "| space | adds | cells with a plan | share of `full`, median | least |"
    yield "|---|---|--:|--:|--:|"
    for row, adds in STEPS.items():
        shares = [
            _speed(found, row) / found["full"]["samples_per_s"] for found in by_cell.values() if _speed(found, row)
        ]
        if shares:
            yield f"| {row} | {adds} | {len(shares)} | {100 * median(shares):.1f} % | {100 * min(shares):.1f} % |"
    yield ""


def _ranks(by_cell: dict[Key, dict[str, Result]]) -> Iterator[str]:
    better = [
        (key, row, found[row]["samples_per_s"] / found["full"]["samples_per_s"] - 1)
        for key, found in by_cell.items()
        for row in found
        if found[row]["samples_per_s"] > found["full"]["samples_per_s"] * (1 + 1e-9)
    ]
    yield "## Ranks\n"
    good, cells = len(by_cell) - len({key for key, _, _ in better}), len(by_cell)
    yield f"`full` is at least as fast as every other row in {good} of {cells} cells."
    for (cluster, model, budget), row, share in better:
        yield f"- {row} is {100 * share:.2f} % faster for {model} on {cluster} at {budget}"
    places: dict[int, int] = {}
    for found in by_cell.values():
        if _speed(found, "bmw"):
            place = 1 + sum(1 for row in found if found[row]["samples_per_s"] > _speed(found, "bmw") * (1 + 1e-9))
            places[place] = places.get(place, 0) + 1
    yield (
        "\nPlace of `bmw` (the paper's loop, with every dimension) among the rows, 1 = none is faster: "
        + ", ".join(f"{place}: {count} cells" for place, count in sorted(places.items()))
        + ".\n"
    )


def _checks(by_cell: dict[Key, dict[str, Result]]) -> Iterator[str]:
    found = [result for rows in by_cell.values() for result in rows.values() if result["samples_per_s"]]
    margins = sorted(result["margin_bytes"] / 2**30 for result in found)
    gaps = sorted(rows["full"]["gap"] for rows in by_cell.values() if rows["full"]["samples_per_s"])
    yield "## Checks\n"
    yield (
        f"{sum(r['reprices'] for r in found)} of {len(found)} plans read from their file are equal and have the same "
        f"price; {sum(m >= 0 for m in margins)} fit by the prediction that `check` makes, with "
        f"{margins[0]:.3f} to {margins[-1]:.1f} GiB to spare (median {median(margins):.2f}). Of {len(gaps)} `full` "
        f"plans {sum(gap == 0 for gap in gaps)} are proved optimal in their space, the gap of the others is at most "
        f"{100 * gaps[-1]:.1f} %.\n"
    )


def _partitions(results: list[Result]) -> Iterator[str]:
    chosen = [result for result in results if result["part"] == "partitions"]
    stages = chosen[0]["num_stages"] if chosen else 0
    yield "## Ways to cut stages\n"
    yield (
        f"Space `full` on 8 Titan RTX at 12 GB with {stages} stages of 2 devices, under each `--partition`: samples a "
        "second, and the layers of each stage (embedding and head, and Swin's merges, included).\n"
    )
    yield "| model | even | memory | time | bmw | exact | even loses |"
    yield "|---|---|---|---|---|---|--:|"
    models = list(dict.fromkeys(result["model"] for result in chosen))
    by_model = {m: {r["partition"]: r for r in chosen if r["model"] == m} for m in models}
    for model, mine in by_model.items():
        cells = [_stages(mine.get(name)) for name in ("even", "memory", "time", "bmw", "exact")]
        even, exact = (mine[name]["samples_per_s"] for name in ("even", "exact"))
        loss = f"{100 * (exact / even - 1):.1f} %" if even else "no plan"
        yield f"| {model} | " + " | ".join(cells) + f" | {loss} |"
    yield (
        "\nDegrees of balance of the loop (`bmw`): alpha_t = 1 - max time / sum of times over stages, alpha_m the same "
        "of memory, of the partition p_m that balances memory, of p_t that balances time, and of the answer.\n"
    )
    yield "| model | partition | layers | alpha_t | alpha_m |"
    yield "|---|---|---|--:|--:|"
    for model, mine in by_model.items():
        for b in mine.get("bmw", {}).get("balances", []):
            sizes = "/".join(map(str, b["layers"]))
            yield f"| {model} | {b['name']} | {sizes} | {b['alpha_t']:.3f} | {b['alpha_m']:.3f} |"
    yield ""


def _overlap(results: list[Result]) -> Iterator[str]:
    yield "## Overlap, and memory\n"
    yield "Space `full`, 8 Titan RTX, 12 GB: communication beside compute (slowed by 1.3), or one after the other.\n"
    yield "| model | overlapping | one after the other | gain |"
    yield "|---|--:|--:|--:|"
    chosen = [result for result in results if result["part"] == "overlap"]
    for model in dict.fromkeys(result["model"] for result in chosen):
        on, off = (
            next(r["samples_per_s"] for r in chosen if r["model"] == model and r["overlaps"] is overlaps)
            for overlaps in (True, False)
        )
        yield f"| {model} | {_number(on)} | {_number(off)} | {100 * (on / off - 1):.1f} % |"
    yield "\n![Throughput against memory](evaluation-budgets.png)\n"


def plot_gains(by_cell: dict[Key, dict[str, Result]], path: Path) -> None:
    """Plot the sorted gains of `full` over other rows, with the error bands of the cost model."""
    figure, axes = _axes()
    for row in GAINS:
        gains = gains_over(by_cell, row)
        axes.plot([100 * gain for gain in gains], label=f"over {row}")
    for band, style in ((BAND_MEDIAN, ":"), (BAND_P90, "--")):
        axes.axhline(100 * band, color="grey", linestyle=style, label=f"model error {100 * band:.1f} %")
    axes.set_xlabel("cells, sorted")
    axes.set_ylabel("predicted gain of full, %")
    axes.set_yscale("symlog", linthresh=1)
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_budgets(results: list[Result], path: Path) -> None:
    """Plot throughput against memory, `full` and one strategy for all layers."""
    figure, axes = _axes()
    chosen = [result for result in results if result["part"] == "budgets" and result["samples_per_s"]]
    for number, model in enumerate(dict.fromkeys(result["model"] for result in chosen)):
        for row, style in (("full", "-"), ("uniform", ":")):
            points = sorted(
                (float(r["budget"].removesuffix("GB")), r["samples_per_s"])
                for r in chosen
                if (r["model"], r["row"]) == (model, row)
            )
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=f"{model}, {row}")
    axes.set_xlabel("memory of a device, GB")
    axes.set_ylabel("predicted samples/s")
    axes.set_yscale("log")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _axes() -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(8, 4.5), layout="constrained")


def _speed(found: dict[str, Result], row: str) -> float:
    speed: float = found[row]["samples_per_s"] if row in found else 0.0
    return speed


def _stages(result: Result | None) -> str:
    if result is None or not result["samples_per_s"]:
        return "-"
    return f"{_number(result['samples_per_s'])} ({_sizes(result)})"


def _sizes(result: Result) -> str:
    return "/".join(str(size) for size in result["layers"])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _decile(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def _range(shares: list[float]) -> str:
    return f"{100 * min(shares):.1f} to {100 * max(shares):.1f} %, median {100 * median(shares):.1f} %"


def _order(row: str) -> int:
    from paper_cells import ROWS

    return ROWS.index(row)


def _cell_order(key: Key) -> tuple[str, str, float]:
    cluster, model, budget = key
    return cluster, model, float(budget.removesuffix("GB")) if budget != _ALL else 0.0


if __name__ == "__main__":
    write_report(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
