"""Who is named when nothing moves, and that two watchdogs agree on it. With real ranks: test_faults.py."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from meshwright.runtime import pipeline
from meshwright.runtime.data import TokenDataset
from meshwright.runtime.watchdog import (
    Progress,
    Report,
    Seen,
    Watchdog,
    _Stall,
    first_line,
    locate,
    name_culprits,
    name_missing,
)

TIMEOUT_S, SILENT_AFTER_S = 30.0, 5.0
GLOO = (
    "[/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17068. "
    "This is typically caused by a remote worker crashing. Check the logs! \U0001f3d6"
)


def seen(silent_s: float = 0.5, **fields: Any) -> Seen:
    report = Report(
        **({"beat": 9, "host": "host", "pid": 7, "step": 4, "at": "step 4", "where": "f (a.py:1)"} | fields)
    )
    return Seen(report=report, silent_s=silent_s)


def waits(stalled_s: float = 31.0, **fields: Any) -> Seen:
    return seen(waits=True, stalled_s=stalled_s, **fields)


def culprits(*ranks: Seen) -> list[str]:
    return name_culprits(dict(enumerate(ranks)), timeout_s=TIMEOUT_S, silent_after_s=SILENT_AFTER_S)


def test_a_silent_rank_is_named_whatever_the_others_do():
    silent = seen(25.0, at="step 4, forward of micro-batch 2")
    (line,) = culprits(waits(), silent, seen(stalled_s=40.0))
    assert line == (
        "rank 1 has not answered for 25 s (process 7 on host stopped, or the machine gone?), "
        "last seen at step 4, forward of micro-batch 2"
    )
    assert len(culprits(silent, waits(), silent)) == 2


def test_the_silence_is_shown_as_long_as_the_clocks_say():
    """It has been watched for the last seconds only."""
    (line,) = culprits(waits(), Seen(report=seen().report, silent_s=6.0, age_s=31.0))
    assert "has not answered for 31 s" in line


def test_a_rank_outside_of_communication_is_named():
    stuck = seen(stalled_s=31.4, where="TokenDataset.batch (data.py:242)", at="step 5, forward of micro-batch 0")
    (line,) = culprits(waits(), stuck, waits())
    assert line == (
        "rank 1 has been in TokenDataset.batch (data.py:242) for 31 s, "
        "at step 5, forward of micro-batch 0 (process 7 on host)"
    )


def test_a_rank_that_still_moves_is_waited_for():
    assert not culprits(waits(), seen(stalled_s=3.0))
    assert not culprits(waits(), waits(3.0))


def test_when_all_wait_the_one_that_is_furthest_behind_is_named():
    (line,) = culprits(waits(step=5), waits(step=4, stalled_s=33.0, at="step 4, backward of micro-batch 1"), waits())
    assert "all ranks wait for each other" in line
    assert "rank 1 furthest behind, at step 4, backward of micro-batch 1 in f (a.py:1)" in line


def test_a_rank_that_has_failed_is_named_with_its_reason():
    failed = seen(60.0, state="failed", reason="data: no such file")
    ended = seen(60.0, state="ended")
    for name in (culprits, lambda *ranks: name_missing(dict(enumerate(ranks)), silent_after_s=SILENT_AFTER_S)):
        assert name(waits(), failed, ended, seen(25.0)) == ["rank 1 ended at step 4: data: no such file"]


def test_after_a_lost_connection_the_silent_are_missing():
    found = name_missing({0: waits(), 1: seen(6.0), 2: seen(60.0, state="lost contact")}, silent_after_s=SILENT_AFTER_S)
    assert found == ["rank 1 (process 7 on host) does not answer any more, last seen at step 4"]


def test_progress_reads_like_a_place():
    progress = Progress()
    assert str(progress) == "starting"
    progress.begin("training", 12)
    assert str(progress) == "step 12"
    progress.at("forward", 3)
    assert str(progress) == "step 12, forward of micro-batch 3"
    progress.begin("saving a checkpoint")
    assert str(progress) == "step 12, saving a checkpoint"
    assert progress.count == 3


def test_gloo_is_cut_short():
    assert first_line(RuntimeError(GLOO)) == "Connection closed by peer [127.0.0.1]:17068"
    assert first_line(ValueError()) == "ValueError"


def test_time_in_which_the_whole_process_stood_still_is_not_held_against_it():
    stall = _Stall()
    stall.tick(1, 0.01)
    stall.last -= 100
    assert stall.tick(1, 0.01) == pytest.approx(0.02)
    assert stall.tick(2, 0.01) == 0.0


@contextmanager
def caught_in(target: Callable[[], object], release: Callable[[], object]) -> Iterator[FrameType]:
    """Run `target` in a thread until it hangs, and give its innermost frame."""
    thread = threading.Thread(target=target)
    thread.start()
    time.sleep(0.3)
    try:
        yield sys._current_frames()[thread.ident or 0]
    finally:
        release()
        thread.join()


def test_a_wait_for_a_neighbour_is_communication():
    done = threading.Event()

    class Work:
        def wait(self) -> None:
            done.wait()

    with caught_in(lambda: pipeline._wait([(Work(), None)]), done.set) as frame:  # type: ignore[list-item]
        where, is_waiting = locate(frame)
    assert is_waiting
    assert where.startswith("_wait (pipeline.py:")


def test_a_read_that_does_not_return_is_no_communication():
    done = threading.Event()

    class Disk:
        def __getitem__(self, _: slice) -> Any:
            done.wait()
            return np.zeros(5, np.int64)

    data = TokenDataset(np.zeros(100, np.uint16), seq_len=4)
    data._tokens = Disk()  # type: ignore[assignment]
    data._window = lambda index: 0  # type: ignore[method-assign]
    with caught_in(lambda: data.batch(0, 1), done.set) as frame:
        where, is_waiting = locate(frame)
    assert not is_waiting
    assert where.startswith("TokenDataset.batch (windows.py:")
    assert " -> Condition.wait (threading.py:" in where


def test_watchdogs_find_the_rank_that_stands_and_one_of_them_says_so():
    """Two ranks as threads: one waits for the other, which computes for ever."""
    store, done = dist.HashStore(), threading.Event()
    lines: dict[int, tuple[str, bool]] = {}

    class Work:
        def wait(self) -> None:
            done.wait()

    def rank(number: int, stand: Callable[[], object]) -> None:
        def leave(line: str, speaks: bool) -> None:
            lines[number] = (line, speaks)
            done.wait()  # the real one ends the process

        watchdog = Watchdog(Progress(), lambda: store, rank=number, world_size=2, timeout_s=3, leave=leave)
        watchdog.start()
        stand()
        watchdog.stop()

    threads = [
        threading.Thread(target=rank, args=(0, lambda: pipeline._wait([(Work(), None)]))),  # type: ignore[list-item]
        threading.Thread(target=rank, args=(1, done.wait)),
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(lines) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    assert {line for line, _ in lines.values()} == {lines[0][0]}
    assert sorted(speaks for _, speaks in lines.values()) == [False, True]
    assert "rank 1 has been in " in lines[0][0]
    assert "rank 0 has been" not in lines[0][0]


def test_a_watchdog_says_nothing_while_there_is_progress():
    store, progress, lines = dist.HashStore(), Progress(), []
    watchdog = Watchdog(
        progress, lambda: store, rank=0, world_size=1, timeout_s=1, leave=lambda line, _: lines.append(line)
    ).start()
    for step in range(30):
        progress.begin("training", step)
        time.sleep(0.1)
    watchdog.stop()
    assert not lines
    assert b'"state": "ended"' in store.get("beat/0")


def test_a_store_that_is_gone_is_reported_once():
    calls: list[int] = []

    def refuse() -> dist.Store:
        raise dist.DistNetworkError("gone")

    watchdog = Watchdog(
        Progress(),
        refuse,
        rank=0,
        world_size=2,
        timeout_s=3,
        leave=lambda *_: None,
        on_lost_store=lambda: calls.append(1),
    ).start()
    time.sleep(1.2)
    watchdog.stop()
    assert calls == [1]
    assert "is gone: gone" in watchdog.explain_lost_contact(RuntimeError(GLOO))
