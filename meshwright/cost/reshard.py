"""Seconds of moving a hidden tensor: between the layouts of neighbouring layers, and between stages."""

from __future__ import annotations

from functools import lru_cache

from meshwright.cost.comm import collective_s
from meshwright.cost.movement import movement
from meshwright.spec.base import dtype_bytes
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.mesh import Layout
from meshwright.spec.tensors import TensorSpec


def tensor_bytes(tensor: TensorSpec, job: JobSpec) -> int:
    """Return the bytes of `tensor` for one sample."""
    return tensor.num_elements(job.lengths) * dtype_bytes(job.param_dtype if tensor.dtype == "param" else tensor.dtype)


@lru_cache(maxsize=65536)
def relayout_s(
    tensors: tuple[TensorSpec, ...],
    source: Layout,
    target: Layout,
    micro_batch_samples: int,
    job: JobSpec,
    cluster: ClusterSpec,
) -> float:
    """Return the seconds of one micro-batch's `tensors` going from `source` to `target` inside a stage.

    The gradient's way back is `relayout_s(tensors, target, source, ...)`.
    """
    moved = movement(source, target, cluster.devices_per_node)
    if moved.kind == "none":
        return 0.0
    total_s = 0.0
    device = cluster.device
    for tensor in tensors:
        sample_bytes = tensor_bytes(tensor, job)
        # What a rank ends up with is written once, wherever it came from.
        target_bytes = micro_batch_samples // target.dp * sample_bytes
        total_s += device.launch_s + 2 * target_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
        received = moved.largest_received_units * (micro_batch_samples / moved.num_units) * sample_bytes
        if received:
            group = moved.widest_group
            message_bytes = received * len(group) / (len(group) - 1)
            op = "all_gather" if moved.kind == "all_gather" else "all_to_all"
            total_s += collective_s(op, message_bytes, group, cluster, job.param_dtype)
    return total_s


@lru_cache(maxsize=65536)
def border_s(
    tensors: tuple[TensorSpec, ...],
    sender: Layout,
    micro_batch_samples: int,
    num_stages: int,
    job: JobSpec,
    cluster: ClusterSpec,
) -> float:
    """Return the seconds of sending one micro-batch's `tensors` to the next stage, in the sender's layout.

    Every rank sends its own slice to the rank at its own place in the next stage. All borders are
    priced as the slowest one.
    """
    stage_ranks, node = sender.num_ranks, cluster.devices_per_node
    # The first rank whose neighbour in the next stage is on another node, or else rank 0.
    first = max(0, node - stage_ranks)
    pair = (first, first + stage_ranks) if first < stage_ranks * (num_stages - 1) else (0, stage_ranks)
    samples = micro_batch_samples // sender.dp
    return sum(collective_s("send", samples * tensor_bytes(t, job), pair, cluster, job.param_dtype) for t in tensors)
