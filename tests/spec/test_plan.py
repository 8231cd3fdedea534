"""Plans: their arithmetic, their file form, and the line that refuses a bad one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.files import canonical_json, from_data, read_spec, write_spec
from meshwright.spec.job import Budget, JobSpec
from meshwright.spec.library import cluster, model
from meshwright.spec.plan import LayerRun, Plan, StagePlan
from meshwright.spec.strategy import Strategy
from meshwright.units import GiB

TP2_DP2 = Strategy(tp=2, dp_replicate=2)
ZERO3 = Strategy(dp_shard=4, zero_stage=3, recompute="full")


def make_plan(model_name: str = "tiny-llama") -> Plan:
    """Two stages of four ranks for embedding, four blocks and head."""
    return Plan(
        model=model(model_name),
        cluster=cluster("8xcpu"),
        job=JobSpec(global_batch_size=32, seq_len=128),
        budget=Budget(memory_bytes=4 * GiB),
        num_devices=8,
        global_batch_size=32,
        num_micro_batches=4,
        stages=(StagePlan.of([TP2_DP2, ZERO3, ZERO3, ZERO3]), StagePlan.of([TP2_DP2, TP2_DP2])),
    )


def test_arithmetic():
    plan = make_plan()
    assert (plan.num_stages, plan.stage_devices, plan.micro_batch_samples) == (2, 4, 8)
    assert plan.boundaries == (0, 4, 6)
    assert plan.strategies == (TP2_DP2, ZERO3, ZERO3, ZERO3, TP2_DP2, TP2_DP2)
    assert not plan.is_uniform


def test_neighbours_join_into_runs():
    assert make_plan().stages[0].runs == (
        LayerRun(num_layers=1, strategy=TP2_DP2),
        LayerRun(num_layers=3, strategy=ZERO3),
    )


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_round_trip(tmp_path, ending: str):
    path = tmp_path / f"plan.{ending}"
    write_spec(make_plan(), path)
    assert read_spec(Plan, path) == make_plan()


def test_a_plan_written_by_hand_needs_no_prediction():
    data = json.loads(canonical_json(make_plan()))
    for key in ("predicted", "proof", "inputs_sha256", "schedule", "schema_version"):
        del data[key]
    assert from_data(Plan, data, where="plan.json") == make_plan()


def first_strategy(data: dict[str, Any]) -> dict[str, Any]:
    return data["stages"][0]["runs"][0]["strategy"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: first_strategy(d).update(embed_sdp=1), r"stages\[0\].runs\[0\].strategy.embed_sdp: unknown key"),
        (lambda d: first_strategy(d).update(tp="2"), r"stages\[0\].runs\[0\].strategy.tp: .*integer, not '2'"),
        (lambda d: first_strategy(d).update(zero_stage=1), r"strategy: zero_stage 1 needs dp_shard >= 2, not 1"),
        (lambda d: d.pop("model"), "model: required, but missing"),
        (lambda d: d.update(stages=[]), "stages: a plan needs at least one stage"),
        (lambda d: d["stages"][0].update(runs=[]), r"stages\[0\]: runs: a stage needs at least one layer"),
        (lambda d: d.update(schema_version=2), r"schema_version: 2 is newer than this meshwright reads \(1\)"),
        (lambda d: d.update(schema_version=0), r"schema_version: "),
        (lambda d: d.update(num_devices=True), "num_devices: .*integer, not True"),
        (lambda d: d.update(num_devices=7), r"num_devices \(7\) is not divisible by 2 stages"),
        (lambda d: d.update(num_devices=16), r"num_devices \(16\) is above the cluster's 8"),
        (lambda d: d.update(num_devices=4), r"runs\[0\].strategy: tp2-dp2 covers 4 devices, but a stage has 2"),
        (lambda d: d.update(num_micro_batches=5), r"num_micro_batches \(5\) does not divide global_batch_size \(32\)"),
        (lambda d: d.update(num_micro_batches=32), "tp2-dp2|dp 2 does not divide the micro-batch of 1 samples"),
        (lambda d: d["stages"][0]["runs"][1].update(num_layers=2), "5 layers planned, but tiny-llama has 6"),
        (
            lambda d: d["job"].update(seq_len=512),
            r"job.seq_len: 512 is above what tiny-llama has",
        ),
        (lambda d: d["budget"].update(reserved_bytes=4 * GiB), "budget: reserved_bytes .* leaves nothing"),
        (lambda d: d["budget"].update(memory_bytes=float("nan")), "memory_bytes|plan.json"),
    ],
)
def test_rejects(edit: Callable[[dict[str, Any]], Any], message: str):
    data = json.loads(canonical_json(make_plan()))
    edit(data)
    with pytest.raises(UserError, match=message) as caught:
        from_data(Plan, data, where="plan.json")
    assert str(caught.value).startswith("plan.json: ")
    assert "\n" not in str(caught.value)


def test_a_tp_that_the_heads_do_not_allow():
    data = json.loads(canonical_json(make_plan()))
    data["stages"][1]["runs"][0]["strategy"] = {"tp": 4}
    with pytest.raises(UserError, match=r"stages\[1\].runs\[0\].strategy: tp 4 does not divide num_kv_heads=2"):
        from_data(Plan, data, where="plan.json")


def test_tied_embedding_and_head_share_a_strategy():
    data = json.loads(canonical_json(make_plan("tiny-gpt2")))
    data["stages"][1]["runs"] = [
        {"num_layers": 1, "strategy": {"tp": 2, "dp_replicate": 2}},
        {"num_layers": 1, "strategy": {"dp_replicate": 4}},
    ]
    with pytest.raises(UserError, match=r"embedding \(tp2-dp2\) and head \(dp4\) share one weight"):
        from_data(Plan, data, where="plan.json")
