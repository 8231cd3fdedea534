"""The solvers on the shared instances: every optimum, CPU seconds against the recorded and the quantised programs.

    python benchmarks/solver_instances.py [--folder ../shared/solver] [--reps 3] [--without-quantised] [--json OUT]

Compared, in the same run and on the same files, all alternatives of an instance added up:
- the label program that found the optima, written again in label_dp.py, and the CPU seconds recorded for it with the
  instances (of another machine: a guide);
- quantised_dp.py, the (layer, whole MB, strategy) program of the public predecessor in numpy, on the memories rounded
  up as the predecessor does. Its objective can only be as good or worse.
One thread; CPU seconds of the process, the least of the repetitions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import label_dp  # noqa: E402
import numpy as np  # noqa: E402

from meshwright.search import layers, stages  # noqa: E402

TOLERANCE = 1e-9
Instance = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[2] / "shared" / "solver"
    parser.add_argument("--folder", type=Path, default=here, help="holds dev/*.npz, dev/INDEX.json and quantised_dp.py")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--without-quantised", action="store_true", help="leave out the program that takes minutes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.folder / "dev" / "INDEX.json").is_file():
        raise SystemExit(f"folder: no dev/INDEX.json in {options.folder}; give the folder of the instances")
    index = {entry["id"]: entry for entry in json.loads((options.folder / "dev" / "INDEX.json").read_text())}
    quantised = loaded(options.folder / "quantised_dp.py")
    results: list[dict[str, Any]] = []
    columns = " ".join(f"{name:>10}" for name in ("ours", "label DP", "recorded", "quantised"))
    print(f"{'instance':10} {'worst error':>12} {columns}  CPU seconds")
    for path in sorted((options.folder / "dev").glob("*.npz")):
        data = dict(np.load(path))
        slow = None if options.without_quantised else quantised
        result = measure(path.stem, data, index[path.stem], slow, options.reps)
        results.append(result)
        old = "-" if result["quantised_s"] is None else f"{result['quantised_s']:.4f}"
        seconds = " ".join(f"{result[key]:10.4f}" for key in ("ours_s", "label_dp_s", "recorded_s"))
        print(f"{path.stem:10} {result['error']:12.1e} {seconds} {old:>10}", flush=True)
    report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


def loaded(path: Path) -> ModuleType:
    """Return the module in the file `path`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(
    name: str, data: Instance, entry: dict[str, Any], quantised: ModuleType | None, reps: int
) -> dict[str, Any]:
    """Return errors against the optima and CPU seconds of one instance."""
    is_pipe = name.startswith("pipe_")
    ours_s, costs = timed(lambda: [pipe_cost(data)] if is_pipe else layer_costs(data), reps)
    labels_s, again = timed(lambda: label_costs(data, is_pipe=is_pipe), reps)
    optima = [float(data["opt_objective_s"])] if is_pipe else [float(c) for c in data["opt_raw_cost_s"]]
    result: dict[str, Any] = {
        "name": name,
        "error": max(difference(cost, best) for cost, best in zip(costs, optima, strict=True)),
        "ours_s": ours_s,
        "label_dp_error": max(difference(cost, best) for cost, best in zip(again, optima, strict=True)),
        "label_dp_s": labels_s,
        "recorded_s": entry["pareto_cpu_s"] if is_pipe else entry["pareto_raw_cpu_s"],
        "quantised_s": None,
        "ours_no_worse": True,
    }
    if not is_pipe and quantised is not None:
        result["quantised_s"], theirs = timed(lambda: quantised_costs(data, quantised), 1)
        result["ours_no_worse"] = all(a <= b * (1 + TOLERANCE) for a, b in zip(costs, theirs, strict=True))
    return result


def timed(call: Callable[[], list[float]], reps: int) -> tuple[float, list[float]]:
    """Return the least CPU seconds of `reps` calls, and what the last returned."""
    least, found = np.inf, []
    for _ in range(reps):
        started = time.process_time()
        found = call()
        least = min(least, time.process_time() - started)
    return float(least), found


def layer_costs(data: Instance) -> list[float]:
    """Return our optimum for every alternative of the rest of the stage, memories unrounded."""
    costs: list[float] = []
    for other_mb, other_s in zip(data["other_mem_mb_raw"], data["other_time_s"], strict=True):
        found = layers.solve(
            layer_s=data["intra_s"],
            layer_bytes=data["v_mb_raw"],
            switch_s=data["inter_s"],
            budget_bytes=float(data["max_mem_mb"] - other_mb),
        )
        costs.append(np.inf if found is None else found.time_s + float(other_s))
    return costs


def label_costs(data: Instance, *, is_pipe: bool) -> list[float]:
    """Return the optima of the label program."""
    if is_pipe:
        return [label_dp.solve_pipeline(data)]
    arrays = data["intra_s"], data["v_mb_raw"], data["inter_s"]
    rest = zip(data["other_mem_mb_raw"], data["other_time_s"], strict=True)
    return [
        label_dp.solve(*arrays, float(data["max_mem_mb"] - other_mb))[0] + float(other_s) for other_mb, other_s in rest
    ]


def quantised_costs(data: Instance, quantised: ModuleType) -> list[float]:
    costs: list[float] = []
    for other_mb, other_s in zip(data["other_mem_mb_int"], data["other_time_s"], strict=True):
        budget = int(data["max_mem_mb"] - other_mb)
        seconds = np.inf
        if budget >= 0:
            seconds, _ = quantised.solve(data["intra_s"], data["v_mb_int"], data["inter_s"], budget)
        costs.append(float(seconds) + float(other_s))
    return costs


def pipe_cost(data: Instance) -> float:
    """Return our optimum of a whole pipeline in closed form."""
    found = stages.solve(
        layer_s=data["time_s"],
        states_bytes=data["state_mb"],
        act_bytes=data["act_mb"],
        switch_s=data["switch_s"],
        border_s=0,
        in_flight=data["inflight"],
        budget_bytes=data["budget_mb"],
        num_micro_batches=int(data["n_microbatches"]),
    )
    return np.inf if found is None else found.objective_s


def difference(ours: float, best: float) -> float:
    """Return the relative error; infinite answers agree with each other only."""
    if np.isinf(ours) or np.isinf(best):
        return 0.0 if ours == best else np.inf
    return abs(ours / best - 1)


def report(results: list[dict[str, Any]]) -> None:
    wrong = [r["name"] for r in results if r["error"] > TOLERANCE]
    print(f"\n{len(results)} instances, {len(wrong)} wrong {wrong or ''}")
    wrong = [r["name"] for r in results if r["label_dp_error"] > TOLERANCE]
    print(f"label DP beside it: {len(wrong)} wrong {wrong or ''}")
    ours, labels, recorded = (sum(r[key] for r in results) for key in ("ours_s", "label_dp_s", "recorded_s"))
    print(
        f"all: {ours:.3f} CPU s; label DP, same run: {labels:.3f} ({labels / ours:.2f} times ours); "
        f"recorded with the instances: {recorded:.3f} ({recorded / ours:.2f} times ours)"
    )
    real = [r for r in results if r["name"].startswith("real_")]
    if any(r["quantised_s"] is None for r in real):
        return
    ours, theirs = (sum(r[key] for r in real) for key in ("ours_s", "quantised_s"))
    worse = [r["name"] for r in real if not r["ours_no_worse"]]
    print(f"real: {ours:.3f} CPU s; quantised program: {theirs:.3f} ({theirs / ours:.0f} times ours); worse: {worse}")


if __name__ == "__main__":
    main()
