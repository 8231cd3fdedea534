"""The planner as a function: what may be given, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright
from meshwright import Budget, Found, UserError
from meshwright.files import sha256, write_spec
from meshwright.search.planner import make_budget
from meshwright.spec.profile import CopySample, Profile
from meshwright.units import GB, GiB

QUESTION: dict[str, Any] = {"global_batch": 8, "seq_len": 64}


def profile(backend: Any) -> Profile:
    copies = (CopySample(moved_bytes=1_000_000, busy_ranks=4, seconds=1.0),)
    return Profile(device="slow", backend=backend, num_ranks=4, torch_version="0", copies=copies)


def test_names_specs_and_files_mean_the_same(tmp_path):
    spec, ranks = meshwright.model("tiny-llama"), meshwright.cluster("4xcpu")
    write_spec(spec, tmp_path / "model.json")
    write_spec(ranks, tmp_path / "cluster.yaml")
    by_name = meshwright.plan("tiny-llama", "4xcpu", **QUESTION)
    by_spec = meshwright.plan(spec, ranks, **QUESTION)
    by_file = meshwright.plan(str(tmp_path / "model.json"), str(tmp_path / "cluster.yaml"), **QUESTION)
    assert isinstance(by_name, Found)
    assert isinstance(by_spec, Found)
    assert isinstance(by_file, Found)
    assert by_name.plan == by_spec.plan == by_file.plan
    assert by_name.plan.inputs_sha256 == sha256(spec, ranks, by_name.plan.job, by_name.plan.budget)


def test_the_budget_is_the_device_unless_said():
    ranks = meshwright.cluster("8xa100-sxm-40g")
    assert make_budget(ranks, None).memory_bytes == 40 * GiB
    assert make_budget(ranks, "30GB") == Budget(memory_bytes=30 * GB)
    assert make_budget(ranks, "30GB", "1GiB") == Budget(memory_bytes=30 * GB, reserved_bytes=GiB)
    assert make_budget(ranks, 40 * GiB, 5).usable_bytes == 40 * GiB - 5
    with pytest.raises(UserError, match="memory: 41GiB is more than a a100-sxm-40g has"):
        make_budget(ranks, "41GiB")
    with pytest.raises(UserError, match="reserve: 'much' is not a size"):
        make_budget(ranks, None, "much")
    with pytest.raises(UserError, match="leaves nothing"):
        make_budget(ranks, 5, 5)


def test_a_profile_changes_the_price(tmp_path):
    write_spec(profile("cpu"), tmp_path / "profile.json")
    plain = meshwright.plan("tiny-llama", "4xcpu", **QUESTION)
    slow = meshwright.plan("tiny-llama", "4xcpu", profile=tmp_path / "profile.json", **QUESTION)
    assert isinstance(plain, Found)
    assert isinstance(slow, Found)
    assert slow.plan.predicted.step_s > 10 * plain.plan.predicted.step_s
    assert slow.plan.cluster.device.memory_bytes_per_s == 1e6
    with pytest.raises(UserError, match="profile: was measured on cuda"):
        meshwright.plan("tiny-llama", "4xcpu", profile=profile("cuda"), **QUESTION)


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_plans_go_to_files_and_back(tmp_path, ending: str):
    found = meshwright.plan("tiny-gpt2", "4xcpu", stages=2, **QUESTION)
    assert isinstance(found, Found)
    path = tmp_path / "new" / f"plan.{ending}"
    meshwright.save_plan(found.plan, path)
    assert meshwright.load_plan(path) == found.plan
    assert meshwright.predict(meshwright.load_plan(path)) == found.plan.predicted


@pytest.mark.parametrize(
    ("model", "cluster", "message"),
    [
        ("gpt5", "4xcpu", "model: 'gpt5' is neither a known model nor a file; did you mean gpt2"),
        ("gpt2", "4xcpus", "device: 'cpus' is not known"),
        ("gpt2", "cpu", "cluster: 'cpu' is not a cluster"),
        ("./nothing.json", "4xcpu", "nothing.json: no such file"),
    ],
)
def test_unknown_names(model: str, cluster: str, message: str):
    with pytest.raises(UserError, match=message):
        meshwright.plan(model, cluster, **QUESTION)


def test_dropout_is_part_of_the_plan():
    found = meshwright.plan("tiny-gpt2", "2xcpu", dropout=0.1, **QUESTION)
    assert isinstance(found, Found)
    assert found.plan.job.dropout == 0.1
