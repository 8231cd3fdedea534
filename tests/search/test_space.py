"""What is considered: all degrees that divide, counted as the paper counts them, and no more than a space promises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from meshwright.errors import UserError
from meshwright.search.space import (
    SPACES,
    Space,
    divisors,
    even_boundaries,
    find_space,
    is_considered,
    stage_counts,
    strategies,
)
from meshwright.spec.library import model
from meshwright.spec.strategy import Strategy
from tests.search.uniform import all_strategies


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 6, 8, 12, 16])
def test_the_full_space_is_every_split(num_devices: int):
    found = strategies(SPACES["full"], num_devices)
    assert set(found) == all_strategies(num_devices)
    assert len(found) == len(set(found))
    assert list(found) == sorted(found, key=lambda strategy: strategy.sort_key)
    assert all(strategy.num_devices == num_devices for strategy in found)


def test_counts_of_the_paper():
    """arXiv 2307.02031: 22 candidates for 8 GPUs from DP, sharded DP, TP and PP, 44 with recomputation."""
    paper = Space(name="paper", about="", data_parallel=("replicate", "zero3"), recompute=False)
    assert [len(strategies(paper, 8 // stages)) for stages in (1, 2, 4, 8)] == [11, 7, 3, 1]
    with_recompute = Space(name="paper", about="", data_parallel=("replicate", "zero3"))
    assert sum(len(strategies(with_recompute, 8 // stages)) for stages in (1, 2, 4, 8)) == 44


PROMISES: dict[str, Callable[[Strategy], bool]] = {
    "full": lambda s: True,
    "base": lambda s: s.dp_replicate == 1 or s.dp_shard == 1,
    "galvatron": lambda s: s.recompute == "none" and (s.dp_replicate == 1 or s.dp_shard == 1),
    "3d": lambda s: s.recompute == "none" and s.zero_stage == 0,
    "uniform": lambda s: True,
    "dp+tp": lambda s: s.recompute == "none" and s.zero_stage == 0,
    "dp+pp": lambda s: s.recompute == "none" and s.zero_stage == 0 and s.tp == 1,
    "ddp": lambda s: s == Strategy(dp_replicate=8),
    "zero3": lambda s: s == Strategy(dp_shard=8, zero_stage=3),
    "tp": lambda s: s == Strategy(tp=8),
    "pp": lambda s: s == Strategy(),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_space_holds_all_that_it_promises_and_nothing_else(name: str):
    num_devices = 1 if name == "pp" else 8  # its stages have one device each
    expected = {strategy for strategy in all_strategies(num_devices) if PROMISES[name](strategy)}
    assert set(strategies(SPACES[name], num_devices)) == expected - (
        {Strategy(recompute="full")} if name == "pp" else set()
    )


def test_numbers_of_stages():
    assert stage_counts(SPACES["full"], 12, 50) == (1, 2, 3, 4, 6, 12)
    assert stage_counts(SPACES["full"], 12, 5) == (1, 2, 3, 4)
    assert stage_counts(SPACES["zero3"], 12, 50) == (1,)
    assert stage_counts(SPACES["pp"], 12, 50) == (12,)
    assert stage_counts(SPACES["pp"], 12, 11) == ()


def test_recomputing_the_ends_is_not_considered():
    embedding, block, head = (model("gpt2").layers[index] for index in (0, 1, -1))
    on, off = Strategy(recompute="full"), Strategy()
    for keeps in (True, False):
        assert all(is_considered(layer, off, schedule_keeps_logits=keeps) for layer in (embedding, block, head))
        assert is_considered(block, on, schedule_keeps_logits=keeps)
        assert not is_considered(embedding, on, schedule_keeps_logits=keeps)
        assert is_considered(head, on, schedule_keeps_logits=keeps) == keeps


@pytest.mark.parametrize("num_layers", range(3, 20))
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_even_stages_differ_by_at_most_one_block(num_layers: int, num_stages: int):
    bounds = even_boundaries(num_layers, num_stages)
    if num_stages > num_layers - 2:
        assert bounds is None
        return
    assert bounds is not None
    sizes = [high - low for low, high in pairwise(bounds)]
    blocks = [size - (stage == 0) - (stage == num_stages - 1) for stage, size in enumerate(sizes)]
    assert sum(blocks) == num_layers - 2
    assert blocks == sorted(blocks, reverse=True), "extras first"
    assert blocks[0] - blocks[-1] <= 1
    assert blocks[-1] >= 1


def test_divisors():
    for number in range(1, 200):
        assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


def test_an_unknown_space_is_one_line_with_the_known_ones():
    with pytest.raises(UserError, match="space: 'fastest' is not known; choose one of full, base"):
        find_space("fastest")
