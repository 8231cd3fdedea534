"""Profiles and trials on real ranks: complete, resumed, interrupted, over several machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright
from meshwright.files import read_spec, write_spec
from meshwright.spec.profile import Profile
from tests.launch import ROOT, environment, run, run_meshwright

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
QUESTION = ["--model", "tiny-llama", "--global-batch", "4", "--seq-len", "32", "--dtype", "fp32"]
END_WITHIN_S = 60


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a profile of two ranks."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    result = run_meshwright("profile", "--local", "2", "-o", str(path), *QUESTION)
    assert result.returncode == 0, result.stderr
    return path


def test_a_profile_has_all_that_a_search_asks_for(measured: Path):
    profile = read_spec(Profile, measured)
    assert profile.is_complete
    assert (profile.num_ranks, profile.ranks_per_node) == (2, 2)
    assert {s.op for s in profile.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert {s.op for s in profile.units} == {"gather", "reduce_scatter", "all_reduce", "accumulate"}
    assert {(s.layer.kind, s.tp, s.samples_per_rank) for s in profile.layers} == {
        (kind, tp, samples) for kind in ("embedding", "block", "head") for tp in (1, 2) for samples in (1, 4)
    }
    assert all(s.saved_bytes > 0 for s in profile.layers)
    assert len({s.key for s in profile.samples}) == len(profile.samples)
    found = meshwright.plan("tiny-llama", "2xcpu", global_batch=4, seq_len=32, dtype="fp32", profile=measured)
    assert isinstance(found, meshwright.Found)
    assert found.plan.predicted is not None
    assert not [what for what in found.plan.predicted.not_measured if "no sample" in what]


def test_what_is_there_is_not_measured_again(measured: Path, tmp_path: Path):
    whole = read_spec(Profile, measured)
    part = whole.samples[:-3]
    path = tmp_path / "profile.json"
    write_spec(whole.with_samples(part, is_complete=False), path)
    result = run_meshwright("profile", "--local", "2", "-o", str(path), *QUESTION)
    assert result.returncode == 0, result.stderr
    assert f"{len(part)} samples are here already; 6 to measure" in result.stderr
    again = read_spec(Profile, path)
    assert again.is_complete
    assert again.samples[:-3] == part
    assert [s.key for s in again.samples] == [s.key for s in whole.samples]


def test_a_profile_of_another_machine_is_not_mixed_in(measured: Path, tmp_path: Path):
    path = tmp_path / "profile.json"
    write_spec(read_spec(Profile, measured).model_copy(update={"torch_version": "0.1"}), path)
    before = path.read_bytes()
    result = run_meshwright("profile", "--local", "2", "-o", str(path), *QUESTION)
    assert result.returncode == 2
    assert "the profile that is there has torch_version 0.1" in result.stderr
    assert "Traceback" not in result.stderr
    assert path.read_bytes() == before


def test_an_interrupted_profile_keeps_what_it_has(tmp_path: Path):
    path = tmp_path / "profile.json"
    command = [sys.executable, "-m", "meshwright", "profile", "--local", "2", "-o", str(path), *QUESTION]
    job = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + END_WITHIN_S
        while not path.exists():
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=END_WITHIN_S)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGINT, errors
    kept = read_spec(Profile, path)
    assert not kept.is_complete
    assert len(kept.samples) > 0
    assert f"{len(kept.samples)} samples are kept in {path}; the same command goes on from there" in errors
    assert "Traceback" not in errors


def test_a_stopped_rank_ends_the_profile_and_is_named(tmp_path: Path):
    path = tmp_path / "profile.json"
    options = ["--local", "2", "-o", str(path), "--timeout", "8", *QUESTION]
    command = [sys.executable, "-m", "meshwright", "profile", *options]
    job = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    children: list[int] = []
    try:
        deadline = time.monotonic() + END_WITHIN_S
        while not path.exists():
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.1)
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        os.kill(children[1], signal.SIGSTOP)
        _, errors = job.communicate(timeout=END_WITHIN_S)
    finally:
        job.kill()
    assert job.returncode == 1, errors
    assert "rank 1 has not answered for" in errors
    assert "Traceback" not in errors
    assert not read_spec(Profile, path).is_complete


def test_several_machines_have_links_of_their_own(tmp_path: Path):
    """Two launchers of one rank each stand for two machines."""
    path = tmp_path / "profile.json"
    code = (
        "import meshwright.measure.profile as p; p._tasks = (lambda whole: lambda *a: "
        "[t for t in whole(*a) if t.label.startswith(('send', 'optimizer'))])(p._tasks); "
        "from meshwright.cli import main; main()"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    jobs = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", "29431",
                str(script), "profile", "-o", str(path),
            ],
            cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        for job in jobs:
            _, errors = job.communicate(timeout=2 * END_WITHIN_S)
            assert job.returncode == 0, errors
    finally:
        for job in jobs:
            job.kill()
    profile = read_spec(Profile, path)
    assert (profile.num_ranks, profile.ranks_per_node) == (2, 1)
    assert {s.num_nodes for s in profile.collectives} == {2}


def test_tune_runs_the_finalists_and_keeps_the_fastest(tmp_path: Path):
    path = tmp_path / "plan.json"
    options = ["--local", "2", "--cluster", "2xcpu", "--top", "3", "--rounds", "1", "--steps", "1"]
    result = run_meshwright("tune", *QUESTION, *options, "-o", str(path), "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert len(data["trials"]) == 3
    assert all(trial["step_s"] and trial["peak_bytes"] and trial["failure"] is None for trial in data["trials"])
    fastest = min(range(3), key=lambda i: data["trials"][i]["step_s"][0])
    assert data["winner"] == fastest
    assert meshwright.load_plan(path).model_dump(mode="json") == data["trials"][fastest]["plan"]
    refused = run_meshwright("tune", *QUESTION, "--cluster", "2xcpu", "--local", "3")
    assert refused.returncode == 2
    assert "local: the cluster has 2 devices, not 3" in refused.stderr


def test_tune_under_torchrun(tmp_path: Path):
    path = tmp_path / "plan.json"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", "meshwright"]
    options = ["tune", *QUESTION, "--cluster", "2xcpu", "--top", "2", "--rounds", "1", "--steps", "1", "-o", str(path)]
    result = run([sys.executable, *launch, *options])
    assert result.returncode == 0, result.stderr
    assert meshwright.load_plan(path).num_devices == 2
    assert "fastest" in result.stdout
