"""Things break: ranks die or never come, disks fill up, losses run away. Every job ends, says why, and loses little."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_ranks import kill_at_random
from meshwright.files import write_spec
from meshwright.runtime.checkpoint import why_torn
from meshwright.runtime.launch import SignIn, find_mismatch
from tests.launch import ROOT, environment, run
from tests.parity.cases import gpt2, make_plan, s
from tests.runtime.test_train import byte_plan

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MANY_STEPS = 100_000
END_WITHIN_S = 60
FULL_DISK_BYTES = 4_000_000


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
    """A running job, watched through its metrics. Leaving it ends what is left of it, stopped processes too."""

    def __init__(self, command: list[str], run_dir: Path, **variables: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids if (self.run_dir / "metrics.jsonl").exists() else []:
            with contextlib.suppress(OSError):
                if str(self.run_dir) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the ranks, once they have started."""
        return self.wait_for("start")[0]["pids"]

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
    victim = random.Random(0).randrange(2)
    with Job(arguments(plan, text, tmp_path / "run", "--save-every", "5"), tmp_path / "run") as job:
        job.wait_for("checkpoint", 2)
        os.kill(job.pids[victim], signal.SIGKILL)
        code, errors = job.end()
    assert code == 1
    assert errors == f"error: rank {victim} was killed by SIGKILL; the other ranks were stopped\n"
    last_step = max(record["step"] for record in job.records() if record["kind"] == "step")

    resumed = run(arguments(plan, text, tmp_path / "again", "--resume", str(tmp_path / "run"), steps=last_step + 2))
    assert resumed.returncode == 0, resumed.stderr
    first = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0])
    assert last_step - first["step"] <= 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits(plan: Path, text: Path, tmp_path: Path, number: signal.Signals):
    with Job(arguments(plan, text, tmp_path / "run"), tmp_path / "run") as job:
        job.wait_for("step", 3)
        job.process.send_signal(number)
        code, errors = job.end()
    assert code == 128 + number, errors
    assert errors == f"stopped by {number.name}\n"
    records = job.records()
    assert records[-1]["kind"] == "checkpoint"
    assert records[-1]["step"] == records[-2]["step"]


def test_sigterm_to_one_rank_saves_and_ends_all(plan: Path, text: Path, tmp_path: Path):
    with Job(arguments(plan, text, tmp_path / "run"), tmp_path / "run") as job:
        job.wait_for("step", 3)
        os.kill(job.pids[1], signal.SIGTERM)
        code, errors = job.end()
    assert (code, errors) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")
    assert job.records()[-1]["kind"] == "checkpoint"


def test_sigterm_in_the_midst_of_a_save_loses_nothing(plan: Path, text: Path, tmp_path: Path):
    """To the launcher and, as cluster managers do, to each rank as well."""
    with Job(arguments(plan, text, tmp_path / "run", "--save-every", "1"), tmp_path / "run") as job:
        job.wait_for("checkpoint", 2)
        folder, pids = tmp_path / "run" / "checkpoints", job.pids
        while not list(folder.glob("*.partial")):
            assert job.process.poll() is None
        for pid in (job.process.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        code, errors = job.end()
    assert (code, errors) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")
    last_step = max(record["step"] for record in job.records() if record["kind"] == "step")
    assert max(folder.iterdir()).name == f"step-{last_step:08d}"
    assert why_torn(folder / f"step-{last_step:08d}") is None
    assert not list(folder.glob("*.partial"))


def test_a_second_ctrl_c_ends_the_job_at_once(plan: Path, text: Path, tmp_path: Path):
    """One rank is stopped, so that the step after the first Ctrl-C does not end."""
    with Job(arguments(plan, text, tmp_path / "run"), tmp_path / "run") as job:
        job.wait_for("step", 3)
        os.kill(job.pids[1], signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        started = time.monotonic()
        code, errors = job.end()
    assert (code, errors) == (128 + signal.SIGINT, "stopped by SIGINT\n")
    assert time.monotonic() - started < 5


def test_ranks_save_and_end_when_their_launcher_is_killed(plan: Path, text: Path, tmp_path: Path):
    with Job(arguments(plan, text, tmp_path / "run"), tmp_path / "run") as job:
        job.wait_for("step", 3)
        job.process.kill()
        _, errors = job.end()  # the ranks hold its stderr: it ends when they do
        assert job.records()[-1]["kind"] == "checkpoint"
    # A rank that hears it from the other first has nothing to say of its own.
    said = {f"rank {rank}: the job's launcher is gone; saving and ending" for rank in (0, 1)}
    assert errors
    assert set(errors.splitlines()) <= said


def test_a_stopped_rank_is_named_and_the_job_ends(plan: Path, text: Path, tmp_path: Path):
    with Job(arguments(plan, text, tmp_path / "run", "--timeout", "10"), tmp_path / "run") as job:
        job.wait_for("step", 3)
        pid = job.pids[1]
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        code, errors = job.end()
    assert code == 1, errors
    assert time.monotonic() - started < END_WITHIN_S
    assert len(errors.splitlines()) == 1
    assert "error: rank 0 ends the job" in errors
    assert f"(process {pid} on " in errors
    assert "rank 1 has not answered for" in errors


HANG = """
import os, sys, time
from meshwright.cli import main
from meshwright.runtime.data import TokenDataset

def read_for_ever(self, start, count, read=TokenDataset.batch):
    if start >= 16:  # the third step
        HOW
    return read(self, start, count)

if os.environ["RANK"] == "1":
    TokenDataset.batch = read_for_ever
main(sys.argv[1:])
"""


@pytest.mark.parametrize("how", ["time.sleep(1000)", "while True: pass"])
def test_a_rank_whose_data_never_come_is_named(plan: Path, text: Path, tmp_path: Path, how: str):
    code = ["-c", HANG.replace("HOW", how)]
    ends = run_by_hand(*by_hand(plan, text, tmp_path, "--timeout", "8", code=code))
    assert [code for code, _ in ends] == [1, 1]
    said = "".join(errors for _, errors in ends)
    assert len(said.splitlines()) == 1
    assert "rank 1 has been in _Run._train_step.batch (train.py:" in said
    assert "-> read_for_ever (<string>:" in said
    assert "at step 3, forward of micro-batch 0" in said


@pytest.mark.parametrize(
    ("victim", "says"),
    [(1, "; rank 1 (process"), (0, "; the host of the job's store (torchrun on the first machine, or rank 0) is gone")],
)
def test_without_our_launcher_the_others_say_who_is_gone(
    plan: Path, text: Path, tmp_path: Path, victim: int, says: str
):
    jobs = by_hand(plan, text, tmp_path)
    with jobs[0], jobs[1]:
        jobs[0].wait_for("step", 3)
        os.kill(jobs[victim].process.pid, signal.SIGKILL)
        code, errors = jobs[1 - victim].end()
    assert code == 1
    assert len(errors.splitlines()) == 1
    assert f"error: rank {1 - victim}: lost contact in step " in errors
    assert says in errors


def test_kills_at_random_moments_lose_little_and_corrupt_nothing(tmp_path: Path):
    lines: list[str] = []
    outcome = kill_at_random(tmp_path, 2, 0, lines.append)
    assert not outcome.all_problems, "\n".join(lines)


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


def test_a_disk_that_is_really_full(plan: Path, text: Path, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FULL_DISK_BYTES}", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        result = run(arguments(plan, text, disk / "run", "--save-every", "1"))
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1
        assert "could not be written" in result.stderr
        assert "No space left on device; the last whole one is" in result.stderr
        saved = sorted((disk / "run" / "checkpoints").iterdir())
        assert saved
        assert [why_torn(path) for path in saved] == [None] * len(saved)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_can_no_longer_be_written_ends_the_run_in_one_line(plan: Path, text: Path, tmp_path: Path):
    with Job(arguments(plan, text, tmp_path / "run"), tmp_path / "run") as job:
        job.wait_for("step", 3)
        (tmp_path / "run" / "checkpoints").write_text("in the way")
        job.process.send_signal(signal.SIGTERM)
        code, errors = job.end()
    assert code == 1
    assert len(errors.splitlines()) == 1
    assert "could not be written" in errors


def test_a_loss_that_runs_away_names_step_and_layer(text: Path, tmp_path: Path):
    wild = byte_plan(make_plan(gpt2(), [[(3, s())], [(3, s())]], micro_batches=4, batch=8))
    optimizer = wild.job.optimizer.model_copy(update={"lr": 1e30, "warmup_steps": 0})
    wild = wild.model_copy(update={"job": wild.job.model_copy(update={"optimizer": optimizer})})
    write_spec(wild, tmp_path / "wild.json")
    result = run(arguments(tmp_path / "wild.json", text, tmp_path / "run", steps=20))
    assert result.returncode == 1
    assert "step 2: the loss is not finite; layer 1 (block) first produced" in result.stderr
    assert "Traceback" not in result.stderr


def by_hand(
    plan: Path,
    text: Path,
    tmp_path: Path,
    *more: str,
    code: Sequence[str] = ("-m", "meshwright"),
    plans: Sequence[Path] = (),
    ranks: Sequence[int] = (0, 1),
    world_sizes: Sequence[int] = (2, 2),
) -> list[Job]:
    """Start ranks without a launcher, as on two machines, and return them; each may be told something else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs: list[Job] = []
    for index, (rank, world_size) in enumerate(zip(ranks, world_sizes, strict=True)):
        command = [
            sys.executable, *code, "train", str(plans[index] if plans else plan), "--data", str(text),
            "--steps", str(MANY_STEPS), "--run-dir", str(tmp_path / "run"),
            "--cache-dir", str(tmp_path / f"cache-{index}"), *more,
        ]  # fmt: skip
        told = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        jobs.append(Job(command, tmp_path / "run", **told))
    return jobs


def run_by_hand(first: Job, second: Job) -> list[tuple[int, str]]:
    """Wait for both to end; return their exit codes and what they said."""
    with first, second:
        return [first.end(), second.end()]


def test_ranks_of_another_world_size_are_named(plan: Path, text: Path, tmp_path: Path):
    for code, errors in run_by_hand(*by_hand(plan, text, tmp_path, world_sizes=(2, 3))):
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert "WORLD_SIZE: rank 1 (process " in errors
        assert "was started with WORLD_SIZE 3, but rank 0 with 2" in errors


def test_two_ranks_of_one_number_are_named(plan: Path, text: Path, tmp_path: Path):
    for code, errors in run_by_hand(*by_hand(plan, text, tmp_path, ranks=(0, 0))):
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert "were both started as rank 0; give each rank its own number" in errors


def test_ranks_with_another_plan_are_named(plan: Path, text: Path, tmp_path: Path):
    other = tmp_path / "other.json"
    write_spec(byte_plan(make_plan(gpt2(), [[(2, s())], [(4, s())]], micro_batches=4, batch=8)), other)
    for code, errors in run_by_hand(*by_hand(plan, text, tmp_path, plans=(plan, other))):
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert "plan: rank 1 (process " in errors
        assert "was started with another plan than rank 0 (process " in errors


def test_ranks_with_other_data_are_named(plan: Path, text: Path, tmp_path: Path):
    """One path, but another file there: what two machines may have."""
    code = (
        "import os, pathlib, sys; from meshwright.cli import main; "
        "sys.argv[sys.argv.index('--data') + 1] += os.environ['RANK']; main(sys.argv[1:])"
    )
    for rank in (0, 1):
        Path(f"{tmp_path / 'text'}{rank}").write_text(f"{rank} " * 2000)
    ends = run_by_hand(*by_hand(plan, tmp_path / "text", tmp_path, code=("-c", code)))
    assert [code for code, _ in ends] == [2, 2]
    assert "error: rank 0: data: ranks 1 read other data than rank 0" in ends[0][1]
    assert ends[1][1] == ""


def test_sign_ins_are_compared_with_what_most_say():
    def one(world_size: int = 4, **terms: str) -> SignIn:
        return SignIn(host="host", pid=7, world_size=world_size, terms=terms)

    assert find_mismatch({}) is None
    assert find_mismatch({0: one(), 1: one()}) is None
    assert "rank 0 (process 7 on host) was started with WORLD_SIZE 2" in str(
        find_mismatch({0: one(2), 1: one(), 2: one()})
    )
    assert "plan: rank 3 (process 7 on host) was started with another plan than rank 0" in str(
        find_mismatch({0: one(plan="a"), 1: one(plan="a"), 3: one(plan="b")})
    )


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
