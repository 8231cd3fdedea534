"""The published cases of our predecessor, Hetu-Galvatron: priced and solved again, under its formulas and under ours.

    python benchmarks/galvatron_cases.py [--profiles DIR] [--part 2022|v3|ours] [--time-limit 3] [--json OUT]

2022  BERT-, ViT-, Swin-Huge and T5-Large at 8 to 20 GB: its figures, our solver under its formulas (the same batch
      and number of stages; for models of one layer type also its whole sweep), its plan under our rules, and ours.
v3    Llama-2-7B, 8 GPUs, batch 64: its per-layer costs, its figures, the best known ones, our solver.
ours  The same cases with its profile imported, in our planner: 'import' as `meshwright import` writes it, 'as theirs'
      with split layers as its formulas have them. Usable memory as in its search: a fifth less above 20 GB, less 1 GiB.

The profiles are data beside this repository; without them there is nothing to do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import galvatron_2022 as artefact_2022
import galvatron_v3 as v3

from meshwright.imports.galvatron import read_galvatron
from meshwright.imports.galvatron_profile import to_profile
from meshwright.search import planner
from meshwright.search.engine import Found
from meshwright.spec import library
from meshwright.spec.profile import Profile
from meshwright.units import GiB, MiB

PROFILES = Path(__file__).resolve().parents[2] / "shared" / "peer" / "profiles"
_MODEL, _CLUSTER = "llama-2-7b", "8xa100-sxm-80g"
_PARTS = ("2022", "v3", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--part", action="append", choices=_PARTS, help="Default: all.")
    parser.add_argument(
        "--model", action="append", choices=list(artefact_2022.PUBLISHED), help="Of 2022; default: all."
    )
    parser.add_argument(
        "--time-limit", type=float, default=3.0, help="Seconds a setting (2022); a search has 10 times."
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.profiles.is_dir():
        sys.exit(f"galvatron_cases: the predecessor's profiles are not there ({options.profiles.name}); nothing to do")
    found: dict[str, Any] = {}
    parts = options.part or list(_PARTS)
    if "2022" in parts:
        found["2022"] = cases_2022(options.profiles, options.model or list(artefact_2022.PUBLISHED), options.time_limit)
    if "v3" in parts:
        found["v3"] = cases_v3(options.profiles)
    if "ours" in parts:
        found["ours"] = cases_ours(options.profiles, 10 * options.time_limit)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2, default=str) + "\n")


def cases_2022(profiles: Path, models: list[str], time_limit_s: float) -> list[dict[str, Any]]:
    """Print and return the table of 2022."""
    found: list[dict[str, Any]] = []
    print("2022, samples/s: published, our solver, its formulas | its plan, our rules | ours, as many stages | ours")
    for model in models:
        artefact = read_galvatron([profiles / "vldb22_artefact"], model=model).artefact
        assert artefact is not None
        for budget_gb, published, batch, pp in artefact_2022.PUBLISHED[model]:
            answer = artefact_2022.solve_cell(model, artefact, budget_gb, pp, batch)
            swept = artefact_2022.sweep(model, artefact, budget_gb) if len(artefact.layers) == 1 else None
            again = None if answer is None else artefact_2022.repriced(artefact, budget_gb, answer)
            ours = artefact_2022.under_ours(artefact, budget_gb, batch, time_limit_s)
            alike = artefact_2022.under_ours(artefact, budget_gb, batch, time_limit_s, (pp,))
            row = {
                "model": model,
                "budget_gb": budget_gb,
                "batch": batch,
                "stages": pp,
                "published": published,
                "its_formulas": None if answer is None else answer.samples_per_s,
                "its_plan": None if answer is None else answer.text,
                "swept": None if swept is None else (swept.samples_per_s, swept.batch, swept.pp),
                "its_plan_under_ours": None if again is None else asdict(again),
                "ours_as_many_stages": None if alike is None else asdict(alike),
                "ours": None if ours is None else asdict(ours),
            }
            found.append(row)
            _show_2022(row)
    return found


def _show_2022(row: dict[str, Any]) -> None:
    its, again = row["its_formulas"], row["its_plan_under_ours"]
    base = None if again is None else again["samples_per_s"]
    line = f"{row['model']:5}{row['budget_gb']:3} GB, batch {row['batch']:3}, pp {row['stages']}  "
    line += f"{_figure(row['published'])} {_figure(its)} {_relative(its, row['published'])} | {_figure(base)}"
    for ours in (row["ours_as_many_stages"], row["ours"]):
        line += " | "
        if ours is not None:
            line += f"{_figure(ours['samples_per_s'])} {_relative(ours['samples_per_s'], base)} "
            line += f"pp {ours['pp']}, m {ours['m']}, gap {100 * (ours['gap'] or 0):.1f} %"
    print(line)
    print(f"      its formulas: {row['its_plan']}" + (f"; sweep: {row['swept']}" if row["swept"] else ""))
    for name in ("ours_as_many_stages", "ours"):
        if row[name] is not None:
            print(f"      our rules:    {row[name]['ways']}", flush=True)


def cases_v3(profiles: Path) -> list[dict[str, Any]]:
    """Print and return Llama-2-7B under the formulas of v3."""
    tables = v3.Tables(read_galvatron([profiles / "v3"], model="llama2-7b"))
    print("v3, one layer: ms with sync, without; MB of states, saved. Published, then ours")
    for key, published in v3.PUBLISHED_LAYERS:
        degree, dp, ulysses, zero3, recompute = key
        way = v3.Way(degree=degree, dp=dp, ulysses=ulysses, zero3=zero3, recompute=recompute)
        cost = v3.layer_cost(tables, way, 1, 8)
        ours = (1e3 * cost.with_sync_s, 1e3 * cost.without_s, cost.states_bytes / MiB, cost.saved_bytes / MiB)
        print(f"  {way!s:8} {published}  {' '.join(f'{value:.4f}' for value in ours)}")
    print("v3, Llama-2-7B, batch 64: samples/s published, best known, ours")
    found: list[dict[str, Any]] = []
    for budget_gb, (published, known) in v3.PUBLISHED.items():
        start = time.perf_counter()
        answer = v3.search(tables, budget_gb)
        seconds = time.perf_counter() - start
        assert answer is not None
        row = {"budget_gb": budget_gb, "published": published, "best_known": known, "search_s": seconds}
        found.append({**row, **asdict(answer)})
        its = answer.samples_per_s
        print(
            f"  {budget_gb:3} GB {_figure(published)} {_figure(known)} {_figure(its)} {_relative(its, published)} "
            f"{_relative(its, known)} pp {answer.pp}, m {answer.m}, {seconds:.1f} s: {' | '.join(answer.ways)}",
            flush=True,
        )
    return found


def cases_ours(profiles: Path, time_limit_s: float) -> list[dict[str, Any]]:
    """Print and return the same cases in our planner with its profile."""
    found = read_galvatron([profiles / "v3"], model="llama2-7b")
    imported = to_profile(found, library.model(_MODEL)).profile
    as_theirs = v3.split_as_theirs(imported, v3.Tables(found))
    print("ours, Llama-2-7B, batch 64, its profile in our planner: samples/s (its own figure under its formulas)")
    rows: list[dict[str, Any]] = []
    for budget_gb, (published, _) in v3.PUBLISHED.items():
        for name, profile in (("import", imported), ("as theirs", as_theirs)):
            for space in ("galvatron", "base", "full"):
                row = _planned(budget_gb, profile, space, time_limit_s)
                rows.append({"budget_gb": budget_gb, "profile": name, "published": published, **row})
                print(
                    f"  {budget_gb:3} GB {name:9} {space:9} {_figure(row['samples_per_s'])} ({published:.4f}) "
                    f"{row['plan']}",
                    flush=True,
                )
    return rows


def _planned(budget_gb: int, profile: Profile, space: str, time_limit_s: float) -> dict[str, Any]:
    outcome = planner.plan(
        _MODEL,
        _CLUSTER,
        global_batch=v3.BATCH,
        seq_len=v3.SEQ_LEN,
        memory=min(int(v3.usable_bytes(budget_gb)), 80 * GiB),
        profile=profile,
        space=space,
        time_limit_s=time_limit_s,
    )
    if not isinstance(outcome, Found) or outcome.plan.predicted is None:
        return {"space": space, "samples_per_s": None, "plan": f"nothing fits: {getattr(outcome, 'reason', '')}"[:90]}
    plan, predicted = outcome.plan, outcome.plan.predicted
    stages = [" ".join(f"{run.num_layers}x{_short(run.strategy)}" for run in stage.runs) for stage in plan.stages]
    text = f"m {plan.num_micro_batches}, gap {100 * (plan.proof.gap if plan.proof else 0):.1f} %: {' | '.join(stages)}"
    return {"space": space, "samples_per_s": predicted.samples_per_s, "plan": text, "search_s": outcome.search_s}


def _short(strategy: Any) -> str:
    zero = f"z{strategy.zero_stage}" if strategy.zero_stage else ""
    return f"{strategy.tp}-{strategy.dp}{zero}{'c' if strategy.recompute == 'full' else ''}"


def _figure(value: float | None) -> str:
    return "      -" if value is None else f"{value:8.4f}"


def _relative(value: float | None, base: float | None) -> str:
    return "        " if value is None or base is None else f"({100 * (value / base - 1):+.3f} %)"


if __name__ == "__main__":
    main()
