"""Your own training loop under a plan: what `meshwright train` does, in forty lines.

python examples/own_loop.py                 # plans for two CPU ranks and starts them
torchrun --nproc-per-node 2 examples/own_loop.py runs/own_loop/plan.json
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import meshwright

PLAN = Path("runs/own_loop/plan.json")
NUM_RANKS, NUM_STEPS = 2, 20


def plan_and_start() -> None:
    """Plan on this machine, without torch, and start the ranks."""
    found = meshwright.plan("tiny-llama", f"{NUM_RANKS}xcpu", global_batch=8, seq_len=64, dtype="fp32")
    if not isinstance(found, meshwright.Found):
        raise SystemExit(f"no plan: {found.reason}")
    meshwright.save_plan(found.plan, PLAN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "--rdzv-backend",
               "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", __file__, str(PLAN)]  # fmt: skip
    subprocess.run(command, check=True)


def train(plan: meshwright.Plan) -> None:
    """One rank of the job."""
    import torch
    import torch.distributed as dist

    from meshwright.models import build_model
    from meshwright.runtime import make_optimizer, parallelize

    dist.init_process_group("gloo")
    engine = parallelize(build_model(plan.model), plan, seed=0)  # on the meta device: initialised from the seed
    optimizer = make_optimizer(engine.parameters(), meshwright.AdamW(lr=3e-3))
    text = torch.tensor(list(Path(__file__).read_bytes() * 8))
    seq_len = plan.job.seq_len
    for step in range(NUM_STEPS):
        first_sample = step * plan.global_batch_size

        def batch(first: int, count: int, base: int = first_sample) -> tuple[torch.Tensor, torch.Tensor]:
            """Return ids and targets of samples first .. first + count - 1 of the global batch."""
            starts = [(base + first + i) * 17 % (len(text) - seq_len - 1) for i in range(count)]
            windows = torch.stack([text[start : start + seq_len + 1] for start in starts])
            return windows[:, :-1], windows[:, 1:]

        report = engine.forward_backward(batch)
        engine.clip_gradients(1.0)
        optimizer.step()
        engine.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {report.loss:.3f}  gradient norm {report.gradient_norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(meshwright.load_plan(sys.argv[1]))
    else:
        plan_and_start()
