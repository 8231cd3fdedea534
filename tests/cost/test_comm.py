"""Seconds of collectives: what more bytes, more ranks and slower links do, and what overlap leaves."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.comm import collective_s, exposed_s
from meshwright.cost.lines import rising
from meshwright.spec.cluster import ClusterSpec, DeviceSpec
from meshwright.spec.library import cluster
from meshwright.spec.profile import CollectiveOp, CollectiveSample

TWO_NODES = cluster("2x8xa100-sxm-40g")
OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SECONDS = st.floats(0, 1e3, allow_subnormal=False)
DEVICE = TWO_NODES.device


def device(slowdown: float | None, communication: float | None = None) -> DeviceSpec:
    return DEVICE.model_copy(update={"overlap_slowdown": slowdown, "communication_slowdown": communication})


@given(
    op=st.sampled_from(OPS),
    size=st.sampled_from([2, 4, 8, 16]),
    message_bytes=st.integers(1, 1 << 32),
    more=st.integers(1, 1 << 32),
)
def test_more_bytes_take_longer(op: CollectiveOp, size: int, message_bytes: int, more: int):
    ranks = tuple(range(2 if op == "send" else size))
    assert (
        0 < collective_s(op, message_bytes, ranks, TWO_NODES) < collective_s(op, message_bytes + more, ranks, TWO_NODES)
    )


@given(size=st.integers(2, 16), message_bytes=st.integers(1, 1 << 32))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, message_bytes: int):
    ranks = tuple(range(size))
    both = [collective_s(op, message_bytes, ranks, TWO_NODES) for op in ("reduce_scatter", "all_gather")]
    assert both[0] == both[1]
    assert collective_s("all_reduce", message_bytes, ranks, TWO_NODES) == pytest.approx(2 * both[0], rel=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_crossing_nodes_is_slower(op: CollectiveOp):
    for inside, across in (((0, 1), (7, 8)), ((0, 1), (0, 15))):
        assert collective_s(op, 1e8, inside, TWO_NODES) < collective_s(op, 1e8, across, TWO_NODES)
    if op != "send":
        # Four ranks on two nodes use two network cards of each, four ranks on four nodes one.
        four = cluster("4x8xa100-sxm-40g")
        assert collective_s(op, 1e8, (0, 1, 2, 3), four) < collective_s(op, 1e8, (0, 1, 8, 9), four)
        assert collective_s(op, 1e8, (0, 1, 8, 9), four) < collective_s(op, 1e8, (0, 8, 16, 24), four)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_more_ranks_are_not_faster(op: CollectiveOp):
    times = [collective_s(op, 1e6, tuple(range(size)), TWO_NODES) for size in (1, 2, 4, 8, 16)]
    assert times[0] == 0
    assert times == sorted(times)


def test_the_formula_by_hand():
    link = TWO_NODES.intra_node
    rate = link.bytes_per_s * link.efficiency
    expected = 2 * 7 / 8 * 1e9 / rate + 2 * 7 * link.latency_s
    assert collective_s("all_reduce", 1e9, tuple(range(8)), TWO_NODES) == pytest.approx(expected, rel=1e-12)
    assert collective_s("send", 1e9, (0, 1), TWO_NODES) == pytest.approx(1e9 / rate + link.latency_s, rel=1e-12)
    assert collective_s("all_gather", 0, (0, 1), TWO_NODES) == 0
    wide = cluster("64x8xa100-sxm-40g")
    tree = collective_s("all_gather", 1e-9, tuple(range(512)), wide)
    assert tree == pytest.approx(4 * log2(512) * wide.inter_node.latency_s)


@given(communication=SECONDS, compute=SECONDS, slowdown=st.floats(1, 3))
def test_two_streams_that_slow_each_other(communication: float, compute: float, slowdown: float):
    # Both run at 1 / slowdown until the shorter one is done; then the rest of the longer one runs alone.
    together = slowdown * min(communication, compute)
    alone = max(communication, compute) - min(communication, compute)
    found = exposed_s(communication, compute, device(slowdown))
    assert found == pytest.approx(together + alone - compute, abs=1e-9)
    assert found >= max(0.0, communication - compute) - 1e-9


@given(communication=SECONDS, compute=SECONDS, slowdown=st.floats(1, 3), more=st.floats(0, 10))
def test_more_communication_is_never_hidden_better(communication: float, compute: float, slowdown: float, more: float):
    least = exposed_s(communication, compute, device(slowdown))
    assert exposed_s(communication + more, compute, device(slowdown)) >= least - 1e-9
    assert exposed_s(communication, compute, device(slowdown + more)) >= least - 1e-9
    assert exposed_s(communication, compute, device(None)) == communication
    assert exposed_s(0, compute, device(slowdown)) == pytest.approx(0, abs=1e-9)


@given(
    communication=st.floats(1e-3, 1e2), compute=st.floats(1e-3, 1e2), slower=st.floats(1, 3), its_slower=st.floats(1, 3)
)
def test_two_streams_with_factors_of_their_own(communication: float, compute: float, slower: float, its_slower: float):
    """Both run slowed until the first is done, then the other alone."""
    left, its_left, clock = compute, communication, 0.0
    both_s = min(left * slower, its_left * its_slower)  # until the first is done
    left, its_left, clock = left - both_s / slower, its_left - both_s / its_slower, both_s
    clock += max(left, its_left)
    found = exposed_s(communication, compute, device(slower, its_slower))
    assert found == pytest.approx(clock - compute, abs=1e-9)


def samples(*points: tuple[int, float], stride: int = 1, num_nodes: int = 1) -> tuple[CollectiveSample, ...]:
    return tuple(
        CollectiveSample(
            op="all_reduce", num_ranks=2, stride=stride, num_nodes=num_nodes, message_bytes=size, seconds=seconds
        )
        for size, seconds in points
    )


def measured(*found: CollectiveSample) -> ClusterSpec:
    return TWO_NODES.model_copy(update={"collective_samples": found})


def test_noise_does_not_make_more_bytes_cheaper():
    """A sample of a larger message came out cheaper: prices rise all the same, also above the largest."""
    noisy = measured(*samples((1 << 10, 5e-3), (1 << 20, 1e-3), (1 << 24, 2e-3)))
    sizes = (1, 1 << 10, 1 << 15, 1 << 20, 1 << 25, 1 << 30)
    prices = [collective_s("all_reduce", size, (0, 1), noisy) for size in sizes]
    assert prices == sorted(prices)
    assert prices[-1] > prices[-2] > prices[-3] > 0
    assert prices[0] == pytest.approx((5e-3 + 1e-3 + 2e-3) / 3)


def test_of_samples_that_are_equally_near_one_way_is_taken():
    both = measured(*samples((1 << 10, 1e-3), (1 << 20, 2e-3)), *samples((1 << 10, 3e-3), (1 << 20, 4e-3), stride=3))
    assert collective_s("all_reduce", 1 << 10, (0, 2), both) == 1e-3
    assert collective_s("all_reduce", 1 << 10, (0, 3), both) == 3e-3


def test_links_inside_a_node_do_not_stand_in_for_those_between_nodes():
    inside = measured(*samples((1 << 10, 1e-3), (1 << 20, 2e-3), stride=8))
    assert collective_s("all_reduce", 1 << 20, (0, 8), inside) == collective_s("all_reduce", 1 << 20, (0, 8), TWO_NODES)
    across = measured(*samples((1 << 10, 1e-3), (1 << 20, 2e-3), stride=8, num_nodes=2))
    assert collective_s("all_reduce", 1 << 20, (0, 8), across) == 2e-3


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_pooling_keeps_the_sum_and_never_falls(seconds: list[float]):
    pooled = [s for _, s in rising(tuple(enumerate(seconds)))]
    assert pooled == sorted(pooled)
    assert sum(pooled) == pytest.approx(sum(seconds))
    assert rising(tuple(enumerate(sorted(seconds)))) == tuple(enumerate(sorted(seconds)))
