"""How many devices: the best plan for every size of a cluster of one kind of device, from one device up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.search.answer import Found, Infeasible
from meshwright.search.engine import search
from meshwright.search.planner import make_request
from meshwright.spec import library
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan

_HOURS_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of cluster: the best plan on it, or why there is none."""

    cluster: str
    num_devices: int
    plan: Plan | None
    reason: str = ""

    def cost(self, price_per_hour: float) -> float:
        """Return what a billion tokens cost at a price a device and hour; 0 where nothing runs."""
        if self.plan is None or self.plan.predicted is None:
            return 0.0
        return self.num_devices * price_per_hour * 1e9 / self.plan.predicted.tokens_per_s / _HOURS_S


def sizes(
    model: ModelSpec,
    device: str,
    *,
    global_batch: int,
    seq_len: int | None,
    target_seq_len: int | None,
    most_devices: int,
    devices_per_node: int,
    memory: str | None,
    time_limit_s: float,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Size]:
    """Yield the best plan for 1, 2, 4, .. devices of a node, and then for 1, 2, 4, .. nodes."""
    for text in _clusters(device, most_devices, devices_per_node):
        cluster = library.cluster(text)
        request = make_request(
            model,
            cluster,
            global_batch=global_batch,
            seq_len=seq_len,
            target_seq_len=target_seq_len,
            memory=memory,
            time_limit_s=time_limit_s,
        )
        if progress is not None:
            progress(f"{cluster.num_devices} devices")
        outcome: Found | Infeasible = search(request)
        yield Size(
            cluster=text,
            num_devices=cluster.num_devices,
            plan=outcome.plan if isinstance(outcome, Found) else None,
            reason=outcome.reason if isinstance(outcome, Infeasible) else "",
        )


def _clusters(device: str, most_devices: int, devices_per_node: int) -> Iterator[str]:
    count = 1
    while count <= most_devices:
        if count < devices_per_node:
            yield f"{count}x{device}"
            count = min(2 * count, devices_per_node)
        else:
            nodes = count // devices_per_node
            yield f"{nodes}x{devices_per_node}x{device}" if nodes > 1 else f"{devices_per_node}x{device}"
            count = 2 * nodes * devices_per_node
