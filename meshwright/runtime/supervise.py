"""Do a rank's work in a job under the eye of the watchdog: when it breaks, it ends soon and in one line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.runtime.launch import connect, join, launcher_speaks, leave, note_end
from meshwright.runtime.watchdog import LostContactError, Progress, Watchdog, first_line

T = TypeVar("T")
TIMEOUT_S = 600
_LAST_WORDS_S = 5.0
_LOST_CONTACT = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
# The watchdog ends a hung job after one time limit. Communication itself gives up much later, so that a rank may wait
# for one that moves on, say by tokenising, and so that the watchdog's line comes first.
_BACKSTOP_TIMEOUTS = 10


class RunError(UserError):
    """Something outside of the program has ended the run."""

    exit_code = 1


def supervised(
    work: Callable[[torch.device, Progress], T],
    backend: Literal["cpu", "cuda"],
    *,
    timeout_s: int = TIMEOUT_S,
    terms: Mapping[str, str] | None = None,
    on_lost_store: Callable[[], None] | None = None,
) -> T:
    """Join the job, do `work`, leave, and return what it returned.

    `work` marks its progress; when nothing moves for `timeout_s`, the watchdog ends the job and names
    the rank to blame. What went wrong in the world (memory, disks, other ranks) is raised as a
    UserError of one line. `on_lost_store` is called when the job's launcher is gone (default: end).
    """
    device = join(backend, timeout_s=_BACKSTOP_TIMEOUTS * timeout_s, terms=terms)
    progress = Progress()
    watchdog = Watchdog(
        progress,
        connect,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=timeout_s,
        leave=_leave_at_once,
        on_lost_store=on_lost_store or _end_alone,
    ).start()
    try:
        result = work(device, progress)
    except Exception as error:
        failure = _tell(error, progress, watchdog)
        leave(failed=True)
        if failure is error:
            raise
        raise failure from None
    progress.begin("leaving")
    leave()
    watchdog.stop()
    return result


def _end_alone() -> None:
    """End this process: the launcher, which held the job's store, is gone."""
    os.write(2, b"error: the job's launcher is gone\n")
    os._exit(1)


def _leave_at_once(line: str, is_first: bool) -> None:
    """End this process, whatever its main thread is in. Called by the watchdog."""
    limit = threading.Timer(_LAST_WORDS_S, os._exit, (1,))  # should the last words not come out
    limit.daemon = True
    limit.start()
    note_end(line, "said")
    if is_first:
        os.write(2, f"error: {line}\n".encode())
    os._exit(1)


def _tell(error: Exception, progress: Progress, watchdog: Watchdog) -> Exception:
    """Tell the other ranks and the launcher how this one ends; return the error to raise.

    Anything that is not the world's fault is a bug, and keeps its traceback.
    """
    if is_lost_contact(error):
        there = f"lost contact in {progress}: {first_line(error)}"
        line = there if launcher_speaks() else watchdog.explain_lost_contact(error)
        note_end(line, "lost contact")
        watchdog.stop("lost contact", line)
        return LostContactError(line)
    failure: Exception = error
    if is_out_of_memory(error):
        failure = RunError(f"out of memory in {progress}: {first_line(error)}; plan with a smaller --memory")
    elif isinstance(error, OSError):
        failure = RunError(f"{progress}: {first_line(error)}")
    if isinstance(failure, UserError):
        reason = str(failure)
        note_end(reason, "said")
    else:
        reason = f"{type(error).__name__}: {first_line(error)}"
    watchdog.stop("failed", reason)
    return failure


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an error means that another rank, or the store of the job, is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_CONTACT)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
