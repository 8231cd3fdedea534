"""Seconds of one collective: latency and bandwidth of the links that its ranks really cross.

Ring algorithms (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521), n ranks, message
of b bytes (the whole tensor), link bandwidth w and latency a:

    all-reduce                  2 (n-1)/n b/w + 2 steps(n) a
    all-gather, reduce-scatter    (n-1)/n b/w +   steps(n) a
    all-to-all                    (n-1)/n b/w +   steps(n) a
    send                                  b/w +            a

steps(n) = min(n-1, 4 log2 n): libraries switch to trees where a ring's latency would dominate
(the constant is from fits on published runs). A group that crosses nodes uses the network, shared
by its members inside one node.
"""

from __future__ import annotations

from math import log2

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.profile import CollectiveOp


def collective_s(op: CollectiveOp, message_bytes: float, ranks: tuple[int, ...], cluster: ClusterSpec) -> float:
    """Return the seconds of `op` over the global `ranks` with a tensor of `message_bytes`."""
    num_ranks = len(ranks)
    if num_ranks == 1 or message_bytes == 0:
        return 0.0
    bytes_per_s, latency_s = _link(ranks, cluster)
    moved_bytes, num_latencies = ring_terms(op, message_bytes, num_ranks)
    return moved_bytes / bytes_per_s + num_latencies * latency_s


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
