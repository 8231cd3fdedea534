"""Masked language modelling with a small BERT, or span corruption with a small T5, on the standard library's sources.

python examples/text_tasks.py masked      # or spans; two CPU ranks, a few minutes (make demo-masked, make demo-spans)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import meshwright

CONFIGS = Path(__file__).parent / "configs"
NUM_RANKS, GLOBAL_BATCH = 2, 16


@dataclass(frozen=True, kw_only=True)
class Demo:
    """A model's configuration and how it is trained."""

    config: str
    num_steps: int
    lr: float
    target_seq_len: int | None = None


DEMOS = {
    "masked": Demo(config="bert-bytes.json", num_steps=1000, lr=2e-3),
    "spans": Demo(config="t5-bytes.json", num_steps=700, lr=5e-3, target_seq_len=32),
}


def main(task: str) -> None:
    started = time.perf_counter()
    demo, run = DEMOS[task], Path("runs") / task
    shutil.rmtree(run, ignore_errors=True)
    found = meshwright.plan(
        str(CONFIGS / demo.config), f"{NUM_RANKS}xcpu", global_batch=GLOBAL_BATCH, dtype="fp32",
        target_seq_len=demo.target_seq_len, optimizer=meshwright.AdamW(lr=demo.lr, warmup_steps=100),
    )  # fmt: skip
    if not isinstance(found, meshwright.Found):
        raise SystemExit(f"no plan: {found.reason}")
    meshwright.save_plan(found.plan, run / "plan.json")
    command = [
        sys.executable, "-m", "meshwright", "train", str(run / "plan.json"), "--local", str(NUM_RANKS),
        "--task", task, "--data", "stdlib", "--steps", str(demo.num_steps), "--log-every", "50", "--eval-every", "200",
        "--eval-samples", "256", "--run-dir", str(run),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [record for record in records if record["kind"] == "held_out"][-1]["held_out_loss"]
    print(f"held-out loss {loss:.3f} nats a target; unigram entropy of the targets {records[0]['unigram_entropy']:.3f}")
    reference = records[0]["unigram_entropy"]
    if task == "spans":
        of_noise, known = noise_entropies(found.plan)
        reference = min(reference, of_noise)
        print(f"of the bytes among them {of_noise:.3f}; with all sentinels and ends known for sure {known:.3f}")
    print(f"{time.perf_counter() - started:.0f} s in all; everything lies under {run}/")
    if loss >= reference:
        raise SystemExit("the model has learnt nothing beyond frequencies")


def noise_entropies(plan: meshwright.Plan) -> tuple[float, float]:
    """Return the unigram entropy of bytes, and the loss of a model that knows all other targets and no more of bytes.

    A quarter of the targets are sentinels and ends, of which most are easy, so the second is the harder mark.
    """
    from meshwright.runtime.data.spans import longest_spans
    from meshwright.runtime.data.tokenizer import ByteTokenizer
    from meshwright.runtime.data.tokens import build_tokens, unigram_entropy

    tokens = build_tokens(["stdlib"], ByteTokenizer(), "runs/cache", vocab_size=plan.model.vocab_size).tokens
    lengths = longest_spans(plan.job.seq_len, plan.job.lengths.target_seq)
    of_noise = unigram_entropy(np.asarray(tokens))
    return of_noise, of_noise * lengths.noise / lengths.target


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in DEMOS:
        raise SystemExit(f"usage: text_tasks.py {' | '.join(DEMOS)}")
    main(sys.argv[1])
