"""The main job from end to end: measure this machine, plan under a memory budget, train on real text.

Four CPU ranks, a small Llama, the Python standard library's own sources as text. Run `make demo`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

import meshwright
from meshwright.report.compare import compare, compare_table
from meshwright.report.text import comparison_table, plan_view, why_it_loses
from meshwright.units import show_bytes, show_percent, show_seconds

RUN = Path("runs/demo")
NUM_RANKS = 4
MODEL, CLUSTER = "demo-llama", f"{NUM_RANKS}xcpu"
GLOBAL_BATCH, SEQ_LEN, NUM_STEPS = 8, 256, 70
# The budget is this share of what the best plan without a budget needs (the same for every machine).
BUDGET_SHARE = 0.55
WARM_UP_STEPS = 10
# glibc keeps freed tensors in its heaps, so a CPU rank's resident memory is well above what it uses. Memory is
# therefore measured in a short run of its own in which freed memory goes back at once (and page faults cost time).
MEMORY_STEPS = 4
GIVE_BACK_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "1000000"}
OPTIMIZER = meshwright.AdamW(lr=3e-3, warmup_steps=10, clip_norm=1.0)


def main() -> None:
    console = Console(width=170, highlight=False, markup=False)
    started = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)

    console.rule("1. measure: rates of this machine with all four ranks busy")
    run_tool(
        "profile", "--local", str(NUM_RANKS), "-o", str(RUN / "profile.json"), "--model", MODEL,
        "--global-batch", str(GLOBAL_BATCH), "--seq-len", str(SEQ_LEN), "--dtype", "fp32",
    )  # fmt: skip

    console.rule("2. plan: without a budget, then with one")
    free = find_plan()
    need_bytes = peak_bytes(free)
    budget_bytes = int(need_bytes * BUDGET_SHARE)
    console.print(
        f"the best plan without a budget needs {show_bytes(need_bytes)} a rank; "
        f"budget from here on: {BUDGET_SHARE:.0%} of that, {show_bytes(budget_bytes)}"
    )
    best = find_plan(memory=budget_bytes)
    uniform = find_plan(memory=budget_bytes, space="uniform", must_fit=False)
    meshwright.save_plan(best, RUN / "plan.json")
    console.print(plan_view(best))
    console.print(
        comparison_table(
            [
                ("chosen", best, f"fits in {show_bytes(budget_bytes)}"),
                ("no budget", free, f"needs {show_bytes(need_bytes - budget_bytes)} more than there is"),
                (
                    "best uniform",
                    uniform,
                    "no single strategy fits" if uniform is None else why_it_loses(uniform, best),
                ),
            ]
        )
    )

    console.rule("3. train: the chosen plan on the Python standard library's sources")
    train = ("train", str(RUN / "plan.json"), "--local", str(NUM_RANKS), "--data", "stdlib", "--steps", str(NUM_STEPS))
    run_tool(*train, "--run-dir", str(RUN), "--eval-samples", "64")

    console.rule(f"4. {MEMORY_STEPS} steps again, to measure memory")
    memory_run = RUN / "memory"
    run_tool(
        *train, "--run-dir", str(memory_run), "--stop-at", str(MEMORY_STEPS), "--eval-samples", "0",
        environment=GIVE_BACK_MEMORY,
    )  # fmt: skip

    console.rule("5. predicted against measured")
    report(console, best)
    console.print(f"{time.perf_counter() - started:.0f} s in all; everything lies under {RUN}/")


def find_plan(*, memory: int | None = None, space: str = "full", must_fit: bool = True) -> meshwright.Plan | None:
    found = meshwright.plan(
        MODEL,
        CLUSTER,
        global_batch=GLOBAL_BATCH,
        seq_len=SEQ_LEN,
        dtype="fp32",
        optimizer=OPTIMIZER,
        memory=memory,
        profile=RUN / "profile.json",
        space=space,
    )
    if isinstance(found, meshwright.Found):
        return found.plan
    if must_fit:
        raise SystemExit(f"no plan: {found.reason}")
    return None


def prediction(plan: meshwright.Plan) -> meshwright.Prediction:
    return plan.predicted or meshwright.predict(plan)


def peak_bytes(plan: meshwright.Plan) -> int:
    return prediction(plan).peak_bytes


def run_tool(*arguments: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        [sys.executable, "-m", "meshwright", *arguments], check=True, env={**os.environ, **(environment or {})}
    )


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def report(console: Console, plan: meshwright.Plan) -> None:
    records = read_records(RUN)
    steps = [record for record in records if record["kind"] == "step"]
    held_out = [record for record in records if record["kind"] == "held_out"][-1]
    entropy = [record for record in records if record["kind"] == "start"][-1]["unigram_entropy"]
    measured_s = median(record["step_s"] for record in steps[WARM_UP_STEPS:])
    predicted_s = prediction(plan).step_s
    console.print(
        f"step time: predicted {show_seconds(predicted_s)}, measured {show_seconds(measured_s)} "
        f"(median), error {show_percent(predicted_s / measured_s - 1)}"
    )
    (*_, last, _checkpoint) = (record for record in read_records(RUN / "memory"))
    for rank, measured in enumerate(last["peak_memory_bytes"]):
        predicted = plan.predicted.stages[rank // plan.stage_devices].peak_bytes
        console.print(
            f"peak memory of rank {rank}: predicted {show_bytes(predicted)}, measured {show_bytes(measured)}, "
            f"error {show_percent(predicted / measured - 1)}"
        )
    console.print(compare_table([one for one in compare(plan, RUN / "metrics.jsonl") if one.unit == "s"]))
    loss = held_out["held_out_loss"]
    console.print(f"held-out loss {loss:.3f} nats a byte; unigram entropy of the text {entropy:.3f}")
    if loss >= entropy:
        raise SystemExit("the model has learnt nothing beyond byte frequencies")


if __name__ == "__main__":
    main()
