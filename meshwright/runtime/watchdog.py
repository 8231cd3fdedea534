"""Ends a job in which nothing moves any more, and names the rank that keeps the others waiting.

A rank that is stopped, that reads from a dead disk or that loops for ever leaves all others waiting
inside a collective, which knows neither who is missing nor why. So each rank's main thread notes what
it does in a `Progress` (attribute writes, nothing else), and two threads beside it publish that every
second in the job's store: one decides, the other talks to the store, which may itself not answer.
When its own main thread has not moved for the time limit, a rank reads what all have published and
names those who are silent, else those who are stuck outside of communication, else the one that is
furthest behind. Whoever comes first says it in one line; all end at once, whatever their main
threads are in.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal

import torch.distributed as dist

from meshwright.errors import UserError

State = Literal["running", "lost contact", "failed", "ended"]
Connect = Callable[[], dist.Store]

_BEAT, _VERDICT = "beat", "verdict"
_INTERVAL_S = 1.0
_BEATS_A_TIMEOUT = 10  # at least so many, also with a short limit
_MISSED_BEATS = 4  # a rank that misses so many is silent
_LEAST_SILENCE_S = 2.0
_LAST_WORDS_S = 5.0  # what a full pipe or a dead store may delay the end
_PACKAGE = __name__.split(".", maxsplit=1)[0]
_COLLECTIVES = {
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.c10d_logger",
}
_WAITERS = ("torch.distributed.", f"{_PACKAGE}.runtime.pipeline")


@dataclass(slots=True)
class Progress:
    """What the main thread does at the moment. A change of `count` is progress; the rest is for people."""

    step: int = 0
    doing: str = "starting"
    phase: str = ""
    micro_batch: int = 0
    count: int = 0

    def begin(self, doing: str, step: int | None = None) -> None:
        """Note the start of an activity."""
        if step is not None:
            self.step = step
        self.doing, self.phase = doing, ""
        self.count += 1

    def at(self, phase: str, micro_batch: int) -> None:
        """Note the start of a micro-batch's pass."""
        self.phase, self.micro_batch = phase, micro_batch
        self.count += 1

    def __str__(self) -> str:
        parts = [f"step {self.step}"] if self.step else []
        if self.doing != "training":
            parts.append(self.doing)
        if self.phase:
            parts.append(f"{self.phase} of micro-batch {self.micro_batch}")
        return ", ".join(parts) or self.doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank has published last: where it is, and for how long it has been there.

    `beat` counts its reports. `waits`: its main thread is inside a communication call, so it is
    another rank's fault that it does not move.
    """

    beat: int
    host: str
    pid: int
    unix_s: float = 0.0
    step: int = 0
    at: str = "starting"
    where: str = ""
    waits: bool = False
    stalled_s: float = 0.0
    state: State = "running"
    reason: str = ""

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A rank's last report, and for how long we have seen nothing newer.

    `age_s` is the age of the report by the clocks of two machines: good enough to be shown, not to decide.
    """

    report: Report
    silent_s: float = 0.0
    age_s: float = 0.0


def name_culprits(seen: Mapping[int, Seen], *, timeout_s: float, silent_after_s: float) -> list[str]:
    """Return a phrase for each rank that keeps the others waiting; none while things may still go on.

    Asked by a rank that has not moved for `timeout_s`. It may wait for one that still moves, which is
    slow and not hung: then nobody is named.
    """
    running = {rank: one for rank, one in seen.items() if one.report.state == "running"}
    if failed := [_failed(rank, one) for rank, one in seen.items() if one.report.state == "failed"]:
        return failed
    if silent := [_silent(rank, one) for rank, one in running.items() if one.silent_s >= silent_after_s]:
        return silent
    stuck = {rank: one.report for rank, one in running.items() if one.report.stalled_s >= timeout_s}
    if busy := [_busy(rank, report) for rank, report in stuck.items() if not report.waits]:
        return busy
    if not stuck or len(stuck) < len(running):
        return []
    last = min(stuck, key=lambda rank: (stuck[rank].step, -stuck[rank].stalled_s, rank))
    line = (
        f"all ranks wait for each other (is the network between them broken?), rank {last} furthest behind, "
        f"at {stuck[last].at} in {stuck[last].where}"
    )
    return [line]


def name_missing(seen: Mapping[int, Seen], *, silent_after_s: float) -> list[str]:
    """Return a phrase for each rank that is gone, after a connection to some rank has broken."""
    if failed := [_failed(rank, one) for rank, one in seen.items() if one.report.state == "failed"]:
        return failed
    return [
        f"rank {rank} ({one.report.process}) does not answer any more, last seen at {one.report.at}"
        for rank, one in seen.items()
        if one.report.state == "running" and one.silent_s >= silent_after_s
    ]


def _failed(rank: int, one: Seen) -> str:
    return f"rank {rank} ended at {one.report.at}: {one.report.reason}"


def _silent(rank: int, one: Seen) -> str:
    return (
        f"rank {rank} has not answered for {max(one.silent_s, one.age_s):.0f} s "
        f"({one.report.process} stopped, or the machine gone?), last seen at {one.report.at}"
    )


def _busy(rank: int, report: Report) -> str:
    return f"rank {rank} has been in {report.where} for {report.stalled_s:.0f} s, at {report.at} ({report.process})"


def locate(frame: FrameType | None) -> tuple[str, bool]:
    """Return where a thread is, and whether it waits there for another rank.

    The place is our own innermost function, and what it has called when that is no communication.
    """
    innermost, waits = frame, False
    while frame is not None:
        waits = waits or _communicates(frame)
        if str(frame.f_globals.get("__name__", "")).startswith(f"{_PACKAGE}."):
            break
        frame = frame.f_back
    if frame is None:
        return (_place(innermost) if innermost else "?"), waits
    where = _place(frame)
    if innermost is not None and innermost is not frame and not waits:
        where += f" -> {_place(innermost)}"
    return where, waits


def _communicates(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    if module in _COLLECTIVES:
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    return module.startswith(_WAITERS) and ".wait(" in line


def _place(frame: FrameType) -> str:
    name = frame.f_code.co_qualname.replace("<locals>.", "")
    return f"{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


class LostContactError(UserError):
    """Another rank is gone; this one is well, but cannot go on without it."""

    exit_code = 1


class _Post:
    """The thread that talks to the store, over a connection of its own. It may be stuck there for ever."""

    def __init__(self, connect: Connect, rank: int, world_size: int) -> None:
        self.outgoing = ""
        self.samples = False
        self.verdict: str | None = None
        self.claim: str | None = None
        self.gone: str | None = None
        self.answered_at = self.sampled_since = time.monotonic()
        self._connect, self._rank = connect, rank
        self._keys = [f"{_BEAT}/{other}" for other in range(world_size)]
        self._seen: dict[int, tuple[Report, float]] = {}
        self._kick, self._stopped = threading.Event(), threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog-post", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def exchange(self) -> None:
        """Let the thread talk to the store now."""
        self._kick.set()

    def settle(self, line: str, wait_s: float) -> bool:
        """Put `line` forward as the verdict; return whether this rank is the one to say it.

        It is when it comes first, or when the store does not answer within `wait_s`.
        """
        self.claim = line
        self._kick.set()
        self._settled.wait(wait_s)
        return self.verdict in (None, line)

    def stop(self, wait_s: float) -> None:
        self._stopped.set()
        self._kick.set()
        self._thread.join(wait_s)

    def seen(self) -> dict[int, Seen]:
        now, unix_s = time.monotonic(), time.time()
        return {
            rank: Seen(report=report, silent_s=now - since, age_s=unix_s - report.unix_s)
            for rank, (report, since) in self._seen.copy().items()
        }

    def sampled_s(self) -> float:
        """Return for how long the reports of all ranks have been watched."""
        return time.monotonic() - self.sampled_since if self.samples else 0.0

    def sample(self) -> None:
        """Watch the reports of all ranks from now on."""
        if not self.samples:
            self._seen, self.sampled_since, self.samples = {}, time.monotonic(), True

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self._stopped.is_set():
                self._kick.clear()
                self._talk(store)
                self.answered_at = time.monotonic()
                self._kick.wait()
            self._talk(store)  # the last word
        except (RuntimeError, ValueError, OSError) as error:
            self.gone = first_line(error)
            self._settled.set()

    def _talk(self, store: dist.Store) -> None:
        if self.outgoing:
            store.set(self._keys[self._rank], self.outgoing)
        if self.claim is not None:
            self.verdict = store.compare_set(_VERDICT, "", self.claim).decode()
            self._settled.set()
        elif store.check([_VERDICT]):
            self.verdict = store.get(_VERDICT).decode()
        if self.samples:
            for rank, key in enumerate(self._keys):
                self._look(store, rank, key)

    def _look(self, store: dist.Store, rank: int, key: str) -> None:
        if not store.check([key]):
            return
        report = Report(**json.loads(store.get(key)))
        if rank not in self._seen or self._seen[rank][0].beat != report.beat:
            self._seen[rank] = (report, time.monotonic())


@dataclass(slots=True)
class _Stall:
    """How long the main thread has not moved, by the ticks of the watchdog.

    A tick counts for no more than twice its length: when the whole process has been stopped and goes
    on, or the machine has slept, that time is not held against anybody.
    """

    count: int = -1
    stalled_s: float = 0.0
    last: float = field(default_factory=time.monotonic)

    def tick(self, count: int, interval_s: float) -> float:
        now = time.monotonic()
        self.stalled_s = 0.0 if count != self.count else self.stalled_s + min(now - self.last, 2 * interval_s)
        self.count, self.last = count, now
        return self.stalled_s


class Watchdog:
    """Watches this rank's main thread, which makes it, and with the other ranks' watchdogs the job.

    `connect` returns a new client of the job's store. `leave` is given the line (and whether this rank is the
    one to say it) and does not return: it ends the process. `on_lost_store` is called when the store is gone
    although this rank goes on: its host, the launcher, has died.
    """

    def __init__(
        self,
        progress: Progress,
        connect: Connect,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        leave: Callable[[str, bool], None],
        on_lost_store: Callable[[], None] = lambda: None,
    ) -> None:
        self.progress, self.rank, self.timeout_s = progress, rank, timeout_s
        self.interval_s = min(_INTERVAL_S, timeout_s / _BEATS_A_TIMEOUT)
        self.silent_after_s = max(_LEAST_SILENCE_S, _MISSED_BEATS * self.interval_s)
        self._leave, self._on_lost_store = leave, on_lost_store
        self._main = threading.get_ident()
        self._stall = _Stall()
        self._report = Report(beat=0, host=socket.gethostname(), pid=os.getpid())
        self._post = _Post(connect, rank, world_size)
        self._stopped = threading.Event()
        self._has_lost_store = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._post.start()
        self._publish()
        self._thread.start()
        return self

    def stop(self, state: State = "ended", reason: str = "") -> None:
        """Say how this rank ends, and stop watching."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_S)
        self._publish(state, reason)
        self._post.stop(_LAST_WORDS_S)

    def explain_lost_contact(self, error: BaseException) -> str:
        """Return a line about a connection that broke: where this rank was, and which ranks are gone.

        A dead rank is known by its silence, so this takes as many seconds as a rank may be silent.
        """
        self._stopped.set()  # this rank ends: its own standstill is no news any more
        self._thread.join(_LAST_WORDS_S)
        where = str(self.progress)
        self._publish("lost contact", first_line(error))
        self._post.sample()
        deadline = time.monotonic() + self.silent_after_s + 2 * self.interval_s
        while time.monotonic() < deadline and self._post.gone is None:
            self._publish("lost contact", first_line(error))
            time.sleep(self.interval_s / 2)
            if self._post.verdict is not None:
                self._leave(self._post.verdict, False)
            if any(one.report.state == "failed" for one in self._post.seen().values()):
                break
        line = f"lost contact in {where}: {first_line(error)}"
        missing = name_missing(self._post.seen(), silent_after_s=self.silent_after_s)
        if self._post.gone is not None:
            missing = [
                f"the host of the job's store (torchrun on the first machine, or rank 0) is gone: {self._post.gone}"
            ]
        return "; ".join([line, *missing])

    def _publish(self, state: State = "running", reason: str = "") -> None:
        with self._lock:
            where, waits = locate(sys._current_frames().get(self._main))
            self._report = replace(
                self._report,
                beat=self._report.beat + 1,
                unix_s=time.time(),
                step=self.progress.step,
                at=str(self.progress),
                where=where,
                waits=waits,
                stalled_s=round(self._stall.stalled_s, 1),
                state=state,
                reason=reason,
            )
            self._post.outgoing = json.dumps(asdict(self._report))
        self._post.exchange()

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval_s):
            stalled_s = self._stall.tick(self.progress.count, self.interval_s)
            self._publish()
            if self._post.verdict is not None:
                self._leave(self._post.verdict, False)
            if self._post.gone is not None and not self._has_lost_store:
                self._has_lost_store = True
                self._on_lost_store()
            if stalled_s >= self.timeout_s - self.silent_after_s - 2 * self.interval_s:
                self._post.sample()
            else:
                self._post.samples = False
            if stalled_s >= self.timeout_s:
                self._judge(stalled_s)

    def _judge(self, stalled_s: float) -> None:
        """End the job if somebody is to blame for the standstill."""
        silence_s = time.monotonic() - self._post.answered_at
        if self._post.gone is not None or silence_s >= self.silent_after_s + self.interval_s:
            why = self._post.gone or f"it has not answered for {silence_s:.0f} s"
            culprits = [f"the job's store, which torchrun on the first machine or rank 0 holds, is out of reach: {why}"]
        elif self._post.sampled_s() < self.silent_after_s + self.interval_s:
            return
        else:
            culprits = name_culprits(self._post.seen(), timeout_s=self.timeout_s, silent_after_s=self.silent_after_s)
        if not culprits:
            return
        line = (
            f"rank {self.rank} ends the job, in which nothing has moved for {stalled_s:.0f} s: {'; '.join(culprits)}. "
            "Go on with --resume, or with a longer --timeout if it was only slow"
        )
        speaks = self._post.settle(line, _LAST_WORDS_S)
        self._leave(self._post.verdict or line, speaks)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the source lines and the banter of gloo."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if line.startswith("[") and "] " in line:
        line = line.split("] ", maxsplit=1)[1]
    line = line.split(". This is typically caused", maxsplit=1)[0]
    return line.encode("ascii", "replace").decode()[:200]
