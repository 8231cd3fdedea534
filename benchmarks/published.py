"""The cost model against published measurements: errors of time and memory, fit, order of plans.

    python benchmarks/published.py --data DEV.jsonl [--sets SETS.json] [--filter EXPR ...] [--json OUT] [--plot PNG]

Prints, for shipped constants and (LOGO) for constants that were fitted without the record's own source group: errors
of step time and of memory by source group and on the fair subsets, found and missed out-of-memory runs with margins,
and how well plans of one model on the same devices are ordered. Device types that a single source measured stand
apart: held out, their constants are the rules for data sheets. `--filter` keeps records of a subset (T1), a field that
matches (group=torch*) or, with a leading !, all others; several must hold at once.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from published_pricing import (
    Priced,
    device_type,
    fits_of,
    has_held_out_constants,
    matches,
    price_all,
)
from published_records import FILTERS, Record, read_records, read_sets
from published_slopes import layers_of, slopes_of, states_of
from published_statistics import (
    CLOSE,
    Order,
    Summary,
    calibrated_errors,
    confusion,
    grouped,
    offset_calibrated_errors,
    order_of,
    percentile,
    summarise,
    with_interval,
)

from meshwright.errors import UserError

THRESHOLD = 0.98  # of the device's nominal memory: the driver and the context take their part of it
_TIME_SUBSETS = ("dense", "T1", "T2", "T3", "T4", "moe")
_MEMORY_SUBSETS = ("base", "M1", "M2", "M3", "moe")
_FLOPS_ONLY = "iter_time_s_from_flops"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines, one record each")
    parser.add_argument("--sets", type=Path, help="ranking sets; default ranking_sets.json beside the data")
    parser.add_argument("--filter", action="append", default=[], metavar="EXPR")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    try:
        report(options)
    except UserError as error:
        parser.error(str(error))


def report(options: argparse.Namespace) -> None:
    """Price what the options choose, print the report and write what they ask for."""
    everything = read_records(options.data)
    priced = price_all(record for record in everything if all(matches(record, one) for one in options.filter))
    sets = options.sets or options.data.with_name("ranking_sets.json")
    found = report_of(priced, read_sets(sets) if sets.exists() else [], single_source_types(everything))
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from published_plot import plot  # matplotlib is wanted only here

        plot(priced, options.plot)


def report_of(priced: list[Priced], sets: list[dict[str, Any]], types: list[str]) -> dict[str, Any]:
    """Return everything that is printed, and every prediction; `types` are the device types of a single source."""
    return {
        "held_out_constants": has_held_out_constants(),
        "groups": {name: _group(found) for name, found in grouped(priced, lambda one: one.record.group).items()},
        "single_source_device_types": types,
        "time": {name: time_of(_subset(priced, name), types) for name in _TIME_SUBSETS},
        "memory": {name: memory_of(_subset(priced, name)) for name in _MEMORY_SUBSETS},
        "activations": slopes_of([one.record for one in _subset(priced, "M4")]),
        "states": states_of(one.record for one in _subset(priced, "M4")),
        "layers": layers_of(one.record for one in priced),
        "fit": confusion(fits_of(priced), THRESHOLD),
        "order": {kind: order_report(priced, sets, kind) for kind in ("held_out_time_s", "time_s")},
        "records": [_listed(one) for one in priced],
    }


def single_source_types(records: Iterable[Record]) -> list[str]:
    """Return the device types of which only one source group has step times that may be fitted."""
    sources: dict[str, set[str]] = {}
    for record in records:
        if FILTERS["dense"](record.raw) and record.iter_time_s:
            sources.setdefault(device_type(record), set()).add(record.group)
    return sorted(name for name, groups in sources.items() if len(groups) == 1)


def _subset(priced: Iterable[Priced], name: str) -> list[Priced]:
    return [one for one in priced if FILTERS[name](one.record.raw)]


def _group(found: list[Priced]) -> dict[str, Any]:
    reasons = Counter(one.problem for one in found if one.problem)
    assumptions = Counter(text for one in found for text in one.record.assumed if not one.problem)
    return {
        "num": len(found),
        "num_priced": sum(one.problem is None for one in found),
        "skipped": dict(reasons.most_common()),
        "assumed": dict(assumptions.most_common()),
        "time": _summary(found, "time_error"),
        "time_held_out": _summary(found, "held_out_time_error"),
        "memory": {
            str(kind): _summary(some, "memory_error")
            for kind, some in grouped(found, lambda one: one.record.memory_kind).items()
            if kind
        },
    }


def time_of(found: list[Priced], single_types: list[str]) -> dict[str, Any]:
    """Return the errors of step time of one subset: in all, calibrated, of single-source types, by source and GPU."""
    timed = [one for one in found if one.record.iter_time_s]
    known = [one for one in timed if device_type(one.record) not in single_types]
    apart = [one for one in timed if device_type(one.record) in single_types]
    sources = grouped(timed, lambda one: f"{one.record.group} {one.record.gpu}")
    return {
        "num_timed": len(timed),
        "num_priced": sum(one.time_s is not None for one in timed),
        "all": _interval(timed, "time_error"),
        "all_held_out": _interval(timed, "held_out_time_error"),
        "known_types": _interval(known, "time_error"),
        "known_types_held_out": _interval(known, "held_out_time_error"),
        "single_source_types_held_out": _interval(apart, "held_out_time_error"),
        "calibrated": _calibrated(sources.values(), "time_s"),
        "calibrated_held_out": _calibrated(sources.values(), "held_out_time_s"),
        "by_source": {
            name: {"in_sample": _summary(some, "time_error"), "held_out": _summary(some, "held_out_time_error")}
            for name, some in sources.items()
        },
    }


def memory_of(found: list[Priced]) -> dict[str, Any]:
    """Return the errors of memory of one subset: in all, by kind, by source."""
    some = [one for one in found if one.memory_error is not None]
    inside = [one for one in some if abs(one.memory_range_error or 0.0) <= 0.02]
    return {
        "all": _interval(some, "memory_error"),
        "all_held_out": _interval(some, "held_out_memory_error"),
        "against_range": _summary(some, "memory_range_error"),
        "calibrated": _memory_calibrated(some),
        "num_inside_range": len(inside),
        "by_source": {
            name: {"in_sample": _summary(part, "memory_error"), "held_out": _summary(part, "held_out_memory_error")}
            for name, part in grouped(some, _memory_source).items()
        },
    }


def _memory_source(one: Priced) -> str:
    return f"{one.record.group} {one.record.gpu} ({one.record.memory_kind})"


def order_report(priced: Iterable[Priced], sets: list[dict[str, Any]], times: str) -> dict[str, Any]:
    """Return how the plans of each set are ordered by the predictions called `times`."""
    by_id = {one.record.id: one for one in priced}
    orders: list[tuple[dict[str, Any], Order]] = []
    for one_set in sets:
        plans = []
        for name in one_set["ids"]:
            one = by_id.get(name)
            predicted = getattr(one, times) if one else None
            if one and predicted and one.record.iter_time_s and one.record.run:
                plans.append((name, one.record.run, predicted, one.record.iter_time_s))
        order = order_of(plans)
        if order is not None:
            orders.append((one_set, order))
    regrets = sorted(order.regret for _, order in orders)
    return {
        "num_sets": len(orders),
        "num_pairs": sum(order.num_pairs for _, order in orders),
        "num_right": sum(order.num_right for _, order in orders),
        "num_close_picks": sum(regret <= CLOSE for regret in regrets),
        "p90_regret": percentile(regrets, 90) if regrets else None,
        "largest_regret": regrets[-1] if regrets else None,
        "sets": [{**{k: v for k, v in one.items() if k != "ids"}, **asdict(order)} for one, order in orders],
    }


def _values(found: Iterable[Priced], name: str) -> list[float]:
    return [value for one in found if (value := getattr(one, name)) is not None]


def _summary(found: Iterable[Priced], name: str) -> dict[str, Any]:
    return asdict(summarise(_values(found, name)))


def _interval(found: Iterable[Priced], name: str) -> dict[str, Any]:
    groups = {group: _values(some, name) for group, some in grouped(found, lambda one: one.record.group).items()}
    return asdict(with_interval({group: values for group, values in groups.items() if values}))


def _calibrated(sources: Iterable[list[Priced]], times: str) -> dict[str, Any]:
    errors: list[float] = []
    for source in sources:
        pairs = [(getattr(one, times), one.record.iter_time_s) for one in source]
        errors += calibrated_errors([(predicted, measured) for predicted, measured in pairs if predicted and measured])
    return asdict(summarise(errors))


def _memory_calibrated(found: Iterable[Priced]) -> dict[str, Any]:
    errors: list[float] = []
    for source in grouped(found, _memory_source).values():
        pairs = [(one.held_out_memory_bytes, one.record.memory_bytes) for one in source]
        errors += offset_calibrated_errors([(p, measured) for p, measured in pairs if p and measured])
    return asdict(summarise(errors))


def _listed(one: Priced) -> dict[str, Any]:
    record = one.record
    return {
        "id": record.id,
        "group": record.group,
        "gpu": record.gpu,
        "problem": one.problem,
        "assumed": list(record.assumed),
        "iter_time_s": record.iter_time_s,
        _FLOPS_ONLY: record.raw["norm"].get(_FLOPS_ONLY),
        "time_s": one.time_s,
        "held_out_time_s": one.held_out_time_s,
        "memory_kind": record.memory_kind,
        "memory_rank": record.memory_rank,
        "measured_bytes_range": list(record.memory_bytes_range) if record.memory_bytes_range else None,
        "memory_bytes": one.memory_bytes,
        "held_out_memory_bytes": one.held_out_memory_bytes,
        "device_bytes": one.device_bytes,
        "share_of_device": one.share,
        "is_oom": record.is_oom,
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    _show_groups(report["groups"])
    _show_time(report)
    _show_memory(report)
    _show_fit(report["fit"])
    for kind, title in (("held_out_time_s", "LOGO"), ("time_s", "in-sample")):
        _show_order(report["order"][kind], title)


def _show_groups(groups: dict[str, Any]) -> None:
    print("records by source group: number, priced; error of time, and of memory by kind: n median/p90 bias in %")
    for name, group in sorted(groups.items()):
        print(f"  {name:18s} {group['num']:4d} {group['num_priced']:4d}  time {_text(group['time'])}")
        for kind, summary in group["memory"].items():
            if summary["num"]:
                print(f"{'':30s}  {kind:9s} {_text(summary)}")
        for reason, count in group["skipped"].items():
            print(f"{'':30s}  skipped {count}: {reason}")


def _show_time(report: dict[str, Any]) -> None:
    held_out = "" if report["held_out_constants"] else " (no LOGO constants: shipped ones)"
    print(f"\nstep time, subsets: timed, priced; in-sample; LOGO{held_out}; in % with 95 % interval of the median")
    for name, found in report["time"].items():
        if not found["num_timed"]:
            continue
        print(f"  {name:6s} {found['num_timed']:4d} {found['num_priced']:4d}")
        for key in ("all", "all_held_out", "known_types", "known_types_held_out", "single_source_types_held_out"):
            print(f"    {key:30s} {_text(found[key])}")
        for key in ("calibrated", "calibrated_held_out"):
            print(f"    {key:30s} {_text(found[key])}")
    print(f"  single-source device types: {', '.join(report['single_source_device_types']) or 'none'}")
    print("\nstep time of `dense` by source: in-sample; LOGO")
    for name, source in report["time"]["dense"]["by_source"].items():
        print(f"  {name:34s} {_text(source['in_sample']):34s} {_text(source['held_out'])}")


def _show_memory(report: dict[str, Any]) -> None:
    print("\nmemory, subsets: against the middle of the printed value's readings; LOGO; nearest reading; inside +-2 %")
    for name, found in report["memory"].items():
        if found["all"]["num"]:
            inside = f"{found['num_inside_range']} of {found['all']['num']}"
            print(f"  {name:6s} {_text(found['all'])}   {_text(found['all_held_out'])}")
            print(f"  {'':6s} range {_text(found['against_range'])}   inside {inside}")
            print(f"  {'':6s} factor and offset by source and GPU {_text(found['calibrated'])}")
    print("\nmemory of `base` by source: in-sample; LOGO")
    for name, source in report["memory"]["base"]["by_source"].items():
        print(f"  {name:42s} {_text(source['in_sample']):34s} {_text(source['held_out'])}")
    activations = report["activations"]
    print(f"\nactivations of one layer (M4), slopes: {_text(activations['all'])}; states: {_text(report['states'])}")
    print(f"  {'nothing recomputed':34s} {_text(activations['nothing_recomputed'])}")
    for name, summary in activations["by_model"].items():
        print(f"  {name:34s} {_text(summary)}")
    for one in report["layers"]:
        print(f"  layer {one['id']}: {1e3 * one['predicted_s']:.1f} ms, measured {1e3 * one['measured_s']:.1f} ms")


def _show_fit(found: dict[str, Any]) -> None:
    print(
        f"\nfit: {found['num_found']} of {found['num_oom']} out-of-memory runs found, {found['num_false_alarms']} "
        f"false alarms in {found['num_fit']} that fit (threshold {found['threshold']} of nominal memory)"
    )
    for kind in ("misses", "false_alarms"):
        for one in found[kind]:
            print(f"  {kind[:-1].replace('_', ' ').rstrip('e')} {one['id']}: {one['share']:.3f} ({one['margin']:+.3f})")


def _show_order(found: dict[str, Any], title: str) -> None:
    if not found["num_sets"]:
        return
    right = found["num_right"] / max(1, found["num_pairs"])
    print(
        f"\norder ({title}): {found['num_right']} of {found['num_pairs']} pairs > 5 % apart right "
        f"({100 * right:.1f} %); pick within 2 % of the best in {found['num_close_picks']} of {found['num_sets']} "
        f"sets, p90 regret {100 * found['p90_regret']:.1f} %"
    )
    for one in found["sets"]:
        if one["regret"] > CLOSE:
            print(f"  regret {100 * one['regret']:.1f} %: picked {one['picked']}, best {one['best']}")


def _text(values: dict[str, Any]) -> str:
    summary = Summary(**values)
    if summary.median is None or summary.p90 is None or summary.bias is None:
        return "n   0"
    text = f"n {summary.num:3d} {100 * summary.median:5.1f}/{100 * summary.p90:5.1f} {100 * summary.bias:+6.1f}"
    if summary.low is not None and summary.high is not None:
        text += f" [{100 * summary.low:.1f}, {100 * summary.high:.1f}]"
    return text


if __name__ == "__main__":
    main()
