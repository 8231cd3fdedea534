"""The ways to part the ranks into equal groups: what collectives and data-parallel units are measured over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.runtime.groups import new_group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """Groups of `size` ranks that lie `stride` apart; `group` is this rank's. All are busy at the same time."""

    size: int
    stride: int
    num_nodes: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def label(self) -> str:
        apart = f", {self.stride} apart" if self.stride > 1 else ""
        return f"{self.size} ranks{apart}"


def make_ways() -> tuple[Way, ...]:
    """Return every way for the ranks of the job. Collective: all ranks make all groups in the same order."""
    return tuple(_ways())


def ranks_per_node() -> int:
    """Return how many ranks the launcher started on this machine (all of them, where it does not say)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _ways() -> Iterator[Way]:
    num_ranks, node = dist.get_world_size(), ranks_per_node()
    for size in (d for d in range(2, num_ranks + 1) if num_ranks % d == 0):
        for stride in (d for d in range(1, num_ranks // size + 1) if (num_ranks // size) % d == 0):
            for start in range(0, num_ranks, size * stride):
                for offset in range(stride):
                    ranks = tuple(range(start + offset, start + offset + size * stride, stride))
                    group = new_group(ranks)
                    if group is not None:
                        num_nodes = len({rank // node for rank in ranks})
                        yield Way(size=size, stride=stride, num_nodes=num_nodes, ranks=ranks, group=group)
