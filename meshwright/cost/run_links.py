"""Seconds of the collectives of a uniform run, by the size and stride of their groups.

Ranks count node by node with tensor parallelism innermost, then context and data parallelism, then pipeline stages.
A group inside a node has NVLink's rate; one that crosses nodes has the network cards of its members in a node, at most
NVLink's rate. Bytes and steps are those of `comm.ring_terms`; a gather or reduce-scatter takes a hop per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.comm import ring_terms
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.constants import Constants


@dataclass(frozen=True, slots=True)
class Links:
    """The rates that collectives reach inside and between nodes."""

    inside_bytes_per_s: float
    across_bytes_per_s: float
    inside_latency_s: float
    across_latency_s: float
    ring_hop_s: float
    devices_per_node: int

    @classmethod
    def of(cls, cluster: ClusterSpec, constants: Constants) -> Links:
        inside, across = cluster.intra_node, cluster.inter_node
        is_fitted = constants.is_fitted(cluster.device)
        return cls(
            inside.bytes_per_s * (constants.nvlink_efficiency if is_fitted else inside.efficiency),
            across.bytes_per_s * (constants.nic_efficiency if is_fitted else across.efficiency),
            inside.latency_s,
            across.latency_s,
            constants.ring_hop_s,
            cluster.devices_per_node,
        )

    def link(self, num_ranks: int, stride: int) -> tuple[float, float]:
        """Return the bytes per second of one rank of a group, and the latency of a step."""
        if num_ranks * stride <= self.devices_per_node:
            return self.inside_bytes_per_s, self.inside_latency_s
        members = min(num_ranks, max(1, self.devices_per_node // stride))
        across_bytes_per_s = self.across_bytes_per_s * members
        return min(self.inside_bytes_per_s, across_bytes_per_s), self.across_latency_s / members

    def busy_share(self, num_ranks: int, stride: int) -> float:
        """Return how busy a group's collective keeps a device beside one at NVLink's rate: it moves fewer bytes/s."""
        return self.link(num_ranks, stride)[0] / self.inside_bytes_per_s

    def all_reduce_s(self, message_bytes: float, num_ranks: int, stride: int) -> float:
        if num_ranks == 1:
            return 0.0
        bytes_per_s, latency_s = self.link(num_ranks, stride)
        moved, steps = ring_terms("all_reduce", message_bytes, num_ranks)
        return moved / bytes_per_s + steps * latency_s

    def gather_s(self, message_bytes: float, num_ranks: int, stride: int, num_buckets: int = 1) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of a tensor of `message_bytes`."""
        if num_ranks == 1:
            return 0.0
        bytes_per_s, _ = self.link(num_ranks, stride)
        moved, _ = ring_terms("all_gather", message_bytes, num_ranks)
        return moved / bytes_per_s + num_buckets * (num_ranks - 1) * self.ring_hop_s

    def exchange_s(self, message_bytes: float, num_ranks: int, stride: int) -> float:
        """Return the seconds of an all-to-all in which each rank has `message_bytes`."""
        if num_ranks == 1:
            return 0.0
        bytes_per_s, latency_s = self.link(num_ranks, stride)
        moved, steps = ring_terms("all_to_all", message_bytes, num_ranks)
        return moved / (_ALL_TO_ALL_SHARE * bytes_per_s) + steps * latency_s

    def send_s(self, message_bytes: float, num_ranks_between: int) -> float:
        """Return the seconds to a rank that is `num_ranks_between` further."""
        if num_ranks_between >= self.devices_per_node:
            return message_bytes / self.across_bytes_per_s + self.across_latency_s
        return message_bytes / self.inside_bytes_per_s + self.inside_latency_s


_ALL_TO_ALL_SHARE = 0.8  # of the bandwidth of a ring: messages are smaller by the number of ranks
