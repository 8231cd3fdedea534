"""How good the answers of the search are, over many problems: gaps, and what simpler ways to plan lose.

    python benchmarks/search_quality.py [--problems 100] [--time-limit 10] [--seed 0] [--json OUT]

A problem is a model of the library with a random number of blocks on a random cluster, with a random
batch and a budget between what the smallest plan needs and what the fastest wants. Every second one has
a fixed number of stages above 1 that does not divide its blocks. Reported as distributions, zeros included:

- the gap that is printed with the exact plan, apart by micro-batches per stage;
- what the paper's loop (`partition bmw`), even stages, and one strategy for all layers lose against it, by
  the predicted step: nothing here was run. Plans that a simpler way does not find at all are counted apart.

One thread; times are CPU seconds of the search.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np  # noqa: E402

from meshwright.search.engine import Found, Request, search  # noqa: E402
from meshwright.search.planner import make_request  # noqa: E402
from meshwright.search.space import SPACES, find_space  # noqa: E402
from meshwright.spec import library  # noqa: E402
from meshwright.spec.model import ModelSpec  # noqa: E402

MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3-70b", "gpt3-175b")
CLUSTERS = ("8xa100-sxm-40g", "8xa100-pcie-40g", "2x8xa100-sxm-40g", "4x8xa100-sxm-80g", "2x8xh100-sxm", "8x8xh100-sxm")
WAYS = {
    "the paper's loop": find_space("full", "bmw"),
    "even stages": find_space("full", "even"),
    "one strategy": SPACES["uniform"],
}
Problem = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    results: list[Problem] = []
    with suppress(KeyboardInterrupt):  # the report is then on what there is
        while len(results) < options.problems:
            result = solved(draw, forces_stages=len(results) % 2 == 1, time_limit_s=options.time_limit)
            if result is not None:
                results.append(result)
                line = f"{len(results):4} {result['what']:88} {result['step_s']:8.3f} s gap {result['gap']:.2%}"
                print(line, flush=True)
    report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


def solved(draw: random.Random, *, forces_stages: bool, time_limit_s: float) -> Problem | None:
    """Draw a problem and solve it in all ways; None when nothing fits or the draw cannot be."""
    cluster = library.cluster(draw.choice(CLUSTERS))
    spec = with_blocks(library.model(draw.choice(MODELS)), draw.randrange(12, 97))
    batch = cluster.num_devices * draw.choice((1, 2, 4, 8, 16))
    share = draw.random()
    stages = None
    if forces_stages:
        counts = [
            p for p in (2, 4, 8, 16) if cluster.num_devices % p == 0 and spec.num_blocks % p and p <= spec.num_blocks
        ]
        if not counts:
            return None
        stages = draw.choice(counts)
    options: dict[str, Any] = {"global_batch": batch, "seq_len": 2048, "stages": stages, "time_limit_s": time_limit_s}
    free = search(make_request(spec, cluster, **options))
    if not isinstance(free, Found) or free.plan.predicted is None:
        return None
    least = least_bytes(make_request(spec, cluster, memory=1 << 20, **options))
    want = max(stage.bound_bytes for stage in free.plan.predicted.stages)
    budget = round(least + share * max(0, want - least))
    request = make_request(spec, cluster, memory=min(budget, cluster.device.memory_bytes), **options)
    started = time.process_time()
    found = search(request)
    if not isinstance(found, Found):
        return None
    return {**record(request, found, time.process_time() - started), "share": share}


def with_blocks(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model with so many blocks."""
    groups = tuple(
        group.model_copy(update={"num_layers": count}) if group.layer.kind == "block" else group
        for group in spec.groups
    )
    return spec.model_copy(update={"groups": groups})


def least_bytes(request: Request) -> int:
    """Return what the smallest plan needs on its fullest device."""
    outcome = search(request)
    assert not isinstance(outcome, Found)
    return request.budget.usable_bytes + max(outcome.shortfall_bytes, default=0)


def record(request: Request, found: Found, cpu_s: float) -> Problem:
    plan = found.plan
    assert plan.predicted is not None
    assert plan.proof is not None
    losses: dict[str, float | None] = {}
    for name, space in WAYS.items():
        other = search(replace(request, space=space))
        other_s = other.plan.predicted.step_s if isinstance(other, Found) and other.plan.predicted else None
        losses[name] = None if other_s is None else other_s / plan.predicted.step_s - 1
    return {
        "what": f"{plan.model.name} {plan.model.num_blocks} blocks, {plan.cluster.name}, batch "
        f"{plan.global_batch_size}, {plan.num_stages} stages, {plan.num_micro_batches} micro-batches",
        "forced": request.num_stages is not None,
        "stages": plan.num_stages,
        "micro_batches_per_stage": plan.num_micro_batches / plan.num_stages,
        "step_s": plan.predicted.step_s,
        "gap": plan.proof.gap,
        "cpu_s": cpu_s,
        "losses": losses,
    }


def report(results: list[Problem]) -> None:
    parts = {
        "all": results,
        "one stage": [r for r in results if r["stages"] == 1],
        "m/P > 2": [r for r in results if r["stages"] > 1 and r["micro_batches_per_stage"] > 2],
        "m/P <= 2": [r for r in results if r["stages"] > 1 and r["micro_batches_per_stage"] <= 2],
    }
    print("\ngap:            problems  zero  <= 0.5 %   median      p90      max")
    for name, part in parts.items():
        if part:
            gaps = np.array([r["gap"] for r in part])
            print(
                f"  {name:12} {len(part):9} {np.mean(gaps == 0):5.0%} {np.mean(gaps <= 0.005):9.0%} "
                f"{np.median(gaps):8.2%} {np.quantile(gaps, 0.9):8.2%} {gaps.max():8.2%}"
            )
    print("\nloss against the exact plan:     found  zero   median     mean      p90      max")
    for group, part in (("all", results), ("stages given, blocks not divisible", [r for r in results if r["forced"]])):
        print(f"  {group}")
        for name in WAYS:
            losses = np.array([r["losses"][name] for r in part if r["losses"][name] is not None])
            if len(losses):
                print(
                    f"    {name:20} {len(losses):4} of {len(part):3} {np.mean(losses < 1e-9):5.0%} "
                    f"{np.median(losses):8.2%} {losses.mean():8.2%} {np.quantile(losses, 0.9):8.2%} {losses.max():8.2%}"
                )
    cpu = np.array([r["cpu_s"] for r in results])
    median, p90, most = np.median(cpu), np.quantile(cpu, 0.9), cpu.max()
    print(f"\nCPU seconds of the exact search: median {median:.2f}, p90 {p90:.2f}, max {most:.2f}")


if __name__ == "__main__":
    main()
