"""Groups against an array of ranks, and transfers by carrying them out on lists."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.mesh import Axis, Layout, MeshShape, Transfer, transfer
from meshwright.spec.strategy import Inner, Strategy

AXES: tuple[Axis, ...] = ("tp", "dp", "dp_shard", "dp_replicate")


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int) -> Layout:
    tp = draw(st.sampled_from(divisors(num_ranks)))
    return Layout(tp, num_ranks // tp, draw(st.sampled_from(["tp", "dp"])))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    num_ranks = draw(st.integers(1, 24))
    return draw(layouts(num_ranks)), draw(layouts(num_ranks))


def slices(layout: Layout, num_units: int) -> list[list[int]]:
    """The sample units of each rank, by counting: dp slices in order, each on tp ranks."""
    per_slice = num_units // layout.dp
    return [
        list(range(layout.dp_index(rank) * per_slice, (layout.dp_index(rank) + 1) * per_slice))
        for rank in range(layout.tp * layout.dp)
    ]


def carry_out(plan: Transfer, held: list[list[int]]) -> list[list[int]]:
    """Do what a runtime would: cut, exchange within groups, join in group order, then reorder."""
    sent = [[held[rank][unit] for unit in moves.send_units] for rank, moves in enumerate(plan.ranks)]
    results = []
    for rank, moves in enumerate(plan.ranks):
        arrived: list[int] = []
        for peer, count in zip(moves.group, moves.receive_splits, strict=True):
            theirs, place = plan.ranks[peer], plan.ranks[peer].group.index(rank)
            start = 0 if plan.kind == "all_gather" else sum(theirs.send_splits[:place])
            assert count == theirs.send_splits[place]
            arrived += sent[peer][start : start + count]
        results.append([arrived[place] for place in moves.order])
    return results


@given(layout_pairs())
def test_a_transfer_delivers_what_the_target_holds(pair: tuple[Layout, Layout]):
    source, target = pair
    plan = transfer(source, target)
    assert plan.num_units == lcm(source.dp, target.dp)
    assert carry_out(plan, slices(source, plan.num_units)) == slices(target, plan.num_units)


@given(layout_pairs())
def test_members_of_a_group_agree_on_it(pair: tuple[Layout, Layout]):
    plan = transfer(*pair)
    for rank, moves in enumerate(plan.ranks):
        assert rank in moves.group
        assert list(moves.group) == sorted(moves.group)
        assert all(plan.ranks[peer].group == moves.group for peer in moves.group)


@given(layout_pairs())
def test_only_what_is_lacking_is_received(pair: tuple[Layout, Layout]):
    source, target = pair
    plan = transfer(source, target)
    held, wanted = slices(source, plan.num_units), slices(target, plan.num_units)
    lacking = max(len(set(want) - set(have)) for want, have in zip(wanted, held, strict=True))
    assert plan.largest_received_units == lacking
    assert (plan.kind in {"none", "slice"}) == (lacking == 0)
    assert (plan.kind == "none") == (held == wanted)
    assert all(moves.is_identity for moves in plan.ranks) == (plan.kind == "none")


@given(layout_pairs())
def test_there_and_back_changes_nothing(pair: tuple[Layout, Layout]):
    source, target = pair
    there, back = transfer(source, target), transfer(target, source)
    held = slices(source, there.num_units)
    assert carry_out(back, carry_out(there, held)) == held


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (Layout(2, 4, "tp"), Layout(2, 4, "tp"), "none"),
        (Layout(4, 2, "tp"), Layout(2, 4, "tp"), "slice"),
        (Layout(8, 1, "tp"), Layout(1, 8, "tp"), "slice"),
        (Layout(2, 4, "tp"), Layout(4, 2, "tp"), "all_gather"),
        (Layout(1, 8, "tp"), Layout(8, 1, "tp"), "all_gather"),
        (Layout(2, 4, "tp"), Layout(2, 4, "dp"), "all_to_all"),
        (Layout(2, 3, "tp"), Layout(3, 2, "tp"), "all_to_all"),
    ],
)
def test_kinds(source: Layout, target: Layout, kind: str):
    assert transfer(source, target).kind == kind


def test_tp_2_to_3_on_6_ranks():
    """Ranks hold thirds (2 ranks each) and want halves (3 ranks each): 6 units, some of which stay."""
    plan = transfer(Layout(2, 3, "tp"), Layout(3, 2, "tp"))
    held = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    wanted = [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert slices(Layout(2, 3, "tp"), 6) == held
    assert carry_out(plan, held) == wanted
    assert plan.largest_received_units == 2


def test_layouts_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="layouts of 4 and 8 ranks"):
        transfer(Layout(2, 2, "tp"), Layout(2, 4, "tp"))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["tp", "dp"]))
def test_groups_are_lines_of_the_array_of_ranks(tp: int, replicate: int, shard: int, inner: Inner):
    mesh = MeshShape(tp=tp, dp_replicate=replicate, dp_shard=shard, inner=inner)
    sizes = dict(mesh.axes)
    ranks = np.arange(mesh.num_ranks).reshape(list(sizes.values()))
    names = list(sizes)
    for axis in AXES:
        if axis == "dp":  # both dp axes at once, dp_shard fastest
            lines = np.moveaxis(ranks, names.index("tp"), 0).reshape(tp, replicate * shard)
        else:
            lines = np.moveaxis(ranks, names.index(axis), -1).reshape(-1, sizes[axis])
        assert sorted(mesh.groups(axis)) == sorted(tuple(line) for line in lines.tolist())
        assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(mesh.num_ranks))
    for rank in range(mesh.num_ranks):
        assert mesh.rank(mesh.dp_index(rank), mesh.tp_index(rank)) == rank


def test_mesh_and_layout_of_a_strategy():
    strategy = Strategy(tp=2, dp_replicate=2, dp_shard=2, zero_stage=3, inner="dp")
    mesh, layout = MeshShape.of(strategy), Layout.of(strategy)
    assert (mesh.num_ranks, mesh.dp, layout) == (8, 4, Layout(2, 4, "dp"))
    assert mesh.group("tp", 1) == (1, 5)
    assert mesh.group("dp_shard", 1) == (0, 1)
    assert mesh.group("dp_replicate", 1) == (1, 3)
    assert [layout.dp_index(rank) for rank in range(8)] == [mesh.dp_index(rank) for rank in range(8)]
