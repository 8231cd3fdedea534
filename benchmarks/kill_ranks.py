"""Kills a random rank of a training job at random moments and looks at what is lost.

    python benchmarks/kill_ranks.py [--moments 20] [--seed 0] [--json OUT]

A chain of jobs on two ranks (a tied model in two pipeline stages, a checkpoint every other step), each
resumed from the run folder of the one before. In each, one rank gets SIGKILL at a random moment: in one of
four during the first seconds, when ranks start, else while they train and save. Every job must end soon,
say which rank was killed, and leave its newest whole checkpoint for the next. At the end the losses of all
steps, those trained twice included, must be those of a run that nobody has interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.files import write_spec
from meshwright.spec import library
from meshwright.spec.job import AdamW, Budget, JobSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.strategy import Strategy

MODEL, SEQ_LEN, BATCH, MICRO_BATCHES = "tiny-gpt2", 32, 8, 4
NUM_RANKS, SAVE_EVERY = 2, 2
PLANNED_STEPS = 100_000  # of the learning rate; the chain stops long before
SHARE_STARTING, STARTING_S, TRAINING_S = 0.25, 5.0, 3.0
END_WITHIN_S = 60.0
KEPT_CHECKPOINTS = 3
MORE_STEPS = 5  # that the last job trains after the last kill
TOLERANCE = 1e-5
NEEDS_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One kill: when and whom, and what came of it. `problems` is empty when all went as promised."""

    rank: int
    after_s: float
    is_started: bool
    is_saving: bool
    last_step: int
    newest_whole: int
    lost_steps: int
    end_s: float
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All kills of a chain, and how far its losses are from those of an uninterrupted run."""

    moments: tuple[Moment, ...]
    num_steps: int
    largest_loss_error: float
    problems: tuple[str, ...]

    @property
    def all_problems(self) -> list[str]:
        found = [f"moment {n}: {text}" for n, moment in enumerate(self.moments, start=1) for text in moment.problems]
        return [*found, *self.problems]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_at_random(Path(folder), options.moments, options.seed, print)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    sys.exit(1 if outcome.all_problems else 0)


def kill_at_random(folder: Path, num_moments: int, seed: int, show: Callable[[str], None]) -> Outcome:
    """Run the chain below `folder`; `show` gets a line a moment and a summary."""
    chain = Chain(folder)
    draw = random.Random(seed)
    moments: list[Moment] = []
    for number in range(1, num_moments + 1):
        trains = draw.random() >= SHARE_STARTING
        after_s = draw.uniform(0.0, TRAINING_S if trains else STARTING_S)
        moment = chain.kill_once(draw.randrange(NUM_RANKS), after_s, trains=trains)
        moments.append(moment)
        where = "saving" if moment.is_saving else "training" if moment.is_started else "starting"
        show(
            f"{number:>3}  rank {moment.rank} killed after {moment.after_s:4.1f} s, {where:<8}  "
            f"ended in {moment.end_s:4.1f} s  step {moment.last_step:>4}  "
            f"checkpoint {moment.newest_whole:>4}  lost {moment.lost_steps}"
            f"  {'; '.join(moment.problems) or 'ok'}"
        )
    outcome = chain.finish(moments)
    saving = sum(moment.is_saving for moment in moments)
    starting = sum(not moment.is_started for moment in moments)
    show(
        f"{len(moments)} kills, {starting} while starting and {saving} while saving: ended within "
        f"{max(moment.end_s for moment in moments):.1f} s, lost at most {max(moment.lost_steps for moment in moments)} "
        f"steps; {outcome.num_steps} steps in all, losses within {outcome.largest_loss_error:.1e} of an "
        f"uninterrupted run; {'; '.join(outcome.all_problems) or 'no problems'}"
    )
    return outcome


class Chain:
    """Jobs that share a run folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.reference = folder, folder / "run", folder / "reference"
        self.plan, self.text = folder / "plan.json", folder / "text.txt"
        write_spec(_plan(), self.plan)
        self.text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(3000)))

    def command(self, run_dir: Path, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "meshwright", "train", str(self.plan), "--local", str(NUM_RANKS),
            "--data", str(self.text), "--steps", str(PLANNED_STEPS), "--run-dir", str(run_dir),
            "--cache-dir", str(self.folder / "cache"), "--save-every", str(SAVE_EVERY), *more,
        ]  # fmt: skip

    def resume(self) -> list[str]:
        return ["--resume", str(self.run)] if newest_whole(self.run) else []

    def kill_once(self, rank: int, after_s: float, *, trains: bool) -> Moment:
        """Start the next job, kill `rank`, and look at the end.

        The moment is `after_s` after the first record of the run (`trains`), or else after the start of the job (or
        as soon as the rank is there).
        """
        self._forget_old_checkpoints()
        before, records_before = newest_whole(self.run), len(read_records(self.run))
        left_over = _partial(self.run)
        process = subprocess.Popen(
            self.command(self.run, *self.resume()),
            env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started_at = time.monotonic()
        try:
            while trains and len(read_records(self.run)) == records_before:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            time.sleep(after_s)
            pid = _wait_for_rank(process, rank)
            is_saving = bool(_partial(self.run) - left_over)
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            _, errors = process.communicate(timeout=END_WITHIN_S)
        finally:
            process.kill()
        end_s = time.monotonic() - killed_at
        records = read_records(self.run)[records_before:]
        last_step = max((one["step"] for one in records if one["kind"] == "step"), default=before)
        whole = newest_whole(self.run)
        problems = [
            *_problems_of_end(rank, process.returncode, errors),
            *_problems_of_resume(records, before),
            *([f"checkpoint {whole} after {before}"] if whole < before else []),
            *([f"lost {last_step - whole} steps"] if last_step - whole > SAVE_EVERY else []),
        ]
        return Moment(
            rank=rank,
            after_s=round(killed_at - started_at, 2),
            is_started=bool(records),
            is_saving=is_saving,
            last_step=last_step,
            newest_whole=whole,
            lost_steps=last_step - whole,
            end_s=round(end_s, 2),
            problems=tuple(problems),
        )

    def finish(self, moments: list[Moment]) -> Outcome:
        """Train on without a kill, then the same without any, and compare."""
        before, records_before = newest_whole(self.run), len(read_records(self.run))
        stop_at = ["--stop-at", str(before + MORE_STEPS)]
        problems = [
            *self._run_to_end(self.command(self.run, *self.resume(), *stop_at)),
            *_problems_of_resume(read_records(self.run)[records_before:], before),
            *self._run_to_end(self.command(self.reference, *stop_at, "--save-every", "0")),
        ]
        left = [path.name for path in (self.run / "checkpoints").iterdir() if path.suffix]
        want = {one["step"]: one["loss"] for one in read_records(self.reference) if one["kind"] == "step"}
        errors = [
            abs(one["loss"] - want[one["step"]]) / want[one["step"]]
            for one in read_records(self.run)
            if one["kind"] == "step" and one["step"] in want
        ]
        trained = {one["step"] for one in read_records(self.run) if one["kind"] == "step"}
        if left:
            problems.append(f"left over: {', '.join(left)}")
        if missing := want.keys() - trained:
            problems.append(f"steps never trained: {sorted(missing)}")
        if max(errors) > TOLERANCE:
            problems.append(f"a loss is off by {max(errors):.1e}")
        return Outcome(
            moments=tuple(moments), num_steps=len(want), largest_loss_error=max(errors), problems=tuple(problems)
        )

    def _run_to_end(self, command: list[str]) -> list[str]:
        result = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=NEEDS_S, check=False
        )
        return [] if result.returncode == 0 else [f"exit code {result.returncode}: {result.stderr.strip()}"]

    def _forget_old_checkpoints(self) -> None:
        """Keep the disk small."""
        for path in sorted((self.run / "checkpoints").glob("step-????????"))[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(path)


def newest_whole(run: Path) -> int:
    """Return the newest step whose checkpoint has all its files in full, 0 when there is none.

    An independent look: it knows only that checkpoint.json lists the files, and the layout of safetensors files.
    """
    steps = [0]
    for path in (run / "checkpoints").glob("step-????????"):
        description = path / "checkpoint.json"
        files = (
            json.loads(description.read_text())["files"] if description.exists() else [{"name": "?", "num_bytes": 0}]
        )
        if all(_is_whole(path / file["name"], file["num_bytes"]) for file in files):
            steps.append(int(path.name.removeprefix("step-")))
    return max(steps)


def read_records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _is_whole(file: Path, num_bytes: int) -> bool:
    if not file.exists() or file.stat().st_size != num_bytes:
        return False
    if file.suffix != ".safetensors":
        return True
    content = file.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:header_end])
    ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    return header_end + max(ends) == len(content)


def _problems_of_end(rank: int, code: int, errors: str) -> list[str]:
    problems = [] if code == 1 else [f"exit code {code}"]
    lines = errors.strip().splitlines()
    if lines != [f"error: rank {rank} was killed by SIGKILL; the other ranks were stopped"]:
        problems.append(f"it said {' / '.join(lines)[:500]}")
    return problems


def _problems_of_resume(records: list[dict[str, Any]], newest: int) -> list[str]:
    """Return what is wrong with where a job began, when `newest` was the newest whole checkpoint."""
    begun = [one["step"] for one in records if one["kind"] == "start"]
    return [f"began at step {begun[0]} and not at {newest}"] if begun and begun[0] != newest else []


def _partial(run: Path) -> set[tuple[str, int]]:
    """Return the checkpoints that are being written: folders with another name than they will have."""
    found: set[tuple[str, int]] = set()
    for path in (run / "checkpoints").glob("*.partial"):
        try:
            found.add((path.name, path.stat().st_ino))
        except FileNotFoundError:
            continue
    return found


def _wait_for_rank(process: subprocess.Popen[str], rank: int) -> int:
    """Return the process id of a rank, once the launcher has started it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        for pid in children.read_text().split():
            # Until it executes its program, a child has the launcher's environment.
            if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{pid}/environ').read_text()}":
                return int(pid)
        time.sleep(0.02)
    raise AssertionError(f"the job has ended before: {process.communicate()}")


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}


def _plan() -> Plan:
    model = library.model(MODEL)
    half = len(model.layers) // NUM_RANKS
    return Plan(
        model=model,
        cluster=library.cluster(f"{NUM_RANKS}xcpu"),
        job=JobSpec(
            global_batch_size=BATCH,
            seq_len=SEQ_LEN,
            param_dtype="fp32",
            optimizer=AdamW(lr=1e-3, eps=1e-6, clip_norm=0.5, warmup_steps=4),
        ),
        budget=Budget(memory_bytes=4 << 30),
        num_devices=NUM_RANKS,
        global_batch_size=BATCH,
        num_micro_batches=MICRO_BATCHES,
        stages=(StagePlan.of([Strategy()] * half), StagePlan.of([Strategy()] * (len(model.layers) - half))),
    )


if __name__ == "__main__":
    main()
