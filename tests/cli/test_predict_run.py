"""Prices of other frameworks' runs, checks, recommendations and calibrations on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright
from meshwright.cost.calibrate import RunMeasured, calibrate, calibrated_budget, calibrated_cluster
from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.search.planner import make_budget
from meshwright.spec import library
from meshwright.spec.job import Budget
from tests.cli.conftest import PlanFile, Run

RUN = ["--model", "gpt3-13b", "--cluster", "4x8xa100-sxm-80g", "--global-batch", "64", "--seq-len", "2048"]
MEGATRON = [*RUN, "--framework", "megatron", "--tp", "8", "--pp", "2", "--micro-batch-size", "2"]


def test_a_run_of_another_framework_is_itemised(run: Run):
    code, out, err = run("predict", *MEGATRON, "--recompute", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["step_s"] == pytest.approx(sum(data["terms_s"].values()))
    assert len(data["stages_s"]) == len(data["stages_bytes"]) == 2
    largest = max(sum(v for k, v in m.items() if k.endswith("_bytes")) for s in data["stages_bytes"] for m in s)
    assert data["peak_bytes"] == pytest.approx(largest)
    code, out, _ = run("predict", *MEGATRON)
    assert code == 0
    assert "13B" not in out or "under megatron: tp 8, pp 2, dp 2" in out
    assert "model FLOPs" in out


def test_recomputing_costs_time_and_saves_memory(run: Run):
    def priced(*more: str) -> dict[str, float]:
        return json.loads(run("predict", *MEGATRON, *more, "--json")[1])

    none, selective, full = priced(), priced("--recompute-granularity", "selective"), priced("--recompute")
    assert none["step_s"] <= selective["step_s"] < full["step_s"]
    assert none["peak_bytes"] >= selective["peak_bytes"] > full["peak_bytes"]


def test_what_only_other_frameworks_have_is_named(run: Run):
    code, _, err = run("predict", *RUN, "--cp", "2")
    assert (code, err) == (2, "error: cp: our own runtime has no such choice; price another one's with --framework\n")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--micro-batch-size", "3"], "global_batch_size (64) must be a multiple of dp x micro_batch_size (4 x 3)"),
        (["--virtual-stages", "2"], "virtual_stages above 1 need pp >= 2"),
        (["--micro-batch-size", "1", "--sequence-parallel", "--tp", "1"], "sequence_parallel needs tp >= 2"),
        (["--micro-batch-size", "1", "--micro-batches", "4"], "micro-batch-size: says how many micro-batches"),
        (["--memory", "1TiB"], "memory: 1.00 TiB is more than a a100-sxm-80g has"),
    ],
)
def test_a_run_that_cannot_be_is_one_line(run: Run, options: list[str], says: str):
    code, out, err = run("predict", *RUN, "--framework", "megatron", "--tp", "8", *options)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_check_answers_with_its_exit_code(run: Run):
    fits = run("check", *MEGATRON)
    assert fits[0] == 0
    assert "legal: yes" in fits[1]
    assert "fits" in fits[1]
    code, out, _ = run("check", *MEGATRON, "--memory", "10GiB")
    assert code == 1
    assert "DOES NOT FIT" in out
    code, _, err = run("check", *MEGATRON, "--tp", "3")
    assert code == 2
    assert "must divide 32 devices" in err


def test_check_of_a_plan_file(run: Run, plan: meshwright.Plan, plan_file: PlanFile):
    code, out, _ = run("check", plan_file(), "--json")
    assert (code, json.loads(out)["fits"]) == (0, True)


def test_recommend_finds_the_fewest(run: Run):
    question = ["--model", "llama-2-7b", "--device", "a100-sxm-40g", "--global-batch", "32", "--seq-len", "2048"]
    code, out, _ = run("recommend", *question, "--most-devices", "8", "--price-per-hour", "2", "--json")
    sizes = json.loads(out)
    assert code == 0
    assert [size["num_devices"] for size in sizes] == [1, 2, 4, 8]
    fits = [size["fits"] for size in sizes]
    assert fits == sorted(fits)
    assert not fits[0]
    largest = sizes[-1]
    assert largest["cost_per_billion_tokens"] == pytest.approx(8 * 2 * 1e9 / largest["tokens_per_s"] / 3600)
    code, out, _ = run("recommend", *question, "--most-devices", "1")
    assert code == 1
    assert "nothing fits on up to 1 devices" in out


def test_a_margin_is_held_back_where_nothing_is_said():
    gpu, cpu = library.cluster("8xh100-sxm"), library.cluster("4xcpu")
    usual = make_budget(gpu, None)
    assert usual.reserved_bytes > make_budget(gpu, None, None, 0.5).reserved_bytes > 0
    assert make_budget(gpu, "60GiB").reserved_bytes == 0
    assert make_budget(gpu, None, "1GiB").reserved_bytes == 1 << 30
    assert make_budget(gpu, None, is_measured=True).reserved_bytes == 0
    assert make_budget(cpu, None).reserved_bytes == 0
    with pytest.raises(UserError, match="memory-confidence: says what to hold back"):
        make_budget(gpu, None, "1GiB", 0.9)


def test_one_factor_from_few_runs_scales_all_seconds(plan: meshwright.Plan):
    predicted = predict(plan)
    priced = plan.model_copy(update={"predicted": predicted})
    runs = [
        RunMeasured(plan=priced, step_s=2 * predicted.step_s, peak_bytes=round(1.1 * predicted.peak_bytes)),
        RunMeasured(plan=priced, step_s=2 * predicted.step_s, peak_bytes=round(1.1 * predicted.peak_bytes)),
    ]
    found = calibrate(runs)
    assert found.compute_factor == found.communication_factor == pytest.approx(2)
    assert found.memory_factor == pytest.approx(1.1, rel=1e-6)
    slower = plan.model_copy(update={"cluster": calibrated_cluster(plan.cluster, found)})
    assert predict(slower).step_s == pytest.approx(2 * predicted.step_s, rel=1e-6)
    budget = calibrated_budget(Budget(memory_bytes=1100), found)
    assert budget.usable_bytes == pytest.approx(1000, abs=1)


def test_calibrate_reads_runs(run: Run, plan: meshwright.Plan, tmp_path: Path):
    priced = plan.model_copy(update={"predicted": predict(plan)})
    assert priced.predicted is not None
    folder = tmp_path / "run"
    folder.mkdir()
    meshwright.save_plan(priced, folder / "plan.json")
    step = {"kind": "step", "step_s": 3 * priced.predicted.step_s, "parts_s": {}}
    step["peak_memory_bytes"] = [priced.predicted.peak_bytes] * plan.num_devices
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for _ in range(5)))
    file = tmp_path / "factors.json"
    code, out, _ = run("calibrate", str(folder), "-o", str(file))
    assert code == 0
    assert "seconds: x 3" in out
    question = ["--model", plan.model.name, "--cluster", plan.cluster.name, "--global-batch", "8", "--seq-len", "64"]
    plain = json.loads(run("predict", *question, "--json")[1])["step_s"]
    slowed = json.loads(run("predict", *question, "--calibration", str(file), "--json")[1])["step_s"]
    assert slowed == pytest.approx(3 * plain, rel=1e-6)
    code, _, err = run("calibrate", str(tmp_path), "-o", str(file))
    assert code == 2
    assert err.count("\n") == 1
