"""How much slower is the chosen plan than the best one that ran: every legal uniform plan, and the chosen ones.

    python benchmarks/cpu_regret.py [--ranks 2] [--rounds 3] [--json OUT]

A profile is measured, the search chooses a plan at three budgets (shares of what its free choice
needs), and all uniform plans and the chosen ones take turns on real ranks. Of the plans that are
predicted to fit a budget the fastest measured one is the yardstick:

    regret = measured(chosen) / min over plans that fit of measured - 1.

The yardstick is the least of many noisy figures and so a little too good; the regret is an upper one.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cpu_plans import BUDGET_SHARES, Setup, trials_of

from meshwright.spec.trial import Trial

_DRAWS = 2000
_LOSS = 0.1  # what is explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--model", action="append", help="Models to ask for; default demo-llama.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for model in options.model or ["demo-llama"]:
        with tempfile.TemporaryDirectory() as folder:
            setup = Setup(
                model=model,
                batch=options.batch,
                seq_len=options.seq_len,
                num_ranks=options.ranks,
                profile=Path(folder) / "profile.json",
            )
            setup.measure_profile()
            chosen = setup.chosen()
            plans = {**setup.uniform(), **chosen}
            trials = trials_of(plans, rounds=options.rounds, steps=options.steps, with_memory=False)
        show_all(trials)
        found += [
            {"model": model, **regret(trials, name, share)} for share, name in zip(BUDGET_SHARES, chosen, strict=True)
        ]
    for one in found:
        show(one)
    regrets = [one["regret"] for one in found]
    print(f"median regret {median(regrets):.1%} over {len(regrets)} choices, largest {max(regrets):.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


def regret(trials: dict[str, Trial], name: str, share: float) -> dict[str, Any]:
    """Return the regret of the plan chosen at `share` of the memory, with a bootstrap interval over rounds."""
    need = max(predicted_bytes(trials[f"chosen at {BUDGET_SHARES[0]:.0%}"]), 1)
    fitting = {other: one for other, one in trials.items() if predicted_bytes(one) <= need * share}
    fitting[name] = trials[name]
    best = min(fitting, key=lambda other: fitting[other].median_s)
    draw = random.Random(0)

    def drawn(trial: Trial) -> float:
        return median(draw.choices(trial.step_s, k=len(trial.step_s)))

    regrets = sorted(drawn(trials[name]) / drawn(trials[best]) - 1 for _ in range(_DRAWS))
    mine, theirs = trials[name], trials[best]
    return {
        "chosen": name,
        "num_fitting": len(fitting),
        "regret": mine.median_s / theirs.median_s - 1,
        "interval": [regrets[_DRAWS * 25 // 1000], regrets[_DRAWS * 975 // 1000 - 1]],
        "best": best,
        "measured_s": [mine.median_s, theirs.median_s],
        "predicted_s": [predicted_s(mine), predicted_s(theirs)],
        "plan": ", ".join(s.label for s in dict.fromkeys(mine.plan.strategies))
        + f" in {mine.plan.num_stages} stages, m {mine.plan.num_micro_batches}",
    }


def show_all(trials: dict[str, Trial]) -> None:
    for name, one in sorted(trials.items(), key=lambda item: item[1].median_s):
        error = predicted_s(one) / one.median_s - 1
        print(f"{name:32} {one.median_s:6.3f} s, predicted {predicted_s(one):6.3f} ({error:+.1%})")


def show(one: dict[str, Any]) -> None:
    low, high = one["interval"]
    print(
        f"{one['model']}, {one['chosen']} ({one['plan']}): regret {one['regret']:+.1%} ({low:+.1%} .. {high:+.1%}) "
        f"against {one['best']}, the best of {one['num_fitting']} that fit"
    )
    if one["regret"] > _LOSS:
        mine, theirs = (p / m - 1 for p, m in zip(one["predicted_s"], one["measured_s"], strict=True))
        print(f"  a loss above {_LOSS:.0%}: the chosen plan was priced {mine:+.1%}, the best one {theirs:+.1%}")


def predicted_s(one: Trial) -> float:
    assert one.plan.predicted is not None
    return one.plan.predicted.step_s


def predicted_bytes(one: Trial) -> int:
    assert one.plan.predicted is not None
    return one.plan.predicted.peak_bytes


if __name__ == "__main__":
    main()
