"""What each term of the cost model contributes, on published step times.

    python benchmarks/published_ablation.py --data DEV.jsonl [--subset dense]

Every row leaves one term out, or changes what is said of it, and gives each type of device one factor in exchange
(the median of measured over predicted), so that a term is not charged for the constants having been fitted with it.
Constants are the shipped ones. Overlap: communication beside computing costs `exposed_share` of itself; once all of
it, once nothing.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

from published_pricing import device_type
from published_records import FILTERS, Record, chosen, read_records
from published_statistics import Summary, summarise

from meshwright.cost.run_time import STEP_TERMS, RunSeconds, StageSeconds, run_time
from meshwright.spec.constants import Constants, shipped_constants

ONCE_TERMS = tuple(name for name in STEP_TERMS if name != "micro_batches_s")
STAGE_TERMS = tuple(field.name for field in fields(StageSeconds))
Price = Callable[[Record], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines, one record each")
    parser.add_argument("--subset", default="dense", choices=sorted(FILTERS))
    options = parser.parse_args()
    records = [r for r in chosen(read_records(options.data), options.subset) if r.run is not None and r.iter_time_s]
    print(f"{options.subset}: {len(records)} step times; median / p90 of the error's size, bias, in percent")
    print(f"| {'left out or changed':44} | median | p90 | bias |\n|---|---|---|---|")
    for name, price in rows().items():
        found = ablated(records, price)
        assert found.median is not None
        assert found.p90 is not None
        assert found.bias is not None
        print(f"| {name:44} | {100 * found.median:.1f} | {100 * found.p90:.1f} | {100 * found.bias:+.1f} |")


def rows() -> Mapping[str, Price]:
    """Return what is tried, by name."""
    shipped = shipped_constants()
    tried: dict[str, Price] = {"nothing": lambda record: seconds_of(record).step_s}
    for term in (*STAGE_TERMS, *ONCE_TERMS):
        tried[f"no {term.removesuffix('_s').replace('_', ' ')}"] = lambda record, term=term: without(record, term)
    shares = {"communication hides for nothing (overlap off)": 1.0, "communication hides at no cost": 0.0}
    for name, share in shares.items():
        changed = shipped.model_copy(update={"exposed_share": share})
        tried[name] = lambda record, changed=changed: seconds_of(record, changed).step_s
    return tried


def ablated(records: list[Record], price: Price) -> Summary:
    """Return the errors of `price` when each type of device has a factor of its own."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for record in records:
        assert record.iter_time_s is not None
        ratios[device_type(record)].append(price(record) / record.iter_time_s)
    return summarise([ratio / median(found) - 1 for found in ratios.values() for ratio in found])


def without(record: Record, term: str) -> float:
    """Return the seconds of a step without one of its terms."""
    seconds = seconds_of(record)
    if term in ONCE_TERMS:
        return seconds.step_s - getattr(seconds, term)
    stages = [replace(stage, **{term: 0.0}) for stage in seconds.stages]
    assert record.run is not None
    before, after = ([stage.total_s for stage in some] for some in (seconds.stages, stages))
    changed = pipeline_s(record, after) - pipeline_s(record, before)
    return seconds.step_s + changed


def pipeline_s(record: Record, stages: list[float]) -> float:
    """Return micro-batches and bubble of stages that take so long."""
    assert record.run is not None
    slowest = max(stages)
    return record.run.num_micro_batches * slowest + (sum(stages) - slowest) / record.run.virtual_stages


def seconds_of(record: Record, constants: Constants | None = None) -> RunSeconds:
    assert record.run is not None
    return run_time(record.run, constants)


if __name__ == "__main__":
    main()
