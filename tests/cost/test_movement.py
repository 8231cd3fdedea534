"""What a price needs of a transfer, on arrays, is what the transfer itself says rank by rank."""

from __future__ import annotations

import time
from itertools import product

import pytest

from meshwright.cost.movement import movement, worst_group
from meshwright.search.space import divisors
from meshwright.spec.mesh import Axis, Layout, MeshShape, transfer

AXES: tuple[Axis, ...] = ("tp", "dp", "dp_shard", "dp_replicate")


def layouts(num_ranks: int) -> list[Layout]:
    return [
        Layout(tp, num_ranks // tp, inner)
        for tp in divisors(num_ranks)
        for inner in (("tp", "dp") if 1 < tp < num_ranks else ("tp",))
    ]


def nodes_of(ranks: tuple[int, ...], node: int) -> int:
    return len({rank // node for rank in ranks})


@pytest.mark.parametrize("num_ranks", [*range(1, 13), 16, 18, 24])
def test_movements_are_those_of_the_transfer(num_ranks: int):
    for source, target in product(layouts(num_ranks), repeat=2):
        told = transfer(source, target)
        for node in (1, 2, 3, 8):
            found = movement(source, target, node)
            assert (found.kind, found.num_units) == (told.kind, told.num_units)
            assert found.largest_received_units == told.largest_received_units
            if told.groups:
                widest = max(told.groups, key=lambda ranks: (nodes_of(ranks, node), len(ranks)))
                assert found.widest_group == widest, (source, target, node)
            else:
                assert found.widest_group == ()


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 8, 12, 16])
def test_the_worst_group_is_that_of_a_plain_loop(num_ranks: int):
    meshes = {
        MeshShape(tp=tp, dp_replicate=replicate, dp_shard=num_ranks // tp // replicate, inner=inner)
        for tp in divisors(num_ranks)
        for replicate in divisors(num_ranks // tp)
        for inner in ("tp", "dp")
    }
    for mesh, axis, node in product(meshes, AXES, (1, 2, 3, 8)):
        groups = mesh.groups(axis)
        assert worst_group(mesh, axis, node) == max(groups, key=lambda ranks: nodes_of(ranks, node))


def test_thousands_of_ranks_take_moments():
    started = time.perf_counter()
    for source, target in product(layouts(4096)[::3], repeat=2):
        movement(source, target, 8)
    assert time.perf_counter() - started < 20
