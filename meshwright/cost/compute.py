"""Seconds of computing one layer on one rank: a roofline over its operators (`operators.py`), plus their launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from meshwright.cost.lines import Points, on_line, rising
from meshwright.cost.operators import (
    BACKWARD_ATTENTION,
    LOSS_BACKWARD_BYTES,
    LOSS_FORWARD_BYTES,
    flash_s,
    layer_launches,
    matmul_s,
    sample_moved,
    score_bytes,
)
from meshwright.spec.base import dtype_bytes
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.flops import AttentionCore, attention_cores, custom_flops, num_tokens, weight_products
from meshwright.spec.job import JobSpec
from meshwright.spec.model import HeadLayer, LayerSpec, PatchEmbeddingLayer
from meshwright.spec.profile import LayerSample
from meshwright.spec.tensors import Lengths

_SCORE_LAUNCHES = (5, 7)  # of attention whose scores are tensors, forward and backward
_HALF = 2  # bytes of the dtype that the per-token byte counts were made for
_OPTIMIZER_BYTES = 40  # norm, clipping, and AdamW, which rewrites master and states


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSeconds:
    """Forward and backward seconds of one layer for one micro-batch on one rank, without communication.

    `forward_wait_s`, `backward_wait_s`: what ranks that talk to each other wait for the slowest of the moment.
    """

    forward_s: float
    backward_s: float
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0


@lru_cache(maxsize=65536)
def layer_compute(layer: LayerSpec, tp: int, samples_per_rank: int, job: JobSpec, device: DeviceSpec) -> ComputeSeconds:
    """Return the compute seconds of `layer` split over `tp` ranks, for `samples_per_rank` samples.

    Measured samples of the layer decide where the device has them; what they say of other layers
    scales the roofline.
    """
    measured = _interpolated(_samples(layer, tp, job, device), samples_per_rank)
    if measured is not None:
        return measured
    modelled = _roofline(layer, tp, samples_per_rank, job, device)
    forward, backward = _calibration(job, device)
    return ComputeSeconds(forward_s=forward * modelled.forward_s, backward_s=backward * modelled.backward_s)


def measured_counts(layer: LayerSpec, tp: int, job: JobSpec, device: DeviceSpec) -> tuple[int, ...]:
    """Return the numbers of samples a rank for which this layer, split and typed so, was measured."""
    return tuple(s.samples_per_rank for s in _samples(layer, tp, job, device))


def measured_saved_bytes(
    layer: LayerSpec, tp: int, samples_per_rank: int, job: JobSpec, device: DeviceSpec
) -> int | None:
    """Return what autograd was seen to keep of a forward pass, in proportion to the samples; None: not measured."""
    if not device.layer_samples:
        return None
    points = [s for s in _samples(layer, tp, job, device) if s.saved_bytes]
    if not points:
        return None
    nearest = min(points, key=lambda s: abs(s.samples_per_rank - samples_per_rank))
    return round(nearest.saved_bytes / nearest.samples_per_rank * samples_per_rank)


def _samples(layer: LayerSpec, tp: int, job: JobSpec, device: DeviceSpec) -> list[LayerSample]:
    """Return the samples of this layer, split and typed so, by number of samples."""
    found = [
        s
        for s in device.layer_samples
        if s.tp == tp and s.lengths == job.lengths and s.dtype == job.param_dtype and s.layer == layer
    ]
    distinct = {s.samples_per_rank: s for s in sorted(found, key=lambda s: s.busy_ranks)}  # the most ranks busy
    return [distinct[count] for count in sorted(distinct)]


def _interpolated(points: list[LayerSample], samples_per_rank: int) -> ComputeSeconds | None:
    """Return seconds on the lines through the samples: more never takes less than fewer."""
    if not points:
        return None
    # A pass that ends in a meeting takes no less than one alone: where noise says otherwise, the smaller counts.
    forward = tuple((p.samples_per_rank, min(p.forward_s, p.met_forward_s or p.forward_s)) for p in points)
    backward = tuple((p.samples_per_rank, min(p.backward_s, p.met_backward_s or p.backward_s)) for p in points)
    met = [p for p in points if p.met_forward_s and p.met_backward_s]
    forward_wait = tuple((p.samples_per_rank, max(0.0, p.met_forward_s - p.forward_s)) for p in met)
    backward_wait = tuple((p.samples_per_rank, max(0.0, p.met_backward_s - p.backward_s)) for p in met)
    return ComputeSeconds(
        forward_s=_on_line(forward, samples_per_rank),
        backward_s=_on_line(backward, samples_per_rank),
        forward_wait_s=_on_line(forward_wait, samples_per_rank) if met else 0.0,
        backward_wait_s=_on_line(backward_wait, samples_per_rank) if met else 0.0,
    )


def _on_line(points: Points, count: int) -> float:
    """Return seconds at `count` samples; below the smallest count in proportion.

    Above the largest by half the last point's seconds a sample at least: noise may have made the line flat.
    """
    points = rising(points)
    last, last_s = points[-1]
    return on_line(points, count, at_nothing_s=0.0, least_slope=last_s / last / 2)


@lru_cache(maxsize=256)
def _calibration(job: JobSpec, device: DeviceSpec) -> tuple[float, float]:
    """Return measured over modelled seconds, forward and backward: medians over all samples of the dtype."""
    ratios: list[tuple[float, float]] = []
    for s in device.layer_samples:
        if s.dtype == job.param_dtype:
            lengths = {"seq_len": s.seq_len, "target_seq_len": s.target_seq_len or None}
            modelled = _roofline(s.layer, s.tp, s.samples_per_rank, job.model_copy(update=lengths), device)
            ratios.append((s.forward_s / modelled.forward_s, s.backward_s / modelled.backward_s))
    if not ratios:
        return 1.0, 1.0
    return median(f for f, _ in ratios), median(b for _, b in ratios)


def _roofline(layer: LayerSpec, tp: int, samples_per_rank: int, job: JobSpec, device: DeviceSpec) -> ComputeSeconds:
    forward_s, backward_s = _attention_s(layer, tp, samples_per_rank, job, device)
    for count, rows, columns, inner in _matmuls(layer, tp, samples_per_rank, job.lengths):
        forward_s += _matmul_s(count, rows, columns, inner, job, device)
        backward_s += _matmul_s(count, columns, inner, rows, job, device)
        if not isinstance(layer, PatchEmbeddingLayer):  # images need no gradient
            backward_s += _matmul_s(count, rows, inner, columns, job, device)
    forward_bytes, backward_bytes = _moved_bytes(layer, tp, samples_per_rank, job)
    forward_launches, backward_launches = layer_launches(layer)
    bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
    return ComputeSeconds(
        forward_s=forward_s + forward_bytes / bytes_per_s + forward_launches * device.launch_s,
        backward_s=backward_s + backward_bytes / bytes_per_s + backward_launches * device.launch_s,
    )


def accumulate_s(num_elements: int, job: JobSpec, device: DeviceSpec) -> float:
    """Return the seconds to add one micro-batch's gradients of `num_elements` local parameters."""
    if device.accumulate_elements_per_s is not None:
        return num_elements / device.accumulate_elements_per_s
    moved = num_elements * (dtype_bytes(job.param_dtype) + 2 * dtype_bytes(job.reduce_dtype))
    return moved / (device.memory_bytes_per_s * device.memory_efficiency)


def optimizer_s(num_elements: int, device: DeviceSpec) -> float:
    """Return the seconds of norm, clipping and AdamW on `num_elements` parameters of a rank."""
    if device.optimizer_elements_per_s is not None:
        return num_elements / device.optimizer_elements_per_s
    return num_elements * _OPTIMIZER_BYTES / (device.memory_bytes_per_s * device.memory_efficiency)


def _matmuls(layer: LayerSpec, tp: int, samples: int, lengths: Lengths) -> Iterator[tuple[int, float, float, float]]:
    """Yield (count, rows, columns, inner) of every weight product of the layer's forward pass.

    Those of all experts are `count` products of equal shares of the visits, launched as one.
    """
    for parameter, sample_rows in weight_products(layer, lengths):
        *experts, num_outputs, num_inputs = parameter.local_shape(tp)
        rows = samples * sample_rows
        count = max(1, min(rows, *experts)) if experts else 1
        yield count, rows / count, num_outputs, num_inputs


def _matmul_s(count: int, rows: float, columns: float, inner: float, job: JobSpec, device: DeviceSpec) -> float:
    flops_per_s = device.peak_flops_per_s(job.param_dtype) * device.matmul_efficiency
    bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
    seconds = matmul_s(rows, columns, inner, flops_per_s, bytes_per_s, dtype_bytes(job.param_dtype))
    return count * seconds + device.launch_s


def _attention_s(layer: LayerSpec, tp: int, samples: int, job: JobSpec, device: DeviceSpec) -> tuple[float, float]:
    """Return the seconds of all attention cores, forward and backward."""
    rate = device.peak_flops_per_s(job.param_dtype) * device.attention_efficiency
    bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
    forward_s = custom_flops(layer, job.lengths) * samples / tp / rate
    backward_s = 2 * forward_s
    for attention, num_queries, num_keys in attention_cores(layer, job.lengths):
        flops = AttentionCore(attention, num_queries, num_keys).flops * samples / tp
        if attention.keeps_scores:
            scores = attention.num_heads / tp * num_queries * num_keys * samples
            moved = score_bytes(scores * dtype_bytes(job.param_dtype) / _HALF)
            forward_s += flops / rate + moved.forward_bytes / bytes_per_s + _SCORE_LAUNCHES[0] * device.launch_s
            backward_s += 2 * flops / rate + moved.backward_bytes / bytes_per_s + _SCORE_LAUNCHES[1] * device.launch_s
        else:
            core_s = flash_s(flops, num_keys, rate, causal=attention.causal) + device.launch_s
            forward_s, backward_s = forward_s + core_s, backward_s + BACKWARD_ATTENTION * core_s
    return forward_s, backward_s


def _moved_bytes(layer: LayerSpec, tp: int, samples: int, job: JobSpec) -> tuple[float, float]:
    moved = sample_moved(layer, tp, job.lengths)
    scale = samples * dtype_bytes(job.param_dtype) / _HALF
    forward, backward = scale * moved.forward_bytes, scale * moved.backward_bytes
    if isinstance(layer, HeadLayer):
        logits = samples * num_tokens(layer, job.lengths) * layer.padded_vocab_size / tp
        forward, backward = forward + logits * LOSS_FORWARD_BYTES, backward + logits * LOSS_BACKWARD_BYTES
    return forward, backward
