"""Predicted against measured on CPU ranks of this machine: step time and peak memory of many plans.

    python benchmarks/cpu_prediction.py [--ranks 2] [--rounds 5] [--json OUT]

A profile is measured first and the plans are priced with it. Step times: all plans are built in one job and
take turns, round after round, so that a slow moment hits all of them. Peak memory: every plan in a job of
its own, with freed memory given back at once (see docs/log.md). Plans are stratified: every dimension
alone, in pairs and mixed by layer, even and uneven stages, one to eight micro-batches; and, apart,
those that the search chose at three budgets.

Ranks that share cores are not independent devices: with more ranks than cores a rank that waits gives its
core to another, so bubbles cost less than predicted. The default is one rank a core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import meshwright
from meshwright.cost.predict import predict
from meshwright.search.engine import Found
from meshwright.spec import library
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.strategy import Strategy

MODEL, BATCH, SEQ_LEN = "demo-llama", 8, 256
STEPS_A_TURN = 2
WARM_UP_STEPS = 2
BUDGET_SHARES = (1.0, 0.7, 0.5)
GIVE_BACK_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000"}
MIB = 2**20
Named = dict[str, Plan]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=("time", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--plans", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = measure_all(options, Path(folder))
    report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


def measure_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    profile = folder / "profile.json"
    subprocess.run(
        [sys.executable, "-m", "meshwright", "profile", "--local", str(options.ranks), "-o", str(profile),
         "--model", MODEL, "--global-batch", str(BATCH), "--seq-len", str(SEQ_LEN), "--dtype", "fp32"],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    given = stratified(options.ranks, profile)
    chosen = chosen_plans(options.ranks, profile)
    plans = {**given, **chosen}
    times = launch("time", plans, options, folder)
    results = []
    for name, plan in plans.items():
        peaks = launch("memory", {name: plan}, options, folder, environment=GIVE_BACK_MEMORY)[name]
        assert plan.predicted is not None
        results.append(
            {
                "plan": name,
                "chosen": name in chosen,
                "predicted_s": plan.predicted.step_s,
                "measured_s": times[name],
                "predicted_bytes": [
                    stage.peak_bytes for stage in plan.predicted.stages for _ in range(plan.stage_devices)
                ],
                "measured_bytes": peaks,
            }
        )
        show(results[-1])
    return results


def launch(
    worker: str, plans: Named, options: argparse.Namespace, folder: Path, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    path, out = folder / "plans.json", folder / "out.json"
    path.write_text(json.dumps({name: plan.model_dump(mode="json") for name, plan in plans.items()}))
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", __file__,
        "--worker", worker, "--plans", str(path), "--json", str(out), "--rounds", str(options.rounds),
    ]  # fmt: skip
    ranks = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
    subprocess.run(command, check=True, env=ranks, timeout=1800)
    return json.loads(out.read_text())


def stratified(num_ranks: int, profile: Path) -> Named:
    """Return plans over all dimensions for `num_ranks` ranks, priced."""
    model = library.model(MODEL)
    blocks = model.num_blocks
    cluster = priced_cluster(num_ranks, profile)
    n, half = num_ranks, num_ranks // 2
    dp, zero2, zero3 = Strategy(dp_replicate=n), Strategy(dp_shard=n, zero_stage=2), Strategy(dp_shard=n, zero_stage=3)
    tp = Strategy(tp=n)
    inside = Strategy(dp_replicate=half) if half > 1 else Strategy()

    def again(strategy: Strategy) -> Strategy:
        return strategy.model_copy(update={"recompute": "full"})

    whole: dict[str, list[Strategy]] = {
        "dp": [dp] * (blocks + 2),
        "zero2": [zero2] * (blocks + 2),
        "zero3": [zero3] * (blocks + 2),
        "tp": [tp] * (blocks + 2),
        "dp recompute": [dp, *[again(dp)] * blocks, dp],
        "zero3 recompute": [zero3, *[again(zero3)] * blocks, zero3],
        "tp recompute": [tp, *[again(tp)] * blocks, tp],
        "zero2, zero3 mixed": [zero2, *[zero2] * (blocks // 2), *[zero3] * (blocks - blocks // 2), zero3],
        "tp, zero3 mixed": [tp, *[tp] * (blocks // 3), *[zero3] * (blocks - blocks // 3), zero3],
        "dp, dp recompute mixed": [dp, *[again(dp)] * (blocks // 2), *[dp] * (blocks - blocks // 2), dp],
    }
    plans: Named = {}

    def add(name: str, stages: list[list[Strategy]], micro_batches: int) -> None:
        plan = Plan(
            model=model,
            cluster=cluster,
            job=JobSpec(global_batch_size=BATCH, seq_len=SEQ_LEN, param_dtype="fp32"),
            budget=meshwright.Budget(memory_bytes=cluster.device.memory_bytes),
            num_devices=num_ranks,
            global_batch_size=BATCH,
            num_micro_batches=micro_batches,
            stages=tuple(StagePlan.of(stage) for stage in stages),
        )
        plans[f"{name}, m {micro_batches}"] = plan.model_copy(update={"predicted": predict(plan)})

    for name, strategies in whole.items():
        for micro_batches in (1, 4) if "mixed" not in name else (2,):
            add(name, [strategies], micro_batches)
    for first in (blocks // 2 + 1, blocks // 2 + 3, blocks // 2 - 1):
        for micro_batches in (2, 4, 8):
            rest = blocks + 2 - first
            add(f"pp {first}+{rest}", [[inside] * first, [inside] * rest], micro_batches)
    add("pp recompute", [[again(inside)] * (blocks // 2 + 1), [inside] * (blocks - blocks // 2 + 1)], 4)
    return plans


def chosen_plans(num_ranks: int, profile: Path) -> Named:
    """Return what the search chooses at three budgets: shares of what its free choice needs."""

    def best(memory: int | None) -> Plan:
        found = meshwright.plan(
            MODEL, f"{num_ranks}xcpu", global_batch=BATCH, seq_len=SEQ_LEN, dtype="fp32", memory=memory, profile=profile
        )
        assert isinstance(found, Found), found
        return found.plan

    free = best(None)
    assert free.predicted is not None
    need = free.predicted.peak_bytes
    return {f"chosen at {share:.0%}": free if share == 1.0 else best(int(need * share)) for share in BUDGET_SHARES}


def priced_cluster(num_ranks: int, profile: Path) -> meshwright.ClusterSpec:
    from meshwright.cost.fit import fitted_cluster
    from meshwright.files import read_spec

    return fitted_cluster(library.cluster(f"{num_ranks}xcpu"), read_spec(meshwright.Profile, profile))


def work(options: argparse.Namespace) -> None:
    """One rank of a measuring job."""
    import torch
    import torch.distributed as dist

    from meshwright.models import build_model
    from meshwright.runtime import make_optimizer, parallelize
    from meshwright.runtime.memory import PeakMemory
    from meshwright.runtime.warm_up import warm_up

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    warm_up(device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (BATCH, SEQ_LEN + 1), generator=generator)

    def batch(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens[first : first + count, :-1].clone(), tokens[first : first + count, 1:].clone()

    memory = PeakMemory(device)
    jobs = {}
    for name, data in json.loads(options.plans.read_text()).items():
        plan = Plan.model_validate_json(json.dumps(data))
        engine = parallelize(build_model(plan.model), plan)
        jobs[name] = engine, make_optimizer(engine.parameters(), plan.job.optimizer)

    def step(name: str) -> None:
        engine, optimizer = jobs[name]
        engine.forward_backward(batch)
        engine.clip_gradients(1.0)
        optimizer.step()
        engine.zero_grad()

    for name in jobs:
        for _ in range(WARM_UP_STEPS):
            step(name)
    if options.worker == "memory":
        (name,) = jobs
        peaks: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, memory.peak_bytes)
        out: dict[str, Any] = {name: peaks}
    else:
        out = in_turns(step, list(jobs), options.rounds)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(out))
    dist.destroy_process_group()


def in_turns(step: Callable[[str], None], order: list[str], rounds: int) -> dict[str, list[float]]:
    """Return seconds a step of each plan, one figure a round, in an order that changes from round to round."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(rounds):
        random.Random(turn).shuffle(order)
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                step(name)
            dist.barrier()
            times[name].append((time.perf_counter() - started) / STEPS_A_TURN)
    return times


def show(result: dict[str, Any]) -> None:
    predicted_s, measured_s = result["predicted_s"], median(result["measured_s"])
    predicted, measured = max(result["predicted_bytes"]), max(result["measured_bytes"])
    print(
        f"{result['plan']:32} step {predicted_s:6.3f} / {measured_s:6.3f} s {predicted_s / measured_s - 1:+7.1%}   "
        f"peak {predicted / MIB:6.0f} / {measured / MIB:6.0f} MiB {predicted / measured - 1:+7.1%}",
        flush=True,
    )


def report(results: list[dict[str, Any]]) -> None:
    for label, part in (("all plans", results), ("chosen by the search", [r for r in results if r["chosen"]])):
        times = [r["predicted_s"] / median(r["measured_s"]) - 1 for r in part]
        peaks = [p / m - 1 for r in part for p, m in zip(r["predicted_bytes"], r["measured_bytes"], strict=True)]
        print(f"{label} ({len(part)}):")
        print(
            f"  step time    median |error| {median(map(abs, times)):.1%}, bias {median(times):+.1%} {interval(times)}"
        )
        print(
            f"  peak memory  median |error| {median(map(abs, peaks)):.1%}, bias {median(peaks):+.1%} {interval(peaks)}"
        )
    rank = spearman([r["predicted_s"] for r in results], [median(r["measured_s"]) for r in results])
    print(f"rank correlation of step times (Spearman): {rank:.3f}")


def interval(errors: list[float]) -> str:
    """Return a 95 % bootstrap interval of the median absolute error."""
    draw = random.Random(0)
    medians = sorted(median(abs(e) for e in draw.choices(errors, k=len(errors))) for _ in range(2000))
    return f"(95 % interval of the median |error| {medians[50]:.1%} .. {medians[1949]:.1%})"


def spearman(one: list[float], other: list[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


if __name__ == "__main__":
    main()
