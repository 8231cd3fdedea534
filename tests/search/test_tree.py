"""The decision trees: counted as the paper and its code count, against plain loops, and every drop with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from math import prod

import numpy as np
import pytest

from meshwright.search.space import (
    SPACES,
    Space,
    divisors,
    path_strategies,
    rules_of,
    strategies,
    tree,
    tree_without_t1,
    with_rule,
)
from meshwright.search.table import Setting, build_problem
from meshwright.search.tree import RULES, Branch, Branches, Branching, Order, Tree, candidates, grow, leaves, path_label
from meshwright.spec.job import JobSpec
from meshwright.spec.library import cluster, model
from meshwright.spec.mesh import MeshShape
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy
from tests.search.uniform import all_strategies

BELOW: Order = ("tp", "dp_replicate", "dp_shard")
PAPER = Branching(dimensions=BELOW)
WITHOUT_T3 = replace(PAPER, mixes_data_parallel=True)


def every_path(num_devices: int, dimensions: Order = BELOW) -> Iterator[Branches]:
    """Yield every order of every subset of dimensions with all degrees whose product is right."""
    for depth in range(len(dimensions) + 1):
        for order in permutations(dimensions, depth):
            for degrees in product(range(2, num_devices + 1), repeat=depth):
                if prod(degrees) == num_devices:
                    yield tuple(Branch(dimension, degree) for dimension, degree in zip(order, degrees, strict=True))


def forest(branching: Branching, num_devices: int) -> list[Tree]:
    return [grow(branching, num_devices // stages, stages) for stages in divisors(num_devices)]


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6, 8, 12, 30])
def test_a_tree_has_every_path_once(num_devices: int):
    paths = [path.branches for path in grow(WITHOUT_T3, num_devices).paths]
    assert len(paths) == len(set(paths))
    assert set(paths) == set(every_path(num_devices))


def test_the_paper_counts_34_and_22_paths_for_8_devices():
    """arXiv 2307.02031: from DP, sharded DP and TP below 1, 2, 4 and 8 stages; twice that with recomputation."""
    assert [len(one.paths) for one in forest(PAPER, 8)] == [21, 9, 3, 1]
    assert [len(one.kept) for one in forest(PAPER, 8)] == [11, 7, 3, 1]
    assert [len(one.dropped_by("T3")) for one in forest(PAPER, 8)] == [10, 2, 0, 0]
    assert [len(one.dropped_by("T3")) for one in forest(WITHOUT_T3, 8)] == [0, 0, 0, 0]


def test_and_68_and_44_with_recomputation():
    one_zero_stage = Space(name="paper", about="", data_parallel=("replicate", "zero3"))
    without_t3 = with_rule(one_zero_stage, "T3", on=False)
    kept = [len(strategies(one_zero_stage, 8 // stages)) for stages in (1, 2, 4, 8)]
    assert (kept, sum(kept)) == ([22, 14, 6, 2], 44)
    paths = [tree(without_t3, 8 // stages).paths for stages in (1, 2, 4, 8)]
    # What M1 drops is counted too: in words each path is one strategy with and one without recomputation.
    assert sum(len(path_strategies(without_t3, path.branches)) for some in paths for path in some) == 68
    assert sum(len(strategies(without_t3, 8 // stages)) for stages in (1, 2, 4, 8)) == 68 - 2 * 7


@pytest.mark.parametrize(("num_devices", "count"), [(4, 11), (8, 22), (16, 37), (32, 56), (64, 79)])
def test_paths_with_t3(num_devices: int, count: int):
    assert sum(len(one.kept) for one in forest(PAPER, num_devices)) == count


# Hetu-Galvatron's own counts (strategies without recomputation, its searches without Ulysses or context parallelism):
# devices, its cap on stages, with both placements of tp, with tp innermost only. tp is at most 8.
PREDECESSOR = [(4, 8, 11, 9), (8, 8, 22, 16), (16, 16, 36, 24), (32, 16, 49, 31), (64, 16, 60, 36)]


@pytest.mark.parametrize(("num_devices", "most_stages", "both", "innermost"), PREDECESSOR)
def test_the_predecessors_counts_are_ours_with_its_caps(num_devices: int, most_stages: int, both: int, innermost: int):
    capped = replace(PAPER, tp_range=(1, 8), most_stages=most_stages)
    kept = [path for one in forest(capped, num_devices) for path in one.kept]
    assert len(kept) == both
    assert sum("tp" not in dict(path.branches) or path.branches[-1].dimension == "tp" for path in kept) == innermost


@pytest.mark.parametrize(("num_devices", "count"), [(4, 9), (8, 16), (16, 23), (32, 28), (64, 31)])
def test_and_those_of_its_third_version(num_devices: int, count: int):
    """It holds tp innermost, and its caps are 8 whatever the devices."""
    capped = replace(PAPER, tp_range=(1, 8), most_stages=8)
    kept = [path for one in forest(capped, num_devices) for path in one.kept]
    assert sum("tp" not in dict(path.branches) or path.branches[-1].dimension == "tp" for path in kept) == count


def test_caps_say_what_they_drop():
    capped = replace(PAPER, tp_range=(1, 8), most_stages=16)
    dropped = [path for one in forest(capped, 64) for path in one.paths if path.rule in ("C1", "C2")]
    reasons = {(path.rule, path.reason) for path in dropped}
    assert reasons == {
        ("C1", "tp 16 is not in 1 to 8"),
        ("C1", "tp 32 is not in 1 to 8"),
        ("C1", "tp 64 is not in 1 to 8"),
        ("C2", "32 stages are more than 16"),
        ("C2", "64 stages are more than 16"),
    }
    assert len(dropped) == 79 - 60


@pytest.mark.parametrize("num_devices", [8, 12])
@pytest.mark.parametrize("name", ["full", "bmw", "galvatron", "3d"])
def test_without_t1_the_pipeline_is_one_more_dimension(name: str, num_devices: int):
    """What T1 keeps is exactly the trees below each number of stages; the rest has the pipeline lower down."""
    space = SPACES[name]
    across = tree_without_t1(space, num_devices)
    dimensions: Order = ("pp", *(("tp", "dp_replicate") if name == "3d" else BELOW))
    assert {path.branches for path in across.paths} == set(every_path(num_devices, dimensions))
    kept = {path.branches for path in across.kept}
    below = {stages: tree(space, num_devices // stages).kept for stages in divisors(num_devices)}
    assert kept == {
        ((Branch("pp", stages),) if stages > 1 else ()) + path.branches
        for stages, paths in below.items()
        for path in paths
    }
    for path in across.dropped_by("T1"):
        assert path.branches[0].dimension != "pp"
        assert "pp" in dict(path.branches)
        assert path.reason == f"pp lies below {path.branches[0].label}, but stages are cut first"


def test_counts_without_t1():
    across = tree_without_t1(SPACES["full"], 8)
    assert (len(across.paths), len(across.dropped_by("T1"))) == (52, 18)
    assert len(across.paths) - len(across.dropped_by("T1")) == 34


@pytest.mark.parametrize("num_devices", [2, 3, 4, 6, 8, 12])
def test_t2_lists_the_degrees_that_do_not_divide(num_devices: int):
    plain = grow(WITHOUT_T3, num_devices)
    listed = grow(WITHOUT_T3, num_devices, lists_unequal=True)
    assert listed.paths[: len(plain.paths)] == plain.paths
    unequal = [path.branches for path in listed.dropped_by("T2")]
    assert len(unequal) == len(set(unequal)) == len(listed.paths) - len(plain.paths)
    expected: set[Branches] = set()
    for order in permutations(BELOW):
        for depth in (1, 2, 3):
            for degrees in product(range(2, num_devices + 1), repeat=depth):
                left = num_devices // prod(degrees[:-1])
                divides = num_devices % prod(degrees[:-1]) == 0
                if divides and degrees[-1] < left and left % degrees[-1]:
                    expected.add(
                        tuple(Branch(dimension, degree) for dimension, degree in zip(order, degrees, strict=False))
                    )
    assert set(unequal) == expected


def test_every_drop_has_a_known_rule_and_a_reason():
    for name, space in SPACES.items():
        for num_devices in (1, 2, 8, 12):
            for path in tree(space, num_devices, lists_unequal=True).paths:
                assert bool(path.rule) == bool(path.reason)
                assert path.rule in ("", *rules_of(space)), name


def test_reasons_are_words():
    reasons = {
        path_label(path.branches): f"{path.rule}: {path.reason}"
        for path in (*tree(SPACES["full"], 8, lists_unequal=True).paths, *tree(SPACES["bmw"], 8).paths)
        if path.rule
    }
    assert reasons["dp 2 > tp 2 > sharded dp 2"] == "T3: dp 2 with sharded dp 2; sharded dp 4 is tried instead"
    assert reasons["tp 2 > dp 3"] == "T2: 4 devices cannot be split into 3 equal parts"
    fixed = {path.reason for path in tree(SPACES["deepspeed-3d"], 4).dropped_by("C1")}
    assert fixed == {"tp 1 is not 2", "tp 4 is not 2"}


@pytest.mark.parametrize("num_devices", [4, 8, 12])
def test_m1_drops_what_the_mesh_cannot_hold_and_names_what_stands_for_it(num_devices: int):
    full = tree(SPACES["full"], num_devices)
    kept = {path_label(path.branches) for path in full.kept}
    dropped = full.dropped_by("M1")
    assert dropped
    for path in dropped:
        stand_in, _, rest = path.reason.partition(" stands")
        assert rest == " for it"
        assert stand_in in kept
        assert sorted(stand_in.split(" > ")) == sorted(path_label(path.branches).split(" > "))


@pytest.mark.parametrize("num_devices", [1, 2, 6, 8, 12, 16])
def test_a_path_is_the_mesh_of_its_strategies(num_devices: int):
    """The order of a kept path, slowest links first, is the order of the axes of the mesh that the runtime builds."""
    for path in tree(SPACES["full"], num_devices).kept:
        found = path_strategies(SPACES["full"], path.branches)
        assert found
        for strategy in found:
            axes = [(name, size) for name, size in MeshShape.of(strategy).axes if size > 1]
            assert axes == [tuple(branch) for branch in path.branches]


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("num_devices", [1, 2, 4, 6, 8, 12, 16])
def test_the_leaves_are_the_strategies(name: str, num_devices: int):
    """Each strategy comes from one path, and is one that plain loops over all degrees find too."""
    space = SPACES[name]
    kept = tree(space, num_devices).kept
    found = [strategy for path in kept for strategy in path_strategies(space, path.branches)]
    assert len(found) == len(set(found))
    assert strategies(space, num_devices) == tuple(sorted(found, key=lambda strategy: strategy.sort_key))
    assert set(found) <= all_strategies(num_devices)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("tp_range", [None, (2, 2), (1, 4)])
@pytest.mark.parametrize("dimensions", [BELOW, ("pp", *BELOW), ("tp",), ()])
def test_the_short_walk_finds_what_is_kept(dimensions: Order, tp_range: tuple[int, int] | None, mixes: bool):
    branching = Branching(dimensions=dimensions, mixes_data_parallel=mixes, tp_range=tp_range, most_stages=6)
    for num_devices in (1, 2, 6, 8, 24):
        for stages in (1, 3, 8):
            kept = [path.branches for path in grow(branching, num_devices, stages).kept]
            assert list(leaves(branching, num_devices, stages)) == kept


def test_only_t3_can_be_off():
    assert [rule.name for rule in RULES.values() if not rule.needed] == ["T3"]
    assert all(rule.about and rule.source for rule in RULES.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("samples", [1, 6, 8])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "gpt2", "llama-2-70b"])
def test_the_solvers_agree_on_what_is_allowed(name: str, stages: int, samples: int, schedule: ScheduleName):
    """A strategy is refused here exactly where it is infinite there; the one has words, the other is fast."""
    setting = Setting(
        model=model(name),
        cluster=cluster("12xa100-sxm-40g"),
        job=JobSpec(global_batch_size=4 * samples, seq_len=64),
        budget_bytes=1,
        num_stages=stages,
        num_micro_batches=4,
        micro_batch_samples=samples,
        schedule=schedule,
    )
    considered = strategies(SPACES["full"], setting.stage_devices)
    problem = build_problem(setting, considered)
    found = candidates(setting.model, considered, samples, schedule)
    rows = dict(zip(setting.model.layers, problem.forward_s, strict=True))
    assert [each.layer for each in found] == list(rows)
    for each in found:
        finite = np.isfinite(rows[each.layer])
        assert each.allowed == tuple(strategy for strategy, yes in zip(considered, finite, strict=True) if yes)
        assert {refusal.strategy for refusal in each.refused} == {*considered} - {*each.allowed}
        assert len(each.refused) + len(each.allowed) == len(considered)
    assert sum(each.num_layers for each in found) == len(setting.model.layers)


def refusals(name: str, strategy: Strategy, samples: int, schedule: ScheduleName = "1f1b") -> list[str]:
    """Return for embedding, block and head why `strategy` is refused; empty where it is not."""
    found = candidates(model(name), (strategy,), samples, schedule)
    return [" ".join(f"{refusal.rule}: {refusal.reason}" for refusal in each.refused) for each in found]


def test_refusals_name_rule_and_reason():
    assert refusals("tiny-llama", Strategy(tp=4), 8) == [
        "",
        "L1: tp 4 does not divide num_kv_heads=2; allowed: 1, 2",
        "",
    ]
    assert (
        refusals("tiny-llama", Strategy(dp_shard=3, zero_stage=3), 8)
        == ["L2: dp 3 does not divide the micro-batch of 8 samples"] * 3
    )


def test_the_ends_are_recomputed_only_where_it_helps():
    recompute = Strategy(recompute="full")
    embedding = "L3: recomputing an embedding cannot help: it keeps little but its input"
    head = "L3: recomputing a head cannot help: its backward pass follows at once"
    assert not model("tiny-llama").tied_embedding
    assert refusals("tiny-llama", recompute, 8) == [embedding, "", head]
    assert refusals("tiny-llama", recompute, 8, "gpipe") == [embedding, "", ""]
    assert model("tiny-gpt2").tied_embedding
    tied = "L3: a tied embedding does what its head does, and recomputing the head cannot help"
    assert refusals("tiny-gpt2", recompute, 8) == [tied, "", head]
    assert refusals("tiny-gpt2", recompute, 8, "gpipe") == ["", "", ""]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_tied_ends_may_use_the_same(schedule: ScheduleName):
    embedding, _, head = candidates(model("tiny-gpt2"), strategies(SPACES["full"], 12), 8, schedule)
    assert embedding.allowed == head.allowed
