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
    rules_of,
    stage_counts,
    strategies,
    with_rule,
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
    "biobj": lambda s: s.recompute == "none" and (s.dp_replicate == 1 or s.dp_shard == 1),
    "bmw": lambda s: s.dp_replicate == 1 or s.dp_shard == 1,
    "alpa-like": lambda s: (
        s.recompute == "none" and s.zero_stage in (0, 2) and (s.dp_replicate == 1 or s.dp_shard == 1)
    ),
    "3d": lambda s: s.recompute == "none" and s.zero_stage == 0,
    "deepspeed-3d": lambda s: s.recompute == "none" and s.zero_stage == 0 and s.tp == 2,
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
    assert stage_counts(SPACES["deepspeed-3d"], 12, 50) == (2,)
    assert stage_counts(SPACES["deepspeed-3d"], 6, 50) == ()


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


def test_t3_can_be_switched():
    full, bmw = SPACES["full"], SPACES["bmw"]
    without = with_rule(bmw, "T3", on=False)
    assert (without.name, rules_of(without)) == ("bmw without T3", ("T1", "T2", "M1"))
    assert strategies(without, 12) == strategies(full, 12)
    with_t3 = with_rule(full, "T3", on=True)
    assert (with_t3.name, with_t3.partition, rules_of(with_t3)) == ("full with T3", "exact", ("T1", "T2", "T3"))
    assert strategies(with_t3, 12) == strategies(bmw, 12)
    assert with_rule(full, "T3", on=False) is full
    assert with_rule(bmw, "T3", on=True) is bmw


@pytest.mark.parametrize(
    ("space", "rule", "says"),
    [
        ("full", "T1", "rule: T1 cannot be switched: a plan's stages are cut first, .*; only T3 can"),
        ("full", "T2", "rule: T2 cannot be switched: a mesh has equal groups, .*; only T3 can"),
        ("full", "M1", "rule: M1 cannot be switched: the runtime builds no other mesh; only T3 can"),
        ("full", "T9", "rule: 'T9' is not known; T3 can be switched on or off"),
        ("3d", "T3", "rule: T3 is about replicas and shards in one layer, and space 3d does not have both; use"),
        ("zero3", "T3", "space zero3 does not have both"),
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_no_other_rule_can_be_switched(space: str, rule: str, says: str, on: bool):
    with pytest.raises(UserError, match=says):
        with_rule(SPACES[space], rule, on=on)
