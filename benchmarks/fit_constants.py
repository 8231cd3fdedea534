"""Fit the constants of the cost model to published step times, with priors from the literature.

    python benchmarks/fit_constants.py --data DEV.jsonl [--write]

Least squares on log(predicted / measured) over the records of the subset `dense` on devices of a fitted type, with a
robust loss: beyond `_SCALE` times `_SIGMA` a residual counts linearly. A source group of n records weighs as sqrt(n),
so that large sources do not decide alone. Priors are log-normal; `PRIORS` has value, spread and reason of each.
Constants are fitted once to all groups, and once without each group ("LOGO"); errors of both are printed. `--write`
stores the former in `meshwright/spec/data/constants.yaml`, the latter in `benchmarks/data/constants_logo.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from published_records import Record, chosen, read_records
from published_statistics import summarise

from meshwright.cost.run_time import run_time
from meshwright.spec.constants import Constants, DeviceType, shipped_constants

LOGO_JSON = Path(__file__).parent / "data" / "constants_logo.json"
CONSTANTS_YAML = Path(__file__).parent.parent / "meshwright" / "spec" / "data" / "constants.yaml"
_SUBSETS = ("dense", "T1", "T2", "T3", "T4", "moe")
_SIGMA = 0.05  # of a record's log error where all is well
_SCALE = 1.5
_STEP = 1e-3  # of a logarithm, for differences
_ITERATIONS = 12
_LOGO_ITERATIONS = 6  # from the constants of all groups, which are near


class Prior(NamedTuple):
    """What is known before: the value, the standard deviation of its logarithm, and from where."""

    value: float
    spread: float
    source: str


_MAMF = "0.88 of the measured maximum achievable matmul (ml-engineering)"
_FA2 = "FlashAttention-2, arXiv 2307.08691, figures 4 to 6"
_FA3 = "FlashAttention-3, arXiv 2407.08608: its predecessor reaches 35 % on H100"
_STREAM = "copies reach 0.85 of the data sheet, operators with reductions less"
_SMALL = "batched products of one head's scores are small"
PRIORS: dict[str, Prior] = {
    "nvlink_efficiency": Prior(0.7, 0.15, "nccl-tests: 0.75 to 0.8 alone and at large sizes"),
    "nic_efficiency": Prior(0.7, 0.2, "nccl-tests: 0.8 to 0.9 alone"),
    "flash1_share": Prior(0.6, 0.15, f"{_FA2}: about twice its predecessor forward, less backward"),
    "exposed_share": Prior(0.3, 0.25, "Galvatron, arXiv 2307.02031, section 4.2: 1.3 times slower while both run"),
    "eager_factor": Prior(2.5, 0.25, "bytes of eager RMS norms, rotations and gates over fused ones, counted: 2 to 3"),
    "eager_plain_factor": Prior(1.4, 0.2, "bytes of an eager layer-norm block over a fused one, counted: 1 to 1.5"),
    "fp8_copy_factor": Prior(1.5, 0.4, "casts that are not fused read scales and write both layouts"),
    "async_tp_factor": Prior(0.55, 0.25, "half of the collectives are behind a product that can hide them"),
    "overlapped_tp_factor": Prior(0.5, 0.3, "one of two products of a backward pass is there to hide behind"),
    "ring_hop_s": Prior(2e-6, 0.5, "NCCL: about 1 us a hop inside a node, 5 us between nodes"),
    "straggler_share": Prior(0.004, 0.5, "0.3 to 0.5 % a doubling, from residuals of published runs"),
    "engine_skew_s": Prior(3e-3, 0.7, "no literature; either of two sources alone gives 4.1 to 4.3 ms"),
    "unaligned_factor": Prior(8.0, 0.4, "products off tensor cores: a quarter of the rate and worse kernels"),
    "a100.matmul_efficiency": Prior(0.766, 0.06, _MAMF),
    "a100.flash2_efficiency": Prior(0.55, 0.12, _FA2),
    "a100.unfused_efficiency": Prior(0.5, 0.2, _SMALL),
    "a100.memory_efficiency": Prior(0.7, 0.12, _STREAM),
    "h100.matmul_efficiency": Prior(0.707, 0.06, _MAMF),
    "h100.flash2_efficiency": Prior(0.33, 0.12, _FA3),
    "h100.memory_efficiency": Prior(0.65, 0.12, _STREAM),
    "h100.fp8_efficiency": Prior(0.7, 0.06, "as the 16-bit products"),
    "b200.matmul_efficiency": Prior(0.46, 0.15, "power: 1.04 TFLOP/s a watt, as H100 sustains, at 1000 W"),
    "b200.flash2_efficiency": Prior(0.45, 0.2, "generic"),
    "b200.memory_efficiency": Prior(0.7, 0.12, _STREAM),
    "v100.matmul_efficiency": Prior(0.75, 0.1, "generic"),
    "v100.unfused_efficiency": Prior(0.4, 0.3, _SMALL),
    "v100.memory_efficiency": Prior(0.75, 0.12, _STREAM),
}
NAMES = tuple(PRIORS)
_PRIOR = np.log([prior.value for prior in PRIORS.values()])
_SPREAD = np.array([prior.spread for prior in PRIORS.values()])
# Shares are at most 1.
_UPPER = np.array([0.0 if name.endswith(("efficiency", "share")) else np.inf for name in NAMES])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines, one record each")
    parser.add_argument("--write", action="store_true", help="store the constants")
    options = parser.parse_args()
    everything = read_records(options.data)
    records = [r for r in timed(everything, "dense") if r.run and shipped_constants().is_fitted(r.run.cluster.device)]
    fit = Fit(records)
    values = fit.run()
    print(f"{len(records)} records of {len(fit.groups)} groups; value, standard error of its logarithm, prior")
    for name, prior in PRIORS.items():
        print(f"  {name:26} {values[name]:9.4g} +- {fit.spreads[name]:5.3f}   {prior.value:g} +- {prior.spread:g}")
    without = {group: Fit([r for r in records if r.group != group]).run(values) for group in fit.groups}
    show_errors(everything, values, without)
    if options.write:
        write_constants(fit, values)
        rounded = {group: {name: float(f"{v:.4g}") for name, v in found.items()} for group, found in without.items()}
        LOGO_JSON.write_text(json.dumps(rounded, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def timed(records: Sequence[Record], subset: str) -> list[Record]:
    """Return the records of `subset` that have a run and a time."""
    return [r for r in chosen(list(records), subset) if r.run is not None and r.iter_time_s]


def with_values(base: Constants, values: Mapping[str, float]) -> Constants:
    """Return `base` with other values; names are those of `PRIORS`."""
    kinds: list[DeviceType] = []
    for kind in base.devices:
        own = {name.split(".")[1]: value for name, value in values.items() if name.startswith(f"{kind.name}.")}
        kinds.append(kind.model_copy(update={"constants": kind.constants.model_copy(update=own)}) if own else kind)
    flat = {name: value for name, value in values.items() if "." not in name}
    return base.model_copy(update={**flat, "devices": tuple(kinds)})


class Fit:
    """Constants from some records. After `run`, `spreads` has the standard error of each logarithm."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.groups = sorted({record.group for record in records})
        self.spreads: dict[str, float] = {}
        sizes = Counter(record.group for record in records)
        raw = np.array([sizes[record.group] ** -0.5 for record in records])
        self._weights = raw * len(raw) / raw.sum()

    def run(self, start: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the constants that fit best: Gauss-Newton on logarithms with reweighting, from `start` or priors."""
        x = _PRIOR.copy() if start is None else np.log([start[name] for name in NAMES])
        cost, residuals = self._cost(x)
        normal = np.eye(len(NAMES))
        for _ in range(_ITERATIONS if start is None else _LOGO_ITERATIONS):
            jacobian = self._jacobian(x, residuals)
            weights = self._weights * _robust(residuals / _SIGMA) / _SIGMA**2
            normal = jacobian.T @ (weights[:, None] * jacobian) + np.diag(_SPREAD**-2)
            step = -np.linalg.solve(normal, jacobian.T @ (weights * residuals) + (x - _PRIOR) / _SPREAD**2)
            tried = self._search(x, step, cost)
            if tried is None:
                break
            x, new_cost, residuals = tried
            is_done, cost = cost - new_cost < 1e-4 * cost, new_cost
            if is_done:
                break
        self.spreads = dict(zip(NAMES, np.sqrt(np.diag(np.linalg.inv(normal))).tolist(), strict=True))
        return dict(zip(NAMES, np.exp(x).tolist(), strict=True))

    @cached_property
    def _of_constant(self) -> list[list[int]]:
        """For each constant the records whose time depends on it."""
        start = {name: prior.value for name, prior in PRIORS.items()}
        everyone = range(len(self.records))
        plain = self._log_errors(start, everyone)
        moved = [self._log_errors({**start, name: 1.3 * start[name]}, everyone) for name in NAMES]
        return [np.flatnonzero(np.abs(errors - plain) > 1e-9).tolist() for errors in moved]

    def _jacobian(self, x: np.ndarray, residuals: np.ndarray) -> np.ndarray:
        jacobian = np.zeros((len(self.records), len(NAMES)))
        for index, which in enumerate(self._of_constant):
            moved = x.copy()
            moved[index] += _STEP
            values = dict(zip(NAMES, np.exp(moved).tolist(), strict=True))
            jacobian[which, index] = (self._log_errors(values, which) - residuals[which]) / _STEP
        return jacobian

    def _search(self, x: np.ndarray, step: np.ndarray, cost: float) -> tuple[np.ndarray, float, np.ndarray] | None:
        """Return the first point on the way of `step`, halved as often as needed, that costs less."""
        for halvings in range(10):
            tried = np.minimum(x + step / 2**halvings, _UPPER)
            new_cost, residuals = self._cost(tried)
            if new_cost < cost:
                return tried, new_cost, residuals
        return None

    def _cost(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        values = dict(zip(NAMES, np.exp(x).tolist(), strict=True))
        residuals = self._log_errors(values, range(len(self.records)))
        z = np.abs(residuals / _SIGMA)
        loss = np.where(z <= _SCALE, z**2, 2 * _SCALE * z - _SCALE**2)
        return float((self._weights * loss).sum() + (((x - _PRIOR) / _SPREAD) ** 2).sum()), residuals

    def _log_errors(self, values: Mapping[str, float], which: Sequence[int]) -> np.ndarray:
        constants = with_values(shipped_constants(), values)
        return np.array([math.log1p(error_of(self.records[index], constants)) for index in which])


def error_of(record: Record, constants: Constants) -> float:
    """Return predicted over measured seconds, less 1."""
    assert record.run is not None
    assert record.iter_time_s
    return run_time(record.run, constants).step_s / record.iter_time_s - 1


def _robust(z: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, _SCALE / np.maximum(np.abs(z), 1e-12))


def show_errors(
    everything: Sequence[Record], values: Mapping[str, float], without: Mapping[str, Mapping[str, float]]
) -> None:
    """Print errors in sample and held out, by subset and by source group and GPU."""
    everyone = with_values(shipped_constants(), values)
    others = {group: with_values(shipped_constants(), found) for group, found in without.items()}
    print(f"{'':28}{'':>5}   in sample: median / p90, bias   held out")
    dense = timed(everything, "dense")
    rows = {name: timed(everything, name) for name in _SUBSETS}
    rows |= {f"{g} {gpu}": [r for r in dense if (r.group, r.gpu) == (g, gpu)] for g, gpu in _sources(dense)}
    for name, records in rows.items():
        inside = summarise([error_of(r, everyone) for r in records])
        outside = summarise([error_of(r, others.get(r.group, everyone)) for r in records])
        cells = "   ".join(
            f"{100 * s.median:5.1f} / {100 * s.p90:5.1f}  {100 * s.bias:+6.1f}"
            for s in (inside, outside)
            if s.median is not None and s.p90 is not None and s.bias is not None
        )
        print(f"{name:28}{len(records):5}   {cells}")


def _sources(records: Sequence[Record]) -> list[tuple[str, str]]:
    return sorted({(record.group, record.gpu) for record in records})


def write_constants(fit: Fit, values: Mapping[str, float]) -> None:
    """Write the shipped constants with `values`, rounded, and what each was fitted on."""
    base = shipped_constants()
    found = with_values(base, {name: float(f"{value:.3g}") for name, value in values.items()})
    lines = [
        "# Constants of the cost model that no data sheet gives; spec/constants.py says what each means.",
        "# Written by benchmarks/fit_constants.py: values with standard errors of their logarithms, below priors.",
        "",
    ]
    for name, value in found.model_dump(exclude={"devices", "source"}).items():
        lines += _constant(fit, name, name, value)
    lines += [f"source: >-\n  {_SOURCE}", "", "devices:"]
    for kind in found.devices:
        groups = sorted({r.group for r in fit.records if r.run and r.run.cluster.device.name.startswith(kind.prefixes)})
        lines += [f"  - name: {kind.name}", f"    prefixes: [{', '.join(kind.prefixes)}]"]
        lines += [f"    fitted_on: [{', '.join(groups)}]", "    constants:"]
        for name, value in kind.constants.model_dump().items():
            lines += [f"      {line}" for line in _constant(fit, f"{kind.name}.{name}", name, value)]
    CONSTANTS_YAML.write_text("\n".join(lines) + "\n", encoding="utf-8")


_SOURCE = (
    "least squares on the logarithms of published step times of dense models (see fitted_on), robust, a group of n\n"
    "  records weighing sqrt(n), with log-normal priors"
)


def _constant(fit: Fit, full_name: str, name: str, value: float) -> list[str]:
    text = f"{name}: {value:g}" if value >= 1e-3 else f"{name}: {value:.2e}"
    if full_name not in PRIORS:
        return [f"{text} # not fitted"]
    prior = PRIORS[full_name]
    return [f"# {prior.value:g} +- {prior.spread:g}: {prior.source}", f"{text} # +- {fit.spreads[full_name]:.2f}"]


if __name__ == "__main__":
    main()
