"""Rates from measured samples: a profile put in the place of a cluster's datasheet figures.

Compute: FLOPs over seconds of all matrix products of a dtype. Memory: the best rate over copies.
Links: latency a and bandwidth w of the formulas in `cost.comm` by least squares on relative errors,
over all collectives inside a node, and over those across nodes. Samples themselves go before fits.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.comm import ring_terms
from meshwright.errors import UserError
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from meshwright.spec.profile import CollectiveSample, Profile

_MOST_SPREAD = 1.0


def fitted_cluster(cluster: ClusterSpec, profile: Profile) -> ClusterSpec:
    """Return `cluster` with the rates that `profile` measured; what it did not measure stays.

    Raises UserError when the profile is of another kind of device.
    """
    if profile.backend != cluster.device.backend:
        raise UserError(
            f"profile: was measured on {profile.backend}, but {cluster.name} is {cluster.device.backend}; "
            "measure one there with meshwright profile"
        )
    device = cluster.device.model_copy(update=_device_changes(cluster.device, profile))
    update: dict[str, object] = {
        "device": device,
        "collective_samples": profile.collectives or cluster.collective_samples,
        "unit_samples": profile.units or cluster.unit_samples,
    }
    for name, is_across in (("intra_node", False), ("inter_node", True)):
        samples = [s for s in profile.collectives if (s.num_nodes > 1) == is_across]
        if samples:
            update[name] = fitted_link(samples)
    return cluster.model_copy(update=update)


def _device_changes(device: DeviceSpec, profile: Profile) -> dict[str, object]:
    changes: dict[str, object] = {"source": f"measured on {profile.num_ranks} ranks of {profile.device}"}
    if profile.matmuls:
        changes |= _matmul_rates(device, profile)
    if profile.copies:
        changes["memory_bytes_per_s"] = max(s.moved_bytes / s.seconds for s in profile.copies)
        changes["memory_efficiency"] = 1.0
    if profile.launches:
        changes["launch_s"] = float(np.median([s.seconds for s in profile.launches]))
    if profile.layers:
        changes["layer_samples"] = profile.layers
    if profile.optimizers:
        changes["optimizer_elements_per_s"] = max(s.num_elements / s.seconds for s in profile.optimizers)
    if profile.accumulations:
        changes["accumulate_elements_per_s"] = max(s.num_elements / s.seconds for s in profile.accumulations)
    if profile.overlaps and device.overlap_slowdown is not None:  # else the runtime cannot overlap
        changes["overlap_slowdown"] = float(np.median([max(1.0, s.compute_slowdown) for s in profile.overlaps]))
        changes["communication_slowdown"] = float(
            np.median([max(1.0, s.communication_slowdown) for s in profile.overlaps])
        )
    return changes


def _matmul_rates(device: DeviceSpec, profile: Profile) -> dict[str, object]:
    """Return rates as measured, or as reached so far for a dtype that was not; attention keeps its share of them."""
    changes: dict[str, object] = {
        "matmul_efficiency": 1.0,
        "attention_efficiency": min(1.0, device.attention_efficiency / device.matmul_efficiency),
    }
    for dtype, field in (("bf16", "bf16_flops_per_s"), ("fp32", "fp32_flops_per_s")):
        products = [s for s in profile.matmuls if s.dtype == dtype]
        reached = getattr(device, field) * device.matmul_efficiency
        measured = sum(2.0 * s.m * s.k * s.n for s in products) / (sum(s.seconds for s in products) or 1.0)
        changes[field] = measured or reached
    return changes


def fitted_link(samples: list[CollectiveSample]) -> LinkSpec:
    """Return latency and bandwidth that best explain `samples` (least squares on relative errors, both positive)."""
    # A sample that varies by more than it is says nothing about the link.
    samples = [s for s in samples if s.spread < _MOST_SPREAD] or samples
    rows = np.array([ring_terms(s.op, s.message_bytes, s.num_ranks) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    inverse_rate, latency_s = _non_negative(rows / seconds[:, None], np.ones(len(samples)))
    slowest = float((seconds / np.maximum(rows[:, 0], 1.0)).min())
    return LinkSpec(bytes_per_s=1.0 / (inverse_rate or slowest), latency_s=latency_s)


def _non_negative(rows: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Return the least-squares solution with two unknowns, neither below zero."""
    best = (0.0, 0.0)
    best_error = np.inf
    for columns in ((0, 1), (0,), (1,)):
        part, *_ = np.linalg.lstsq(rows[:, columns], target, rcond=None)
        if (part < 0).any():
            continue
        full = np.zeros(2)
        full[list(columns)] = part
        error = float(((rows @ full - target) ** 2).sum())
        if error < best_error:
            best, best_error = (float(full[0]), float(full[1])), error
    return best
