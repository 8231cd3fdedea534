"""Predictions held against metrics: parts of the step by stage, peaks by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.report.compare import compare, compare_table
from meshwright.spec.plan import Plan
from tests.parity.cases import llama, make_plan, s


@pytest.fixture
def plan() -> Plan:
    made = make_plan(llama(), [[(3, s(rep=2))], [(3, s(tp=2))]], micro_batches=4, batch=8)
    return made.model_copy(update={"predicted": predict(made)})


def write_metrics(path: Path, plan: Plan, **changes: Any) -> Path:
    """Write the metrics of a run that went just as predicted, but for a twice as slow first step."""
    assert plan.predicted is not None
    stages = [plan.predicted.stages[rank // plan.stage_devices] for rank in range(plan.num_devices)]
    count = plan.num_micro_batches
    parts = {
        "forward": [
            count * (st.micro_batch.forward.total_s - st.micro_batch.forward.border_s) + st.step.parameter_gather_s
            for st in stages
        ],
        "backward": [
            count * (st.micro_batch.backward.total_s - st.micro_batch.backward.border_s)
            + st.step.gradient_sync_s
            + st.step.copy_s
            for st in stages
        ],
        "waiting": [
            st.bubble_s + count * (st.micro_batch.forward.border_s + st.micro_batch.backward.border_s) for st in stages
        ],
        "sync": [st.step.tied_sync_s + st.step.other_s for st in stages],
        "optimizer": [st.step.optimizer_s for st in stages],
    }
    record = {"kind": "step", "peak_memory_bytes": [st.peak_bytes for st in stages], "parts_s": parts}
    steps = [{**record, "step_s": plan.predicted.step_s * (2 if i == 0 else 1), **changes} for i in range(8)]
    lines = [{"kind": "start"}, *steps, {"kind": "checkpoint"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_as_predicted_has_no_errors(plan: Plan, tmp_path: Path):
    found = compare(plan, write_metrics(tmp_path / "metrics.jsonl", plan))
    assert [one.what for one in found].count("peak memory") == 4
    assert {one.what for one in found} == {
        "step", "forward", "backward", "bubble and borders", "once a step", "peak memory",
    }  # fmt: skip
    assert all(abs(one.error) < 1e-9 for one in found)
    assert compare_table(found).row_count == len(found)


def test_the_parts_of_a_step_add_up_to_it(plan: Plan, tmp_path: Path):
    found = compare(plan, write_metrics(tmp_path / "metrics.jsonl", plan))
    assert plan.predicted is not None
    for stage in range(plan.num_stages):
        parts = sum(one.predicted for one in found if one.where == f"stage {stage}")
        assert parts == pytest.approx(plan.predicted.step_s)


def test_a_gpu_run_has_no_parts(plan: Plan, tmp_path: Path):
    found = compare(plan, write_metrics(tmp_path / "metrics.jsonl", plan, parts_s={}))
    assert {one.what for one in found} == {"step", "peak memory"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no steps"),
        ('{"kind": "step"\n', "line 1: not readable as JSON"),
        ("[1]\n", "line 1: is not a JSON object"),
        ('{"kind": "step", "step_s": 1.0, "peak_memory_bytes": [1]}\n', "is of 1 ranks, but the plan is for 4"),
    ],
)
def test_bad_metrics_are_refused_in_one_line(plan: Plan, tmp_path: Path, text: str, message: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        compare(plan, path)


def test_a_plan_without_a_prediction_is_refused(plan: Plan, tmp_path: Path):
    with pytest.raises(UserError, match="has no prediction"):
        compare(plan.model_copy(update={"predicted": None}), tmp_path / "metrics.jsonl")
