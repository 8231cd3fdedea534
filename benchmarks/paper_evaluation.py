"""The paper's evaluation as an ablation of the search space under one cost model: every cell, every row.

    python benchmarks/paper_evaluation.py [--time-limit 10] [--jobs 2] [--json OUT] [--report docs] [--only TEXT]

For each model, cluster and budget of arXiv 2307.02031, section 6 (`paper_cells.py`), the plan with the most samples a
second over a range of batch sizes is searched in each named space, and priced by our cost model. Nothing here was
run, and nothing is claimed against other systems: a row is a space of plans, searched by our solver, with 1F1B
micro-batches and gradient accumulation wherever they help. Also: dimensions one by one, ways to cut stages, overlap
on and off, more and less memory. `--json` keeps the results, `--report` writes evaluation.md and its plots from them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

sys.path.insert(0, str(Path(__file__).parent))
from paper_cells import HUGE, ROWS, Cell, cells, solved  # noqa: E402
from paper_report import write_report  # noqa: E402

from meshwright.search.space import Partition  # noqa: E402

TITANS, STAGES = "8xrtx-titan-24g", 4
SOME = ("bert-huge-32", "t5-512-4-32", "swin-huge-32", "vit-huge-32")
PARTITIONS: tuple[Partition, ...] = ("even", "memory", "time", "bmw", "exact")


AGAIN = 4  # times the limit, for searches that it ended
LONGER = 5  # times that, for a search of `full` that a smaller space beat


class Question(NamedTuple):
    """One search."""

    part: str
    cell: Cell
    row: str
    partition: Partition | None = None
    num_stages: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each search")
    parser.add_argument("--jobs", type=int, default=2, help="searches side by side, one thread each")
    parser.add_argument("--only", default="", help="only cells whose name holds this text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="a folder for evaluation.md and its plots")
    options = parser.parse_args()
    started = time.perf_counter()
    asked = [question for question in questions() if options.only in question.cell.name]
    found = dict(answered(asked, options.jobs, options.time_limit))
    ended = [question for question, result in found.items() if result.get("stopped")]
    found.update(answered(ended, options.jobs, AGAIN * options.time_limit))
    found.update(answered(list(beaten(found)), options.jobs, AGAIN * LONGER * options.time_limit))
    results = list(found.values())
    took_s = time.perf_counter() - started
    print(f"{len(results)} searches in {took_s:.0f} s")
    limits = {"time_limit_s": options.time_limit, "again_limit_s": AGAIN * options.time_limit}
    known: dict[str, Any] = {**limits, "num_again": len(ended), "jobs": options.jobs, "took_s": took_s}
    known["results"] = sorted(results, key=lambda r: (r["part"], r["cluster"], r["model"], str(r["budget"]), r["row"]))
    if options.json is not None:
        options.json.write_text(json.dumps(known, indent=1))
    if options.report is not None:
        write_report(known, options.report)


def questions() -> Iterator[Question]:
    """Yield every search of the evaluation."""
    for cell in cells():
        for row in ROWS:
            yield Question("cells", cell, row)
    for model in HUGE:
        for partition in PARTITIONS:
            cell = Cell(cluster=TITANS, model=model, budget="12GB", dtype="fp32")
            yield Question("partitions", cell, "full", partition, STAGES)
    for model in SOME:
        for overlaps in (True, False):
            cell = Cell(cluster=TITANS, model=model, budget="12GB", dtype="fp32", overlaps=overlaps)
            yield Question("overlap", cell, "full")
        for gigabytes in range(4, 25, 2):
            cell = Cell(cluster=TITANS, model=model, budget=f"{gigabytes}GB", dtype="fp32")
            for row in ("uniform", "full"):
                yield Question("budgets", cell, row)


def beaten(found: dict[Question, dict[str, Any]]) -> Iterator[Question]:
    """Yield the searches of `full` that a smaller space beat: a time limit has ended them."""
    best: dict[Cell, float] = {}
    for question, result in found.items():
        if question.part == "cells":
            best[question.cell] = max(best.get(question.cell, 0.0), result["samples_per_s"])
    for question, result in found.items():
        if (question.part, question.row) == ("cells", "full") and result["samples_per_s"] < best[question.cell]:
            yield question


def answered(asked: list[Question], jobs: int, time_limit_s: float) -> Iterator[tuple[Question, dict[str, Any]]]:
    """Yield the answers as they come."""
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        futures = {
            pool.submit(
                solved,
                one.cell,
                one.row,
                time_limit_s=time_limit_s,
                partition=one.partition,
                num_stages=one.num_stages,
            ): one
            for one in asked
        }
        for count, future in enumerate(as_completed(futures), 1):
            one, result = futures[future], future.result()
            cut = f" {one.partition} stages" if one.partition else ""
            line = f"{count:5} of {len(asked)} {one.cell.name}: {one.row}{cut} {result['samples_per_s']:.2f} samples/s"
            print(line, flush=True)
            yield one, result | {"part": one.part}


if __name__ == "__main__":
    main()
