"""Things break: ranks die or never come, disks fill up, losses run away. Every job ends, says why, and loses little."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.files import write_spec
from tests.launch import ROOT, environment, run
from tests.parity.cases import gpt2, make_plan, s
from tests.runtime.test_train import byte_plan

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MANY_STEPS = 100_000
END_WITHIN_S = 60


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(3000)))
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a plan for two ranks: two stages of a tied model."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_spec(byte_plan(make_plan(gpt2(), [[(3, s())], [(3, s())]], micro_batches=4, batch=8)), path)
    return path


def arguments(plan: Path, text: Path, run_dir: Path, *more: str, steps: int = MANY_STEPS) -> list[str]:
    return [
        sys.executable, "-m", "meshwright", "train", str(plan), "--local", "2", "--data", str(text),
        "--steps", str(steps), "--run-dir", str(run_dir), "--cache-dir", str(text.parent / "cache"), *more,
    ]  # fmt: skip


class Job:
    """A running job, watched through its metrics."""

    def __init__(self, command: list[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def records(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until `count` records of `kind` are there."""
        deadline = time.monotonic() + END_WITHIN_S
        while time.monotonic() < deadline:
            found = [record for record in self.records() if record["kind"] == kind]
            if len(found) >= count:
                return found
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError(f"no {count} records of {kind}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit code and stderr."""
        _, errors = self.process.communicate(timeout=END_WITHIN_S)
        return self.process.returncode, errors


def test_a_killed_rank_ends_the_job_and_a_resume_loses_little(plan: Path, text: Path, tmp_path: Path):
    job = Job(arguments(plan, text, tmp_path / "run", "--save-every", "5", "--log-every", "1"), tmp_path / "run")
    victim = random.Random(0).randrange(2)
    (start,) = job.wait_for("start")
    job.wait_for("checkpoint", 2)
    os.kill(start["pids"][victim], signal.SIGKILL)
    code, errors = job.end()
    assert code == 1
    assert f"rank {victim} was killed by SIGKILL" in errors
    last_step = max(record["step"] for record in job.records() if record["kind"] == "step")

    resumed = run(arguments(plan, text, tmp_path / "again", "--resume", str(tmp_path / "run"), steps=last_step + 2))
    assert resumed.returncode == 0, resumed.stderr
    first = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0])
    assert last_step - first["step"] <= 5


def test_sigterm_saves_and_exits(plan: Path, text: Path, tmp_path: Path):
    job = Job(arguments(plan, text, tmp_path / "run"), tmp_path / "run")
    job.wait_for("step", 3)
    job.process.send_signal(signal.SIGTERM)
    code, errors = job.end()
    assert code == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    records = job.records()
    assert records[-1]["kind"] == "checkpoint"
    assert records[-1]["step"] == records[-2]["step"]


def test_a_torn_checkpoint_is_passed_over_and_named(plan: Path, text: Path, tmp_path: Path):
    first = run(arguments(plan, text, tmp_path / "run", "--save-every", "2", steps=4))
    assert first.returncode == 0, first.stderr
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    shard = next(newest.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    again = run(arguments(plan, text, tmp_path / "again", "--resume", str(tmp_path / "run"), steps=6))
    assert again.returncode == 0, again.stderr
    assert f"{newest} is torn" in again.stdout
    start = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["step"] == 2
    refused = run(arguments(plan, text, tmp_path / "third", "--resume", str(newest), steps=6))
    assert refused.returncode == 2
    assert "torn" in refused.stderr


def test_a_full_disk_leaves_the_last_checkpoint_and_no_part_of_a_new_one(plan: Path, text: Path, tmp_path: Path):
    """A limit on file sizes stands for the full disk: writing a shard fails half-way."""
    assert run(arguments(plan, text, tmp_path / "run", steps=2)).returncode == 0
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "limited"]
    command = arguments(plan, text, tmp_path / "run", "--resume", str(tmp_path / "run"), steps=4)
    result = run([*limited, *command])
    assert result.returncode == 1, result.stderr
    assert "checkpoint of step 4 could not be written" in result.stderr
    assert "the last whole one is" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_loss_that_runs_away_names_step_and_layer(text: Path, tmp_path: Path):
    wild = byte_plan(make_plan(gpt2(), [[(3, s())], [(3, s())]], micro_batches=4, batch=8))
    optimizer = wild.job.optimizer.model_copy(update={"lr": 1e30, "warmup_steps": 0})
    wild = wild.model_copy(update={"job": wild.job.model_copy(update={"optimizer": optimizer})})
    write_spec(wild, tmp_path / "wild.json")
    result = run(arguments(tmp_path / "wild.json", text, tmp_path / "run", steps=20))
    assert result.returncode == 1
    assert "step 2: the loss is not finite; layer 1 (block) first produced" in result.stderr
    assert "Traceback" not in result.stderr


def test_ranks_that_never_come_are_named(plan: Path, text: Path, tmp_path: Path):
    """Only rank 0 of 2 is started."""
    code = (
        "import meshwright.runtime.launch as launch; launch.MEETING_TIMEOUT_S = 3; "
        "from meshwright.cli import main; import sys; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "train", str(plan), "--data", str(text), "--run-dir", str(tmp_path / "run")]
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}
    result = subprocess.run(
        command, cwd=ROOT, env={**environment(), **alone}, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "ranks 1 of 2 have not signed in" in result.stderr
    assert "Traceback" not in result.stderr
    unreachable = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), **alone, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert unreachable.returncode == 2
    assert "rank 1 cannot reach 127.0.0.1:29417" in unreachable.stderr
    assert "Traceback" not in unreachable.stderr
