"""Calibration: factors from runs, and a cluster and a budget that have them.

With few runs one factor, the median of measured over predicted seconds, scales everything. With `_ENOUGH_RUNS` that
differ enough, compute and the rest get a factor each, by least squares on relative errors,

    minimise  sum over runs of ((a compute + b rest) / measured - 1)^2,   a, b > 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from meshwright.errors import UserError
from meshwright.spec.calibration import MOST_FACTOR, Calibration
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.spec.job import Budget
from meshwright.spec.plan import Plan, Prediction
from meshwright.spec.profile import LayerSample

_ENOUGH_RUNS = 6
_LEAST_SPREAD_OF_SHARES = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasured:
    """A plan with its prediction, and what its run took: a step, and the fullest rank."""

    plan: Plan
    step_s: float
    peak_bytes: int


def calibrate(runs: list[RunMeasured]) -> Calibration:
    """Return the factors that `runs` give. Raises UserError when they are not of one kind of device, or absurd."""
    devices = {run.plan.cluster.device.name for run in runs}
    if len(devices) != 1:
        raise UserError(f"runs: are of {', '.join(sorted(devices)) or 'no device'}; calibrate one kind at a time")
    predicted = [_prediction(run) for run in runs]
    ratios = [run.step_s / one.step_s for run, one in zip(runs, predicted, strict=True)]
    bytes_ratios = [run.peak_bytes / one.peak_bytes for run, one in zip(runs, predicted, strict=True)]
    compute, communication = _two_factors(runs, predicted) or (median(ratios), median(ratios))
    memory = median(bytes_ratios)
    for what, factor in (("step", compute), ("step", communication), ("peak memory", memory)):
        if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
            raise UserError(f"runs: the {what} measured is {factor:.3g} times the one predicted; is it the same plan?")
    fitted = [
        (compute * _compute_s(one) + communication * (one.step_s - _compute_s(one))) / run.step_s
        for run, one in zip(runs, predicted, strict=True)
    ]
    return Calibration(
        device=devices.pop(),
        num_runs=len(runs),
        compute_factor=compute,
        communication_factor=communication,
        memory_factor=memory,
        time_spread_share=max(abs(value - 1) for value in fitted),
        memory_spread_share=max(abs(ratio / memory - 1) for ratio in bytes_ratios),
    )


def calibrated_cluster(cluster: ClusterSpec, calibration: Calibration) -> ClusterSpec:
    """Return `cluster` with all seconds of compute and of communication scaled.

    Raises UserError when the calibration is of another kind of device.
    """
    if calibration.device != cluster.device.name:
        raise UserError(f"calibration: is of {calibration.device}, but {cluster.name} has {cluster.device.name}")
    factor, links = calibration.compute_factor, calibration.communication_factor
    return cluster.model_copy(
        update={
            "device": _slower(cluster.device, factor),
            "intra_node": _slower_link(cluster.intra_node, links),
            "inter_node": _slower_link(cluster.inter_node, links),
            "collective_samples": tuple(
                s.model_copy(update={"seconds": s.seconds * links}) for s in cluster.collective_samples
            ),
            "unit_samples": tuple(s.model_copy(update={"seconds": s.seconds * links}) for s in cluster.unit_samples),
        }
    )


def calibrated_budget(budget: Budget, calibration: Calibration) -> Budget:
    """Return `budget` with what predictions were too low by held back; one that were too high stays as it is."""
    factor = max(1.0, calibration.memory_factor)
    held_back = round(budget.usable_bytes * (1 - 1 / factor))
    return budget.model_copy(update={"reserved_bytes": budget.reserved_bytes + held_back})


def _prediction(run: RunMeasured) -> Prediction:
    if run.plan.predicted is None:
        raise UserError("plan: has no prediction to hold against its run")
    return run.plan.predicted


def _compute_s(predicted: Prediction) -> float:
    """Return the compute of the slowest stage, all micro-batches, in proportion to the step: what is not waiting."""
    shares: list[float] = []
    for stage in predicted.stages:
        both = stage.micro_batch.forward + stage.micro_batch.backward
        compute_s = both.compute_s + both.recompute_s
        shares.append(compute_s / both.total_s if both.total_s else 1.0)
    return max(shares) * predicted.step_s


def _two_factors(runs: list[RunMeasured], predicted: list[Prediction]) -> tuple[float, float] | None:
    """Return factors of compute and of the rest; None where the runs cannot tell them apart."""
    if len(runs) < _ENOUGH_RUNS:
        return None
    compute = np.array([_compute_s(one) for one in predicted])
    total, measured = np.array([one.step_s for one in predicted]), np.array([run.step_s for run in runs])
    if float(np.std(compute / total)) < _LEAST_SPREAD_OF_SHARES:
        return None
    rows = np.stack([compute, total - compute], axis=1) / measured[:, None]
    (one, two), *_ = np.linalg.lstsq(rows, np.ones(len(runs)), rcond=None)
    return (float(one), float(two)) if one > 0 and two > 0 else None


def _slower(device: DeviceSpec, factor: float) -> DeviceSpec:
    update: dict[str, object] = {
        "launch_s": device.launch_s * factor,
        "layer_samples": tuple(_slower_layer(sample, factor) for sample in device.layer_samples),
        "source": f"{device.source}; calibrated by {factor:.3g}",
    }
    for rate in ("optimizer_elements_per_s", "accumulate_elements_per_s"):
        if (value := getattr(device, rate)) is not None:
            update[rate] = value / factor
    if device.backend == "cpu":  # whose rates are what was reached, at efficiencies of 1
        for rate in ("bf16_flops_per_s", "fp32_flops_per_s", "memory_bytes_per_s"):
            update[rate] = getattr(device, rate) / factor
    else:  # efficiencies, so that mfu stays a share of the device's peak; they are at most 1
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
            update[name] = min(1.0, getattr(device, name) / factor)
    return device.model_copy(update=update)


def _slower_layer(sample: LayerSample, factor: float) -> LayerSample:
    names = ("forward_s", "backward_s", "met_forward_s", "met_backward_s")
    return sample.model_copy(update={name: getattr(sample, name) * factor for name in names})


def _slower_link(link: LinkSpec, factor: float) -> LinkSpec:
    return link.model_copy(update={"bytes_per_s": link.bytes_per_s / factor, "latency_s": link.latency_s * factor})
