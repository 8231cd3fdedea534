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

from bisect import bisect_left
from functools import lru_cache
from math import log2

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.profile import CollectiveOp


def collective_s(op: CollectiveOp, message_bytes: float, ranks: tuple[int, ...], cluster: ClusterSpec) -> float:
    """Return the seconds of `op` over the global `ranks` with a tensor of `message_bytes`."""
    num_ranks = len(ranks)
    if num_ranks == 1 or message_bytes == 0:
        return 0.0
    if cluster.collective_samples:
        points = _measured(op, num_ranks, abs(ranks[1] - ranks[0]), cluster)
        if points:
            return _interpolated(points, message_bytes)
    bytes_per_s, latency_s = _link(ranks, cluster)
    moved_bytes, num_latencies = ring_terms(op, message_bytes, num_ranks)
    return moved_bytes / bytes_per_s + num_latencies * latency_s


@lru_cache(maxsize=4096)
def _measured(op: CollectiveOp, num_ranks: int, stride: int, cluster: ClusterSpec) -> tuple[tuple[int, float], ...]:
    """Return (bytes, seconds) samples of such groups, by size; those of another stride where there are none."""
    found = [s for s in cluster.collective_samples if s.op == op and s.num_ranks == num_ranks]
    nearest = min((abs(s.stride - stride) for s in found), default=0)
    return tuple(sorted((s.message_bytes, s.seconds) for s in found if abs(s.stride - stride) == nearest))


def _interpolated(points: tuple[tuple[int, float], ...], message_bytes: float) -> float:
    """Return seconds on the line through the two nearest samples; below the smallest they cost the same."""
    sizes = [size for size, _ in points]
    if message_bytes <= sizes[0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left(sizes, message_bytes), len(points) - 1)
    (low, low_s), (high, high_s) = points[right - 1], points[right]
    return max(low_s, low_s + (message_bytes - low) / (high - low) * (high_s - low_s))


def ring_terms(op: CollectiveOp, message_bytes: float, num_ranks: int) -> tuple[float, float]:
    """Return the bytes that a link carries and the latencies that add up (the formulas at the top)."""
    if op == "send":
        return message_bytes, 1.0
    passes = 2 if op == "all_reduce" else 1
    steps = min(num_ranks - 1, 4 * log2(num_ranks))
    return passes * (num_ranks - 1) / num_ranks * message_bytes, passes * steps


def _link(ranks: tuple[int, ...], cluster: ClusterSpec) -> tuple[float, float]:
    """Return bandwidth per rank and latency of the slowest link between `ranks`."""
    inside, across = cluster.intra_node, cluster.inter_node
    inside_bytes_per_s = inside.bytes_per_s * inside.efficiency
    num_nodes = cluster.nodes_of(ranks)
    if num_nodes == 1:
        return inside_bytes_per_s, inside.latency_s
    # Members of one node share the ring's way in and out, and so add up their network cards.
    members = max(1, len(ranks) // num_nodes)
    across_bytes_per_s = across.bytes_per_s * across.efficiency * members
    return min(inside_bytes_per_s, across_bytes_per_s), across.latency_s


def exposed_s(communication_s: float, compute_s: float, slowdown: float | None) -> float:
    """Return what communication adds to compute that it runs beside.

    While both run, each is slower by `slowdown` (arXiv 2307.02031, section 4.2), so together they
    take max(x, y) + (slowdown - 1) min(x, y). None: they cannot overlap.
    """
    if slowdown is None:
        return communication_s
    longer, shorter = max(communication_s, compute_s), min(communication_s, compute_s)
    return longer + (slowdown - 1) * shorter - compute_s
