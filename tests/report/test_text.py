"""What the tables say of a plan: every layer, every term, and nothing that is not there."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from meshwright.cost.predict import predict
from meshwright.report.text import (
    comparison_table,
    memory_table,
    plan_view,
    proof_line,
    strategy_table,
    summary_line,
    time_table,
    why_it_loses,
)
from meshwright.spec.library import model
from meshwright.spec.plan import Plan, Proof
from meshwright.spec.strategy import Strategy
from meshwright.units import show_bytes, show_seconds
from tests.plans import by_hand

TP2_DP2, ZERO3 = Strategy(tp=2, dp_replicate=2), Strategy(dp_shard=4, zero_stage=3, recompute="full")


def text(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(view)
    return out.getvalue()


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = by_hand(
        "tiny-llama",
        "8xcpu",
        [TP2_DP2, ZERO3, ZERO3, ZERO3, TP2_DP2, TP2_DP2],
        sizes=[4, 2],
        batch=32,
        seq_len=128,
        micro_batches=4,
    )
    return made.model_copy(update={"predicted": predict(made)})


def test_the_summary_names_the_job(plan: Plan):
    line = summary_line(plan)
    for part in ("tiny-llama", "4 blocks", "8xcpu", "batch 32 x 128 tokens", "4 micro-batches of 8", "bf16", "1f1b"):
        assert part in line
    assert "2 stages of 4 devices" in line


def test_merges_are_no_blocks():
    swin = model("tiny-swin")
    assert swin.fixed_seq_len is not None
    strategies = [Strategy(dp_replicate=2)] * len(swin.layers)
    made = by_hand(swin, "4xcpu", strategies, batch=8, seq_len=swin.fixed_seq_len, sizes=[3, len(swin.layers) - 3])
    names = [" ".join(line.split()[2:-1]) for line in text(strategy_table(made)).splitlines()[1:]]
    assert names == ["embedding, blocks 1-2", "merge, blocks 3-4, head"]


def test_every_layer_has_its_row(plan: Plan):
    assert [" ".join(line.split()) for line in text(strategy_table(plan)).splitlines()[1:]] == [
        "0 0-3 embedding tp2-dp2",
        "0 0-3 blocks 1-3 zero3x4+recompute",
        "1 4-7 block 4, head tp2-dp2",
    ]


def test_times_and_bytes_are_those_of_the_prediction(plan: Plan):
    assert plan.predicted is not None
    times, memory = text(time_table(plan.predicted)), text(memory_table(plan))
    for stage in plan.predicted.stages:
        both = stage.micro_batch.forward + stage.micro_batch.backward
        for seconds in (both.compute_s, both.recompute_s, both.tp_s, both.relayout_s, both.border_s, stage.bubble_s):
            assert show_seconds(seconds) in times
        for num_bytes in (stage.states.master_bytes, stage.activation_bytes, stage.peak_bytes):
            assert show_bytes(num_bytes) in memory


def test_a_plan_without_a_prediction_is_shown_too(plan: Plan):
    bare = text(plan_view(plan.model_copy(update={"predicted": None})))
    assert "zero3x4" in bare
    assert "predicted" not in bare
    whole = text(plan_view(plan))
    assert "predicted" in whole
    assert "tokens/s" in whole
    assert "optimal" not in whole


def test_claims_are_as_strong_as_the_proof(plan: Plan):
    assert proof_line(plan) == "no claim of optimality"
    proved = plan.model_copy(update={"proof": Proof(space="full", lower_bound_s=2.0, gap=0.0)})
    assert proof_line(proved) == "optimal under this cost model in space full"
    open_ = plan.model_copy(update={"proof": Proof(space="base", lower_bound_s=2.0, gap=0.0123)})
    assert proof_line(open_) == ("at most 1.23 % from optimal under this cost model in space base (lower bound 2.00 s)")


def test_a_comparison_says_why_one_loses(plan: Plan):
    slower = by_hand("tiny-llama", "8xcpu", [Strategy(dp_replicate=8)] * 6, batch=32, seq_len=128, micro_batches=4)
    slower = slower.model_copy(update={"predicted": predict(slower)})
    best, other = sorted((plan, slower), key=lambda one: predict(one).step_s)
    line = why_it_loses(other, best)
    assert line.startswith("+")
    assert "time a sample, mostly" in line
    assert why_it_loses(best, best) == "+0.0 % time a sample"
    assert why_it_loses(best.model_copy(update={"predicted": None}), best) == ""
    table = text(comparison_table([("best", best, ""), ("other", other, line), ("none", None, "does not fit")]))
    assert "does not fit" in table
    assert "4+2" in table
    assert "dp8" in table
