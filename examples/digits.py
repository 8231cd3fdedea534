"""Images from end to end: a small ViT on scikit-learn's digits, against a linear model on the same split.

Two CPU ranks, 1,797 images of 8 x 8 of which a fifth is held out. Run `make demo-digits`; needs scikit-learn.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import meshwright

RUN = Path("runs/digits")
MODEL = Path(__file__).parent / "configs" / "vit-digits.json"
NUM_RANKS, GLOBAL_BATCH, NUM_STEPS, HELD_OUT, DROPOUT = 2, 64, 1500, 0.2, 0.1
OPTIMIZER = meshwright.AdamW(lr=1e-3, warmup_steps=100, weight_decay=0.05)
# The linear model gets the strength of its regularisation that is best on the held-out images themselves.
LINEAR_C = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def main() -> None:
    started = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)
    found = meshwright.plan(
        str(MODEL), f"{NUM_RANKS}xcpu", global_batch=GLOBAL_BATCH, dtype="fp32", optimizer=OPTIMIZER, dropout=DROPOUT
    )
    if not isinstance(found, meshwright.Found):
        raise SystemExit(f"no plan: {found.reason}")
    meshwright.save_plan(found.plan, RUN / "plan.json")
    command = [
        sys.executable, "-m", "meshwright", "train", str(RUN / "plan.json"), "--local", str(NUM_RANKS),
        "--data", "digits", "--held-out", str(HELD_OUT), "--eval-samples", "100000", "--eval-every", "250",
        "--steps", str(NUM_STEPS), "--log-every", "50", "--run-dir", str(RUN),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "held_out"][-1]
    linear = linear_accuracies()
    best = max(linear, key=lambda c: linear[c])
    print(
        f"held-out accuracy over {last['num_tokens']} images: ViT {last['held_out_accuracy']:.4f}, logistic regression "
        f"{linear[best]:.4f} (C {best}, the best of {len(linear)}), {linear[1.0]:.4f} (C 1.0, the default)"
    )
    print(f"{time.perf_counter() - started:.0f} s in all; everything lies under {RUN}/")
    if last["held_out_accuracy"] <= linear[best]:
        raise SystemExit("the ViT is no better than a linear model")


def linear_accuracies() -> dict[float, float]:
    """Return the held-out accuracy of logistic regression on the pixels by its C."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    from meshwright.runtime.data.order import split_items

    digits: Any = load_digits()
    pixels = digits.images.reshape(len(digits.images), -1) / digits.images.max()
    training, held_out = (split_items(len(pixels), split, HELD_OUT) for split in ("train", "held_out"))
    found = {}
    for c in LINEAR_C:
        model = LogisticRegression(C=c, max_iter=5000).fit(pixels[training], digits.target[training])
        found[c] = float(model.score(pixels[held_out], digits.target[held_out]))
    return found


if __name__ == "__main__":
    main()
