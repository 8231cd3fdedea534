"""How long a search takes, and how much memory: against layers, strategies, budget and devices, one at a time.

    python benchmarks/search.py [--targets] [--json OUT] [--png OUT]

Every search runs in a process of its own on one thread; CPU seconds count from after the imports, memory is
the peak of the process. The base is a Llama-like model of 96 blocks of width 8192 on 8x8 H100, batch 512 of 4096
tokens, all stages and micro-batches. `--targets` runs only the sizes that the project has set itself, with what
it wants of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGETS: dict[str, dict[str, Any]] = {
    "llama-2-7b, 8 A100, batch 64 (1 s)": {
        "model": "llama-2-7b", "cluster": "8xa100-sxm-40g", "batch": 64, "seq_len": 4096,
    },
    "96 blocks of 8192, 8x8 H100, batch 512 (5 s)": {},
    "128 blocks of 16384, 128x8 H100, batch 2048 (10 s)": {
        "layers": 128, "hidden": 16384, "cluster": "128x8xh100-sxm", "batch": 2048,
    },
    "128 blocks of 16384, 512x8 H100, batch 4096 (20 s)": {
        "layers": 128, "hidden": 16384, "cluster": "512x8xh100-sxm", "batch": 4096,
    },
}  # fmt: skip
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "layers": [{"layers": n} for n in (24, 48, 96, 192)],
    "strategies": [{"space": s} for s in ("ddp", "3d", "dp+tp", "galvatron", "base", "full")],
    "budget": [{"memory": f"{gib}GiB"} for gib in (40, 50, 60, 70)],
    "devices": [{"cluster": f"{n}x8xh100-sxm", "batch": max(64, 8 * n)} for n in (1, 4, 16, 64, 256)],
}
BASE: dict[str, Any] = {
    "layers": 96, "hidden": 8192, "cluster": "8x8xh100-sxm", "batch": 512, "seq_len": 4096, "space": "full",
    "memory": None, "model": None,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", action="store_true")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(search_once(json.loads(options.one))))
        return
    sweeps = {"targets": list(TARGETS.values())} if options.targets else SWEEPS
    results: dict[str, list[dict[str, Any]]] = {}
    for name, points in sweeps.items():
        print(f"{name}:\n  {'point':52} {'CPU s':>7} {'MiB':>6} {'settings':>9} {'gap':>8}   step")
        results[name] = []
        for number, point in enumerate(points):
            label = list(TARGETS)[number] if options.targets else ", ".join(f"{k} {v}" for k, v in point.items())
            result = in_process({**BASE, **point, "time_limit_s": options.time_limit})
            results[name].append({"label": label, **point, **result})
            print(
                f"  {label:52} {result['cpu_s']:7.2f} {result['peak_mib']:6.0f} {result['settings']:9} "
                f"{result['gap']:8.3%}   {result['step_s']:.3f} s",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))
    if options.png is not None:
        plot(results, options.png)


def in_process(point: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", json.dumps(point)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def search_once(point: dict[str, Any]) -> dict[str, Any]:
    """Search and measure; in this process."""
    import resource
    import time

    from meshwright.search.engine import Found, search
    from meshwright.search.planner import make_request

    model = point["model"] or llama_like(point["layers"], point["hidden"], point["seq_len"])
    request = make_request(
        model,
        point["cluster"],
        global_batch=point["batch"],
        seq_len=point["seq_len"],
        memory=point["memory"],
        space=point["space"],
        time_limit_s=point["time_limit_s"],
    )
    started = time.process_time()
    outcome = search(request)
    cpu_s = time.process_time() - started
    result = {"cpu_s": cpu_s, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if not isinstance(outcome, Found) or outcome.plan.predicted is None or outcome.plan.proof is None:
        return {**result, "settings": len(outcome.tried), "gap": float("nan"), "step_s": float("nan")}
    step_s, gap = outcome.plan.predicted.step_s, outcome.plan.proof.gap
    return {**result, "settings": len(outcome.tried), "gap": gap, "step_s": step_s}


def llama_like(layers: int, hidden: int, seq_len: int) -> Any:
    """Return a Llama of so many blocks of this width: heads of 128, a key-value head for 8, vocabulary 128,256."""
    from meshwright.spec.families import model_from_config

    return model_from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 128,
            "num_key_value_heads": hidden // 1024,
            "intermediate_size": hidden * 7 // 2,
            "vocab_size": 128_256,
            "max_position_embeddings": seq_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        name=f"llama-{layers}x{hidden}",
        where="benchmark",
    )


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4 * len(results), 3.5), squeeze=False)
    for axis, (name, points) in zip(axes[0], results.items(), strict=True):
        axis.bar([str(p["label"]).split(", batch")[0] for p in points], [p["cpu_s"] for p in points])
        axis.set_title(name)
        axis.set_ylabel("CPU seconds")
        axis.tick_params(axis="x", rotation=60, labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
