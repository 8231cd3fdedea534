"""Predicted against measured on CPU ranks of this machine: step time and peak memory of many plans.

    python benchmarks/cpu_prediction.py [--ranks 2] [--rounds 3] [--json OUT]

A profile is measured first and the plans are priced with it. Then all plans take turns, round after
round in changing order, so that a slow moment hits all of them; peak memory in a run of its own, in which
freed memory is given back at once (docs/log.md). Plans are stratified: every dimension alone, in pairs and
mixed by layer, even and uneven stages, one to eight micro-batches; and, apart, those that the search chose
at three budgets: an exact search finds every term that is priced too low.

The paper's ablation (arXiv 2307.02031, section 4.2): the same plans priced as if communication hid under
compute for nothing, and with the slowdown that was measured when both run. On CPU the runtime waits for
every collective, so neither is what it does.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cpu_plans import Setup, trials_of

import meshwright
from meshwright.cost.predict import predict
from meshwright.files import read_spec
from meshwright.spec.plan import Plan
from meshwright.spec.trial import Trial

MIB = 2**20
_DRAWS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--model", default="demo-llama")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(
            model=options.model,
            batch=options.batch,
            seq_len=options.seq_len,
            num_ranks=options.ranks,
            profile=Path(folder) / "profile.json",
        )
        profile_s = setup.measure_profile()
        chosen = setup.chosen()
        plans = {**setup.stratified(), **chosen}
        trials = trials_of(plans, rounds=options.rounds, steps=options.steps)
        results = [{**record(name, trials[name]), "chosen": name in chosen} for name in plans]
        slowdowns = measured_slowdowns(setup.profile)
        ablation = {
            name: [priced_s(plan, *factors) for plan in plans.values()]
            for name, factors in (("hides for nothing", (1.0, 1.0)), ("hides, slowed as measured", slowdowns))
        }
    for result in results:
        show(result)
    print(f"profile of {options.ranks} ranks: {profile_s:.0f} s")
    report(results)
    report_ablation(results, ablation, slowdowns)
    if options.json is not None:
        options.json.write_text(json.dumps({"profile_s": profile_s, "plans": results, "ablation": ablation}, indent=2))


def record(name: str, trial: Trial) -> dict[str, Any]:
    predicted = trial.plan.predicted
    assert predicted is not None
    return {
        "plan": name,
        "predicted_s": predicted.step_s,
        "measured_s": list(trial.step_s),
        "predicted_bytes": [s.peak_bytes for s in predicted.stages for _ in range(trial.plan.stage_devices)],
        "measured_bytes": list(trial.peak_bytes),
    }


def measured_slowdowns(profile: Path) -> tuple[float, float]:
    """Return by how much compute and communication slow each other down."""
    samples = read_spec(meshwright.Profile, profile).overlaps
    return median(s.compute_slowdown for s in samples), median(s.communication_slowdown for s in samples)


def priced_s(plan: Plan, compute: float, communication: float) -> float:
    """Return the predicted step of `plan` as if its ranks could overlap, with these slowdowns."""
    update = {"overlap_slowdown": compute, "communication_slowdown": communication}
    device = plan.cluster.device.model_copy(update=update)
    return predict(plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"device": device})})).step_s


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
        for what, errors in (("step time", times), ("peak memory", peaks)):
            print(
                f"  {what:12} median |error| {median(map(abs, errors)):.1%}, bias {median(errors):+.1%} "
                f"{interval(errors)}"
            )
    rank = spearman([r["predicted_s"] for r in results], [median(r["measured_s"]) for r in results])
    print(f"rank correlation of step times (Spearman): {rank:.3f}")


def report_ablation(
    results: list[dict[str, Any]], ablation: dict[str, list[float]], slowdowns: tuple[float, float]
) -> None:
    compute, communication = slowdowns
    print(f"overlap, measured: compute {compute:.2f} times slower, communication {communication:.2f} times")
    for name, seconds in ablation.items():
        errors = [s / median(r["measured_s"]) - 1 for s, r in zip(seconds, results, strict=True)]
        print(f"  if communication {name}: median |error| {median(map(abs, errors)):.1%}, bias {median(errors):+.1%}")


def interval(errors: list[float]) -> str:
    """Return a 95 % bootstrap interval of the median absolute error."""
    draw = random.Random(0)
    medians = sorted(median(abs(e) for e in draw.choices(errors, k=len(errors))) for _ in range(_DRAWS))
    low, high = medians[_DRAWS * 25 // 1000], medians[_DRAWS * 975 // 1000 - 1]
    return f"(95 % interval of the median |error| {low:.1%} .. {high:.1%})"


def spearman(one: list[float], other: list[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


if __name__ == "__main__":
    main()
