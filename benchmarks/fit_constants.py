"""Fit the constants of the cost model to published step times, with priors from the literature.

    python benchmarks/fit_constants.py --data DEV.jsonl [--write]

Least squares on log(predicted / measured) over the records of the filter `dense`, with a robust loss. A group of n
records weighs as sqrt(n), so that large sources do not decide alone. Priors are log-normal; their values and spreads
are in `PRIORS` with their source. Leave-one-group-out constants are fitted without one source each; `--write` stores
the constants of all groups in `meshwright/spec/data/constants.yaml` and the others in
`benchmarks/data/constants_logo.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from published_records import FILTERS, Record, chosen, read_records

from meshwright.cost.run_time import run_time
from meshwright.spec.constants import Constants, shipped_constants

DATA = Path(__file__).parent / "data"
CONSTANTS_YAML = Path(__file__).parent.parent / "meshwright" / "spec" / "data" / "constants.yaml"

# name -> (value, standard deviation of its logarithm).
PRIORS: dict[str, tuple[float, float]] = {
    "nvlink_efficiency": (0.7, 0.15),
    "nic_efficiency": (0.7, 0.2),
    "flash1_share": (0.6, 0.15),
    "exposed_share": (0.3, 0.25),
    "eager_factor": (2.5, 0.25),
    "eager_plain_factor": (1.4, 0.2),
    "fp8_copy_factor": (1.5, 0.4),
    "async_tp_factor": (0.55, 0.25),
    "overlapped_tp_factor": (0.5, 0.3),
    "ring_hop_s": (2e-6, 0.5),
    "straggler_share": (0.004, 0.5),
    "engine_skew_s": (3e-3, 0.7),
    "unaligned_factor": (8.0, 0.4),
    "a100.matmul_efficiency": (0.766, 0.06),
    "a100.flash2_efficiency": (0.55, 0.12),
    "a100.unfused_efficiency": (0.5, 0.2),
    "a100.memory_efficiency": (0.7, 0.12),
    "h100.matmul_efficiency": (0.707, 0.06),
    "h100.flash2_efficiency": (0.33, 0.12),
    "h100.memory_efficiency": (0.65, 0.12),
    "h100.fp8_efficiency": (0.7, 0.06),
    "b200.matmul_efficiency": (0.46, 0.15),
    "b200.flash2_efficiency": (0.45, 0.2),
    "b200.memory_efficiency": (0.7, 0.12),
    "v100.matmul_efficiency": (0.75, 0.1),
    "v100.unfused_efficiency": (0.4, 0.3),
    "v100.memory_efficiency": (0.75, 0.12),
}
SIGMA = 0.05  # of a record's log error where all is well
SCALE = 1.5  # residuals beyond it count linearly
STEP = 1e-3


def with_values(base: Constants, values: Mapping[str, float]) -> Constants:
    """Return `base` with other values; names are those of `PRIORS`."""
    kinds = []
    for kind in base.devices:
        own = {name.split(".")[1]: value for name, value in values.items() if name.startswith(f"{kind.name}.")}
        kinds.append(kind.model_copy(update={"constants": kind.constants.model_copy(update=own)}) if own else kind)
    flat = {name: value for name, value in values.items() if "." not in name}
    return base.model_copy(update={**flat, "devices": tuple(kinds)})


@dataclass
class Fit:
    """The records of a fit and how much each counts."""

    records: list[Record]
    names: tuple[str, ...] = tuple(PRIORS)

    @cached_property
    def weights(self) -> np.ndarray:
        sizes: dict[str, int] = {}
        for record in self.records:
            sizes[record.group] = sizes.get(record.group, 0) + 1
        raw = np.array([sizes[record.group] ** -0.5 for record in self.records])
        return raw * len(raw) / raw.sum()

    @cached_property
    def touched(self) -> list[list[int]]:
        """For each record the indices of the parameters that its time depends on, at the priors."""
        start = {name: PRIORS[name][0] for name in self.names}
        plain = self.log_errors(start)
        found: list[list[int]] = [[] for _ in self.records]
        for index, name in enumerate(self.names):
            moved = self.log_errors({**start, name: start[name] * 1.3})
            for i in np.flatnonzero(np.abs(moved - plain) > 1e-9):
                found[i].append(index)
        return found

    def log_errors(self, values: Mapping[str, float], which: Iterable[int] | None = None) -> np.ndarray:
        constants = with_values(shipped_constants(), values)
        records = self.records if which is None else [self.records[i] for i in which]
        return np.array([log_error(record, constants) for record in records])

    def run(self, start: Mapping[str, float] | None = None, iterations: int = 12) -> dict[str, float]:
        """Return the constants that fit best: Gauss-Newton on log parameters with reweighting."""
        prior = np.log([PRIORS[name][0] for name in self.names])
        spread = np.array([PRIORS[name][1] for name in self.names])
        x = prior.copy() if start is None else np.log([start[name] for name in self.names])
        by_parameter = [[i for i, t in enumerate(self.touched) if j in t] for j in range(len(self.names))]
        cost, residuals = self._cost(x, prior, spread)
        for _ in range(iterations):
            jacobian = np.zeros((len(self.records), len(self.names)))
            for j, which in enumerate(by_parameter):
                if which:
                    moved = x.copy()
                    moved[j] += STEP
                    values = dict(zip(self.names, np.exp(moved), strict=True))
                    jacobian[which, j] = (self.log_errors(values, which) - residuals[which]) / STEP
            w = self.weights * huber_weights(residuals / SIGMA) / SIGMA**2
            normal = jacobian.T @ (w[:, None] * jacobian) + np.diag(spread**-2)
            gradient = jacobian.T @ (w * residuals) + (x - prior) / spread**2
            step = -np.linalg.solve(normal, gradient)
            scale = 1.0
            while scale > 1e-3:
                tried = np.minimum(x + scale * step, self._upper)
                new_cost, new_residuals = self._cost(tried, prior, spread)
                if new_cost < cost:
                    break
                scale /= 2
            else:
                break
            done = cost - new_cost < 1e-4 * cost
            x, cost, residuals = tried, new_cost, new_residuals
            if done:
                break
        self.errors = dict(zip(self.names, np.sqrt(np.diag(np.linalg.inv(normal))), strict=True))
        return dict(zip(self.names, np.exp(x).tolist(), strict=True))

    @cached_property
    def _upper(self) -> np.ndarray:
        return np.array([0.0 if re.search("efficiency|share", name) else np.inf for name in self.names])

    def _cost(self, x: np.ndarray, prior: np.ndarray, spread: np.ndarray) -> tuple[float, np.ndarray]:
        residuals = self.log_errors(dict(zip(self.names, np.exp(x), strict=True)))
        z = np.abs(residuals / SIGMA)
        loss = np.where(z <= SCALE, z**2, 2 * SCALE * z - SCALE**2)
        return float((self.weights * loss).sum() + (((x - prior) / spread) ** 2).sum()), residuals


def huber_weights(z: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, SCALE / np.maximum(np.abs(z), 1e-12))


def log_error(record: Record, constants: Constants) -> float:
    assert record.run is not None
    assert record.iter_time_s
    return math.log(run_time(record.run, constants).step_s / record.iter_time_s)


def timed(records: list[Record], name: str = "dense") -> list[Record]:
    return [r for r in chosen(records, name) if r.run is not None and r.iter_time_s]


def without_each_group(records: list[Record], full: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return for each group the constants that the other groups give."""
    groups = sorted({record.group for record in records})
    return {g: Fit([r for r in records if r.group != g]).run(full, iterations=6) for g in groups}


def summary(errors: list[float]) -> str:
    """Return median and 90th percentile of absolute errors and the median error, in percent."""
    if not errors:
        return "n 0"
    relative = [math.exp(error) - 1 for error in errors]
    size = sorted(abs(error) for error in relative)
    p90 = float(np.percentile(size, 90))
    bias = statistics.median(relative)
    return f"n {len(size):4d}  {100 * statistics.median(size):5.1f} / {100 * p90:5.1f}  bias {100 * bias:+5.1f}"
