"""Seconds of one collective: latency and bandwidth of the links that its ranks really cross.

Ring algorithms (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521), n ranks, message
of b bytes (the whole tensor), link bandwidth w and latency a:

    all-reduce                  2 (n-1)/n b/w + 2 steps(n) a
    all-gather, reduce-scatter    (n-1)/n b/w +   steps(n) a
    all-to-all                    (n-1)/n b/w +   steps(n) a
    send                                  b/w +            a

steps(n) = min(n-1, 4 log2 n): libraries switch to trees where a ring's latency would dominate
(the constant is from fits on published runs). A group that crosses nodes uses the network, shared
by its members inside one node. Where a profile has samples of a collective for groups of that size,
they decide, in a straight line between message sizes.
"""

from __future__ import annotations

from functools import lru_cache
from math import log2
from typing import Literal

from meshwright.cost.lines import Points, on_line, rising
from meshwright.spec.base import Dtype
from meshwright.spec.cluster import ClusterSpec, DeviceSpec
from meshwright.spec.profile import CollectiveOp, CollectiveSample, UnitOp, UnitSample

# The collective in the midst of what a unit does; nobody talks when gradients are accumulated.
UNIT_COLLECTIVES: dict[UnitOp, CollectiveOp] = {
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
}


def collective_s(
    op: CollectiveOp, message_bytes: float, ranks: tuple[int, ...], cluster: ClusterSpec, dtype: Dtype = "fp32"
) -> float:
    """Return the seconds of `op` over the global `ranks` with a tensor of `message_bytes`."""
    num_ranks = len(ranks)
    if num_ranks == 1 or message_bytes == 0:
        return 0.0
    stride, num_nodes = group_shape(ranks, cluster.devices_per_node)
    if cluster.collective_samples:
        points = _measured(cluster, "collective", op, dtype, num_ranks, stride, num_nodes)
        if points:
            return _on_line(points, message_bytes, _slope(op, num_ranks, num_nodes, cluster))
    bytes_per_s, latency_s = _link(num_ranks, num_nodes, cluster)
    moved_bytes, num_latencies = ring_terms(op, message_bytes, num_ranks)
    return moved_bytes / bytes_per_s + num_latencies * latency_s


def unit_s(
    op: UnitOp, message_bytes: float, ranks: tuple[int, ...], cluster: ClusterSpec, dtype: Dtype
) -> float | None:
    """Return the measured seconds that the data-parallel runtime adds to a pass; None where nothing was measured."""
    if not cluster.unit_samples or message_bytes == 0:
        return None
    stride, num_nodes = group_shape(ranks, cluster.devices_per_node)
    points = _measured(cluster, "unit", op, dtype, len(ranks), stride, num_nodes)
    slope = _slope(UNIT_COLLECTIVES[op], len(ranks), num_nodes, cluster) if op in UNIT_COLLECTIVES else 0.0
    return _on_line(points, message_bytes, slope) if points else None


def measured_sizes(op: str, num_ranks: int, num_nodes: int, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the message sizes for which `op` was measured over as many ranks, on one node or on several."""
    return tuple(s.message_bytes for s in cluster.collective_samples if s.op == op and _is_of(s, num_ranks, num_nodes))


def _is_of(sample: CollectiveSample | UnitSample, num_ranks: int, num_nodes: int) -> bool:
    """Return whether a sample is of groups of as many ranks, inside a node or across nodes as these are."""
    return sample.num_ranks == num_ranks and (sample.num_nodes > 1) == (num_nodes > 1)


@lru_cache(maxsize=65536)
def group_shape(ranks: tuple[int, ...], devices_per_node: int) -> tuple[int, int]:
    """Return how far apart `ranks` lie, and how many nodes they touch."""
    stride = abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 1
    return stride, len({rank // devices_per_node for rank in ranks})


@lru_cache(maxsize=4096)
def _measured(
    cluster: ClusterSpec,
    kind: Literal["collective", "unit"],
    op: str,
    dtype: Dtype,
    num_ranks: int,
    stride: int,
    num_nodes: int,
) -> Points:
    """Return (bytes, seconds) samples of such groups, by size.

    Another stride or dtype stands in where there is none of these; inside a node and across nodes,
    and other numbers of ranks, never do.
    """
    samples: tuple[CollectiveSample | UnitSample, ...]
    samples = cluster.collective_samples if kind == "collective" else cluster.unit_samples
    found = [s for s in samples if s.op == op]
    if op != "accumulate":  # in which nobody talks
        found = [s for s in found if _is_of(s, num_ranks, num_nodes)]
    found = [s for s in found if s.dtype == dtype] or found
    if not found:
        return ()
    nearest = min(
        ((s.num_nodes, s.stride) for s in found), key=lambda at: (abs(at[0] - num_nodes), abs(at[1] - stride), at)
    )
    by_size: dict[int, float] = {}
    for s in found:
        if (s.num_nodes, s.stride) == nearest:
            by_size[s.message_bytes] = max(s.seconds, by_size.get(s.message_bytes, 0.0))
    return rising(tuple(sorted(by_size.items())))


def _on_line(points: Points, message_bytes: float, slope: float) -> float:
    """Return seconds between samples; below the smallest they cost the same."""
    return on_line(points, message_bytes, at_nothing_s=points[0][1], least_slope=slope)


def _slope(op: CollectiveOp, num_ranks: int, num_nodes: int, cluster: ClusterSpec) -> float:
    """Return seconds a byte at the bandwidth of the link."""
    bytes_per_s, _ = _link(num_ranks, num_nodes, cluster)
    return ring_terms(op, 1.0, num_ranks)[0] / bytes_per_s


def ring_terms(op: CollectiveOp, message_bytes: float, num_ranks: int) -> tuple[float, float]:
    """Return the bytes that a link carries and the latencies that add up (the formulas at the top)."""
    if op == "send":
        return message_bytes, 1.0
    passes = 2 if op == "all_reduce" else 1
    steps = min(num_ranks - 1, 4 * log2(num_ranks))
    return passes * (num_ranks - 1) / num_ranks * message_bytes, passes * steps


def _link(num_ranks: int, num_nodes: int, cluster: ClusterSpec) -> tuple[float, float]:
    """Return bandwidth per rank and latency of the slowest link between ranks on so many nodes."""
    inside, across = cluster.intra_node, cluster.inter_node
    inside_bytes_per_s = inside.bytes_per_s * inside.efficiency
    if num_nodes == 1:
        return inside_bytes_per_s, inside.latency_s
    # Members of one node share the ring's way in and out, and so add up their network cards.
    members = max(1, num_ranks // num_nodes)
    across_bytes_per_s = across.bytes_per_s * across.efficiency * members
    return min(inside_bytes_per_s, across_bytes_per_s), across.latency_s


def exposed_s(communication_s: float, compute_s: float, device: DeviceSpec) -> float:
    """Return what communication adds to compute that it runs beside.

    While both run, compute is slower by a and communication by b (arXiv 2307.02031, section 4.2, has
    one factor for both), so x seconds of compute and y of communication take

        y + a x (1 - 1/b)   when compute ends first, a x <= b y,
        x + b y (1 - 1/a)   otherwise.

    A device without `overlap_slowdown` cannot overlap.
    """
    if device.overlap_slowdown is None:
        return communication_s
    a, b = device.overlap_slowdown, device.communication_slowdown or device.overlap_slowdown
    x, y = compute_s, communication_s
    together_s = y + a * x * (1 - 1 / b) if a * x <= b * y else x + b * y * (1 - 1 / a)
    return together_s - compute_s
