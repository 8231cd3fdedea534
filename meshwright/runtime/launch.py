"""Start the ranks of a job on this machine, and join a job that was started, here or by torchrun."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.runtime.watchdog import first_line

Cause = Literal["said", "unsaid", "lost contact"]

_USER_ERROR = 2
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 600
MEETING_TIMEOUT_S = 60
_HERE, _CLAIM, _TROUBLE = "here", "claim", "trouble"
_POLL_S = 0.05
_GRACE_S = 10.0  # between asking a rank to end and ending it: for one that is still telling why it failed
_PATIENCE_S = 5.0  # for the rank that broke to end, after others have noticed
_LINGER_S = 3.0  # that the host of the store stays, so that others read there why the job does not start
_LAUNCHER = "MESHWRIGHT_LAUNCHER"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun shows what a rank writes there
STOPPED = {128 + number: signal.Signals(number) for number in (signal.SIGTERM, signal.SIGINT)}
_LISTENED_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# For ranks that share a machine, unless the user has set them.
LOCAL_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
if sys.platform == "linux":
    LOCAL_ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"


def launch_local(num_ranks: int, arguments: list[str]) -> int:
    """Run `python -m meshwright <arguments>` as `num_ranks` ranks on this machine; return the exit code.

    0 when all ended well, 2 when a rank refused its input (it has said why), 1 when a rank broke;
    then its number and how it ended are printed, unless it has said why. SIGTERM or Ctrl-C is passed
    on: the ranks save and end, and the code is 128 + the signal's number; a second Ctrl-C ends
    them at once.

    The launcher holds the job's store, so that it outlives any rank. Not torchrun, because that gives
    a stopped rank half a minute to end, and one that saves no longer than that.
    """
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as notes:
        ranks = _Ranks(num_ranks, Path(notes))
        handlers = {number: signal.signal(number, ranks.on_signal) for number in _LISTENED_TO}
        try:
            ranks.start(arguments, store.port)
            return ranks.wait()
        finally:
            ranks.end(0.0)
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _Ranks:
    """The processes of a job on this machine."""

    def __init__(self, num_ranks: int, notes: Path) -> None:
        self._notes = [notes / f"rank-{rank}.json" for rank in range(num_ranks)]
        self._asked: signal.Signals | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: list[str], port: int) -> None:
        for rank, note in enumerate(self._notes):
            if self._asked is not None:
                break
            environment = {
                **os.environ,
                _LAUNCHER: "local",
                _ERROR_FILE: str(note),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(self._notes)),
                "LOCAL_WORLD_SIZE": str(len(self._notes)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            command = [sys.executable, "-m", "meshwright", *arguments]
            # A session of their own: Ctrl-C in a terminal reaches them through the launcher only, once.
            self._processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if self._asked is not None:  # while one was being started, which has not heard of it then
            self._send(signal.SIGTERM)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Pass the first signal on as SIGTERM, which all ranks end by; at a Ctrl-C after that end them at once."""
        if self._asked is None:
            self._asked = signal.Signals(number)
            self._send(signal.SIGTERM)
        elif number == signal.SIGINT:
            self._send(signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of all ranks, which follows soon once one has failed; return the exit code."""
        lost_at = None
        while any(code is None for code in self._codes()):
            failed = self._failed()
            only_lost = all(self._cause(rank)[0] == "lost contact" for rank in failed)
            if failed and not only_lost:
                break
            if failed:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > _PATIENCE_S:
                    break
            time.sleep(_POLL_S)
        failed = self._failed()
        self.end(_GRACE_S)
        return self._explain(failed) if failed else self._explain_stop()

    def end(self, grace_s: float) -> None:
        """End what still runs: by SIGTERM, after `grace_s` by SIGKILL, which also ends a stopped process."""
        deadline = time.monotonic() + grace_s
        if grace_s:
            self._send(signal.SIGTERM)
        while time.monotonic() < deadline and any(code is None for code in self._codes()):
            time.sleep(_POLL_S)
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _failed(self) -> list[int]:
        was_asked = {None, 0, *STOPPED} | ({-signal.SIGTERM, -signal.SIGKILL} if self._asked else set())
        return [rank for rank, code in enumerate(self._codes()) if code not in was_asked]

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _cause(self, rank: int) -> tuple[Cause, str]:
        """Return what the rank has noted about its end: whether its user has been told, and a line."""
        try:
            note = json.loads(self._notes[rank].read_text())
        except (OSError, ValueError):
            return "unsaid", ""
        return note["cause"], note["message"]["message"]

    def _explain(self, failed: list[int]) -> int:
        """Tell what the first rank that failed has not told itself. One that only lost contact is no cause."""
        rank = min(failed, key=lambda rank: (self._cause(rank)[0] == "lost contact", rank))
        code = self._processes[rank].returncode
        cause, line = self._cause(rank)
        if cause == "lost contact":
            sys.stderr.write(f"error: rank {rank}: {line}\n")
        elif cause == "unsaid" and code != _USER_ERROR:
            sys.stderr.write(f"error: rank {rank} {_how_it_ended(code)}; the other ranks were stopped\n")
        return _USER_ERROR if code == _USER_ERROR else 1

    def _explain_stop(self) -> int:
        """Return 0 when all ranks have ended well, else the code of the signal that stopped them."""
        codes = [process.returncode for process in self._processes]
        if len(codes) == len(self._notes) and not any(codes):
            return 0
        asked = self._asked or next(STOPPED[code] for code in codes if code in STOPPED)
        sys.stderr.write(f"stopped by {asked.name}\n")
        return 128 + asked


def check_devices(backend: Literal["cpu", "cuda"], num_ranks: int) -> None:
    """Raise UserError unless this machine has a GPU for each of `num_ranks` ranks that need one."""
    if backend == "cuda" and torch.cuda.device_count() < num_ranks:
        raise UserError(f"local: {num_ranks} ranks need a GPU each, but torch finds {torch.cuda.device_count()} here")


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def launcher_speaks() -> bool:
    """Return whether `launch_local` started this rank: then it names the rank that is gone."""
    return os.environ.get(_LAUNCHER) == "local"


def note_end(line: str, cause: Cause) -> None:
    """Leave a line about this rank's end for the launcher, torchrun or our own. Does its best, and never raises."""
    path = os.environ.get(_ERROR_FILE)
    if path is None or Path(path).exists():
        return
    try:
        # In torch.distributed.elastic's own format, but for `cause`.
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message, "cause": cause}))
    except OSError:
        return


def check_world_size(num_ranks: int) -> None:
    """Raise UserError unless this process was started as one of `num_ranks` ranks."""
    _, world_size = _rank_and_world_size()
    if world_size != num_ranks:
        raise UserError(f"num_devices: the plan is for {num_ranks} ranks, but {world_size} were started")


def join(
    backend: Literal["cpu", "cuda"], *, timeout_s: int = _TIMEOUT_S, terms: Mapping[str, str] | None = None
) -> torch.device:
    """Join the job that a launcher started and return this rank's device (gloo on CPUs, nccl on GPUs).

    `terms` (such as the hash of the plan) must be the same on all ranks, or UserError names those that differ.
    """
    rank, world_size = _rank_and_world_size()
    device = torch.device("cpu")
    if backend == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
            raise UserError(f"cluster: has GPUs, but torch finds none for local rank {local_rank} here")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    store = _meet(terms or {})
    try:
        dist.init_process_group(
            "nccl" if backend == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (dist.DistError, RuntimeError) as error:
        raise NetworkError(
            f"network: rank {rank} cannot connect to the others ({first_line(error)}); "
            f"{_interfaces()}meshwright doctor looks into it"
        ) from None
    return device


class NetworkError(UserError):
    """The ranks found each other's store, but cannot talk to each other."""

    on_every_rank = True


def _interfaces() -> str:
    """Return which network interface the ranks were told to use, if any."""
    names = [
        f"{name} is {os.environ[name]!r}" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ
    ]
    return "".join(f"{name}; " for name in names)


def connect() -> dist.Store:
    """Return a new connection to the store of the job that this rank belongs to."""
    host, port = _address()
    store = dist.TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=MEETING_TIMEOUT_S), wait_for_workers=False
    )
    return _own_part(store)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignIn:
    """What a rank says of itself when it comes. `terms` are what all ranks must agree in, by name."""

    host: str
    pid: int
    world_size: int
    terms: dict[str, str] = field(default_factory=dict)

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self.host}"


def find_mismatch(sign_ins: Mapping[int, SignIn]) -> str | None:
    """Return a line that names ranks which were started for another job than most, or None."""
    sizes = {rank: str(one.world_size) for rank, one in sign_ins.items()}
    if found := _minority(sizes):
        usual, other = found
        return (
            f"WORLD_SIZE: {_name(other, sign_ins)} was started with WORLD_SIZE {sizes[other]}, "
            f"but rank {usual} with {sizes[usual]}; start all ranks of a job with the same"
        )
    for name in {name: None for one in sign_ins.values() for name in one.terms}:
        if found := _minority({rank: one.terms.get(name, "") for rank, one in sign_ins.items()}):
            usual, other = found
            return (
                f"{name}: {_name(other, sign_ins)} was started with another {name} than {_name(usual, sign_ins)}; "
                f"give all ranks the same"
            )
    return None


def _minority(values: Mapping[int, str]) -> tuple[int, int] | None:
    """Return a rank with the most common value (of several, that of the lowest rank) and one with another."""
    counts = Counter(values.values())
    usual = min(values, key=lambda rank: (-counts[values[rank]], rank), default=None)
    if usual is None or len(counts) == 1:
        return None
    return usual, min(rank for rank in values if values[rank] != values[usual])


def _name(rank: int, sign_ins: Mapping[int, SignIn]) -> str:
    return f"rank {rank} ({sign_ins[rank].process})"


def _meet(terms: Mapping[str, str]) -> dist.Store:
    """Return the store of the job once every rank has signed in; name those who have not in time, or do not fit."""
    rank, world_size = _rank_and_world_size()
    is_host = _is_host(rank)
    mine = SignIn(host=socket.gethostname(), pid=os.getpid(), world_size=world_size, terms=dict(terms))
    store = _open_store(is_host, mine)
    try:
        _sign_in(store, rank, mine)
        _await_all(store, world_size)
    except UserError:
        if is_host:
            time.sleep(_LINGER_S)
        raise
    return store


def _is_host(rank: int) -> bool:
    """Return whether this rank holds the job's store: the first does, unless the launcher (torchrun or ours) does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _open_store(is_host: bool, mine: SignIn) -> dist.Store:
    host, port = _address()
    try:
        patience = timedelta(seconds=MEETING_TIMEOUT_S)
        return _own_part(dist.TCPStore(host, port, is_master=is_host, timeout=patience, wait_for_workers=False))
    except (dist.DistError, ValueError, OSError) as error:
        if is_host:
            _refuse_second_host(mine)
        raise UserError(
            f"MASTER_ADDR: rank {os.environ['RANK']} cannot {'listen on' if is_host else 'reach'} {host}:{port} "
            f"({first_line(error)}); is the port free, and is rank 0 started on that host?"
        ) from None


def _refuse_second_host(mine: SignIn) -> None:
    """Raise UserError when the address is taken by another rank 0 of this job."""
    host, port = _address()
    try:
        brief = timedelta(seconds=_LINGER_S)
        store = _own_part(dist.TCPStore(host, port, is_master=False, timeout=brief, wait_for_workers=False))
        _sign_in(store, 0, mine)
    except (dist.DistError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise


def _sign_in(store: dist.Store, rank: int, mine: SignIn) -> None:
    if store.add(f"{_CLAIM}/{rank}", 1) > 1:
        try:
            first = SignIn(**json.loads(store.get(f"{_HERE}/{rank}"))).process
        except (dist.DistError, ValueError):
            first = "another process"
        line = f"RANK: {first} and {mine.process} were both started as rank {rank}; give each rank its own number"
        store.set(_TROUBLE, line)
        raise UserError(line)
    store.set(f"{_HERE}/{rank}", json.dumps(asdict(mine)))


def _await_all(store: dist.Store, world_size: int) -> None:
    """Wait for the others, one after the other, and compare them as they come."""
    sign_ins: dict[int, SignIn] = {}
    missing: list[int] = []
    deadline = time.monotonic() + MEETING_TIMEOUT_S
    for other in range(world_size):
        key = f"{_HERE}/{other}"
        while not (is_here := store.check([key])) and time.monotonic() < deadline:
            _raise_trouble(store)
            time.sleep(_POLL_S)
        if not is_here:
            missing.append(other)
            continue
        sign_ins[other] = SignIn(**json.loads(store.get(key)))
        if line := find_mismatch(sign_ins):
            store.set(_TROUBLE, line)
            raise UserError(line)
    _raise_trouble(store)
    if missing:
        host, port = _address()
        raise UserError(
            f"ranks {', '.join(map(str, missing))} of {world_size} have not signed in at {host}:{port} within "
            f"{MEETING_TIMEOUT_S} s; are they started, and do their hosts reach that address?"
        )


def _raise_trouble(store: dist.Store) -> None:
    if store.check([_TROUBLE]):
        raise UserError(store.get(_TROUBLE).decode())


def _own_part(store: dist.Store) -> dist.Store:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"meshwright/{attempt}", store)


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def leave(*, failed: bool = False) -> None:
    """Leave the job. After a failure this is bounded in time, and the store stays for a moment, for the others to read.

    What they read there is which rank failed and why.
    """
    if not failed:
        gc.collect()  # cycles that hold a group would end it after its threads, which aborts the process
        dist.destroy_process_group()
        return
    limit = threading.Timer(_GRACE_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    dist.destroy_process_group()
    if _is_host(int(os.environ["RANK"])):
        time.sleep(_LINGER_S)
    limit.cancel()


def _rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks, or raise UserError when a launcher has not said them well."""
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: start the ranks with torchrun, or with --local N on this machine"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise UserError(f"{name}: must be a whole number, not {os.environ[name]!r}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(f"RANK: must be below WORLD_SIZE ({world_size}), not {rank}")
    return rank, world_size
