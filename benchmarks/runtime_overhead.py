"""Our runtime against the same parallelism written by hand in plain PyTorch, interleaved in one run.

    python benchmarks/runtime_overhead.py [--steps 12] [--rounds 3] [--json OUT]

Three uniform plans: FSDP (ZeRO-3 over 4 ranks), TP x DP (2 x 2), PP (2 stages). Every round runs all
variants in turn, so that a slow moment hits both sides; the figure is the median over rounds of
tokens/s of ours over theirs. The hand-written side uses torch's own FSDP2, DTensor tensor
parallelism and pipeline schedule, torch's own modules and loss, and the same optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from meshwright.models import build_model
from meshwright.models.rotary import rotary_table, rotate
from meshwright.runtime.optimizer import make_optimizer
from meshwright.runtime.parallelize import parallelize
from meshwright.spec import library
from meshwright.spec.job import AdamW, Budget, JobSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.strategy import Strategy

MODEL, SEQ_LEN, BATCH = "demo-llama", 256, 16
Step = Callable[[], object]
VARIANTS = {"fsdp": 4, "tp-dp": 4, "pp": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is None:
        launch(options)
    else:
        measure(options)


def launch(options: argparse.Namespace) -> None:
    """Start the ranks of each variant in turn and print the ratios."""
    results = {}
    for variant, num_ranks in VARIANTS.items():
        path = Path(f"/tmp/overhead-{os.getpid()}-{variant}.json")
        command = [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", __file__,
            "--variant", variant, "--steps", str(options.steps), "--rounds", str(options.rounds), "--json", str(path),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, env=environment, timeout=900)
        results[variant] = json.loads(path.read_text())
        path.unlink()
        show(variant, results[variant])
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


def show(variant: str, result: dict[str, list[float]]) -> None:
    ours, theirs = result["ours"], result["theirs"]
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    tokens = BATCH * SEQ_LEN
    print(
        f"{variant:6} ours {tokens / median(ours):8.0f} tokens/s   by hand {tokens / median(theirs):8.0f}   "
        f"ours/by hand {median(ratios):.3f}  (rounds {ratios[0]:.3f} .. {ratios[-1]:.3f})"
    )


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours, theirs = our_step(options.variant), hand_step(options.variant)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for step in (ours, theirs):
        timed(step, 3)
    for round_number in range(options.rounds):
        order = (("ours", ours), ("theirs", theirs))
        for name, step in order if round_number % 2 == 0 else reversed(order):
            times[name].append(timed(step, options.steps))
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(times))
    dist.destroy_process_group()


def timed(step: Step, num_steps: int) -> float:
    """Return seconds a step, all ranks starting and ending together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    dist.barrier()
    return (time.perf_counter() - started) / num_steps


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (BATCH, SEQ_LEN + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(variant: str) -> Step:
    strategy, num_stages, micro_batches = {
        "fsdp": (Strategy(dp_shard=4, zero_stage=3), 1, 1),
        "tp-dp": (Strategy(tp=2, dp_replicate=2), 1, 1),
        "pp": (Strategy(), 2, 4),
    }[variant]
    model = library.model(MODEL)
    layers = [len(model.layers) // num_stages] * num_stages
    plan = Plan(
        model=model,
        cluster=library.cluster(f"{VARIANTS[variant]}xcpu"),
        job=JobSpec(global_batch_size=BATCH, seq_len=SEQ_LEN, param_dtype="fp32"),
        budget=Budget(memory_bytes=4 << 30),
        num_devices=VARIANTS[variant],
        global_batch_size=BATCH,
        num_micro_batches=micro_batches,
        stages=tuple(StagePlan.of([strategy] * count) for count in layers),
    )
    engine = parallelize(build_model(model), plan)
    optimizer = make_optimizer(engine.parameters(), AdamW())
    ids, targets = batch()

    def step() -> None:
        engine.forward_backward(lambda first, count: (ids[first : first + count], targets[first : first + count]))
        engine.clip_gradients(1.0)
        optimizer.step()
        engine.zero_grad()

    return step


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = (f(x).view(samples, tokens, -1, self.head_size).transpose(1, 2) for f in (self.q, self.k, self.v))
        cos, sin = rotary_table(tokens, self.head_size, 10000.0, None, x.device, x.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(samples, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.attention, self.mlp = Attention(hidden, heads, kv_heads), Mlp(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def plain_layers() -> list[nn.Module]:
    """Return the model written with torch's own modules: embedding, blocks, head."""
    spec = library.model(MODEL)
    block = spec.layers[1]
    hidden, heads, kv_heads = block.hidden_size, block.attention.num_heads, block.attention.num_kv_heads
    blocks = [Block(hidden, heads, kv_heads, block.mlp.ffn_size) for _ in range(spec.num_blocks)]
    head = nn.Sequential(nn.RMSNorm(hidden, eps=1e-5), nn.Linear(hidden, spec.vocab_size, bias=False))
    return [nn.Embedding(spec.vocab_size, hidden), *blocks, head]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * SEQ_LEN)


def hand_step(variant: str) -> Step:
    torch.manual_seed(0)
    return {"fsdp": hand_fsdp, "tp-dp": hand_tp_dp, "pp": hand_pp}[variant](plain_layers())


def hand_fsdp(layers: list[nn.Module]) -> Step:
    rank, count = dist.get_rank(), BATCH // dist.get_world_size()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    plain = nn.Sequential(*layers)
    fully_shard(plain, mesh=mesh)
    return hand_loop(plain, rank * count, count, None)


def hand_tp_dp(layers: list[nn.Module]) -> Step:
    """Tensor parallelism by DTensor, four all-reduces a block; gradients averaged by one flat all-reduce."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    for layer in layers[1:-1]:
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "attention": whole,
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "mlp": whole,
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(),
            },
        )
    return hand_loop(nn.Sequential(*layers), mesh.get_local_rank("dp") * BATCH // 2, BATCH // 2, mesh["dp"].get_group())


def hand_loop(plain: nn.Module, first: int, count: int, group: dist.ProcessGroup | None) -> Step:
    # Fused AdamW takes DTensors or plain tensors, not both.
    kinds = [[p for p in plain.parameters() if isinstance(p, DTensor) == is_dtensor] for is_dtensor in (True, False)]
    optimizers = [torch.optim.AdamW(parameters, fused=True) for parameters in kinds if parameters]
    ids, targets = (x[first : first + count] for x in batch())
    parameters = list(plain.parameters())

    def step() -> None:
        loss = loss_of(plain(ids), targets)
        loss.backward()
        if group is not None:
            flat = torch._utils._flatten_dense_tensors([local(p.grad) for p in parameters])
            dist.all_reduce(flat, group=group)
            parts = torch._utils._unflatten_dense_tensors(flat, [local(p.grad) for p in parameters])
            torch._foreach_copy_([local(p.grad) for p in parameters], list(parts))
        clip_by_hand(parameters, loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def hand_pp(layers: list[nn.Module]) -> Step:
    rank, half = dist.get_rank(), len(layers) // 2
    plain = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    stage = PipelineStage(plain, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    ids, targets = batch()
    parameters = list(plain.parameters())

    def step() -> None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=targets, losses=losses)
        clip_by_hand(parameters, sum(losses, torch.zeros(())))
        optimizer.step()
        optimizer.zero_grad()

    return step


def local(x: Tensor | None) -> Tensor:
    if x is None:
        raise TypeError("a weight is missing")
    return x.to_local() if hasattr(x, "to_local") else x


def clip_by_hand(parameters: list[nn.Parameter], loss: Tensor) -> None:
    """Sum the squared norm and the loss over all ranks in one reduction, and scale."""
    gradients = [local(p.grad) for p in parameters]
    squared = torch.stack(torch._foreach_norm(gradients)).square().sum()
    sums = torch.stack([squared, loss.detach()])
    dist.all_reduce(sums)
    scale = float((1.0 / (sums[0].sqrt() + 1e-6)).clamp(max=1.0))
    if scale < 1.0:
        torch._foreach_mul_(gradients, scale)


if __name__ == "__main__":
    main()
