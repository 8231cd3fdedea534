"""The errors that predictions of a run are shown with, by framework: from published runs, held out.

    python benchmarks/published_accuracy.py --data DEV.jsonl [--write]

Errors are those of the subset `dense` with constants that were fitted without the record's own source. `--write` stores
them in meshwright/spec/data/accuracy.yaml.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import yaml
from published_pricing import price_all
from published_records import chosen, read_records
from published_statistics import summarise

from meshwright.spec.constants import shipped_constants

FILE = Path(__file__).parent.parent / "meshwright" / "spec" / "data" / "accuracy.yaml"
HEAD = """# Errors of predicted against published steps; spec/accuracy.py says what the fields mean. Written by
# benchmarks/published_accuracy.py --write.
"""
LEAST = 5  # runs that make a class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines, one record each")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    errors: dict[tuple[str | None, bool], list[float]] = defaultdict(list)
    sources: dict[tuple[str | None, bool], set[str]] = defaultdict(set)
    for one in price_all(chosen(read_records(options.data), "dense")):
        if one.held_out_time_error is None or one.record.run is None:
            continue
        run = one.record.run
        is_datasheet = not shipped_constants().is_fitted(run.cluster.device)
        for key in ((run.framework, is_datasheet), (None, is_datasheet)):
            errors[key].append(one.held_out_time_error)
            sources[key].add(one.record.group)
    entries: list[dict[str, object]] = []
    for (framework, is_datasheet), found in sorted(errors.items(), key=str):
        summary = summarise(found)
        if len(found) < LEAST and not is_datasheet:
            continue
        assert summary.median is not None
        assert summary.p90 is not None
        entry: dict[str, object] = {
            "is_datasheet": is_datasheet,
            "median": round(summary.median, 3),
            "p90": round(summary.p90, 3),
            "num_runs": summary.num,
            "of": f"of {', '.join(sorted(sources[framework, is_datasheet]))}",
        }
        entries.append(entry if framework is None else {"framework": framework, **entry})
    text = HEAD + yaml.safe_dump({"errors": entries}, sort_keys=False, width=120)
    print(text)
    if options.write:
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
