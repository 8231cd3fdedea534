"""What doctor looks at beside torch: the network that ranks meet over, and the machine that they share."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshwright.errors import UserError
from meshwright.files import check_writable
from meshwright.units import GiB, show_bytes

T = TypeVar("T")
_PATIENCE_S = 3.0
_DEFAULT_PORT = 29500  # torchrun's
_LARGEST_PORT = (1 << 16) - 1
_FEW_FILES = 1024  # sockets of each rank to each other, shards, the token file
_MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `ok`: training can work as it is; a `remedy` then says what would be better."""

    what: str
    state: str
    ok: bool
    remedy: str = ""


def interfaces() -> Iterator[Finding]:
    """Check that the interfaces named in the environment exist here, and that this host knows itself by name."""
    here = [name for _, name in socket.if_nameindex()]
    gloo, nccl = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")
    if gloo is not None:
        missing = [name for name in gloo.split(",") if name not in here]
        yield _interface("GLOO_SOCKET_IFNAME", gloo, here, exists=not missing)
    if nccl is not None:
        yield _interface("NCCL_SOCKET_IFNAME", nccl, here, exists=_nccl_finds(nccl, here))
    if not gloo:
        yield _host_name(here)


def _interface(variable: str, value: str, here: list[str], *, exists: bool) -> Finding:
    if exists:
        return Finding(what=variable, state=value, ok=True)
    return Finding(
        what=variable,
        state=f"{value!r} is no network interface of this machine",
        ok=False,
        remedy=f"unset {variable}, or set it to one of {', '.join(here)}",
    )


def _nccl_finds(value: str, here: list[str]) -> bool:
    """Return whether NCCL's list of prefixes (^ excludes them, = asks for whole names) leaves an interface."""
    names = tuple(value.lstrip("^=").split(","))
    if value.startswith("="):
        return any(name in names for name in here)
    return any(name.startswith(names) != value.startswith("^") for name in here)


def _host_name(here: list[str]) -> Finding:
    """Gloo listens on the address of the host's own name, when no interface is set."""
    name = socket.gethostname()
    address = within(_PATIENCE_S, lambda: socket.gethostbyname(name))
    if address is not None and _is_here(address):
        return Finding(what="host name", state=f"{name} is {address}", ok=True)
    return Finding(
        what="host name",
        state=f"{name} does not resolve" if address is None else f"{name} resolves to {address}, which is not here",
        ok=True,
        remedy="ranks on several machines would not meet: set GLOO_SOCKET_IFNAME to the network between them, "
        f"one of {', '.join(here)}",
    )


def meeting_point(port: int | None) -> Iterator[Finding]:
    """Check the address at which ranks meet: free when it is here, within reach when it is elsewhere.

    Nothing is said when neither `port` nor the environment names one; the launcher then chooses.
    """
    host, given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if port is None and given is not None:
        if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= _LARGEST_PORT:
            remedy = f"set it to a number from 1 to {_LARGEST_PORT}, or unset it"
            yield Finding(what="MASTER_PORT", state=f"{given!r} is not a port", ok=False, remedy=remedy)
            return
        port = int(given)
    address = None if host is None else within(_PATIENCE_S, lambda: socket.gethostbyname(host))
    if host is not None and address is None:
        remedy = "correct MASTER_ADDR, or make the name known (DNS, /etc/hosts)"
        yield Finding(what="MASTER_ADDR", state=f"{host} does not resolve", ok=False, remedy=remedy)
    elif address is not None and not _is_here(address):
        yield _reach(f"{host}", address, port or _DEFAULT_PORT)
    elif port is not None:
        yield _port_here(port)


def _port_here(port: int) -> Finding:
    """Try to hold the port as rank 0 would."""
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((anywhere, port))
                probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = f"choose another MASTER_PORT, or stop what holds it (ss -ltnp 'sport = :{port}')"
                return Finding(what="port", state=f"{port} is in use here", ok=False, remedy=remedy)
            if error.errno == errno.EACCES:
                remedy = "choose a MASTER_PORT above 1023"
                return Finding(what="port", state=f"{port} is not for this user", ok=False, remedy=remedy)
            # What is left is a family that this machine does not have.
    return Finding(what="port", state=f"{port} is free here", ok=True)


def _reach(host: str, address: str, port: int) -> Finding:
    where = f"{host}:{port}"
    try:
        socket.create_connection((address, port), timeout=_PATIENCE_S).close()
    except ConnectionRefusedError:
        return Finding(what="MASTER_ADDR", state=f"{host} answers; nothing listens on {port} yet", ok=True)
    except OSError as error:
        cause = error.strerror or f"no answer in {_PATIENCE_S:g} s"
        remedy = "is that host up, and does a firewall let this port through?"
        return Finding(what="MASTER_ADDR", state=f"{where} cannot be reached: {cause}", ok=False, remedy=remedy)
    return Finding(what="MASTER_ADDR", state=f"{where} answers", ok=True)


def _is_here(address: str) -> bool:
    """Return whether `address` is one of this machine: only such can be bound."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def machine(run_dir: Path) -> Iterator[Finding]:
    """Look at cores, memory, threads, open files, and the disk of the run folder."""
    cores = len(os.sched_getaffinity(0))
    memory = dict(line.split(":") for line in _MEMORY_INFO.read_text().splitlines()) if _MEMORY_INFO.exists() else {}
    free = int(memory.get("MemAvailable", "0 kB").split()[0]) * 1024
    shown = f", {show_bytes(free)} of memory free" if free else ""
    yield Finding(what="machine", state=f"{cores} cores{shown}", ok=True)
    threads = os.environ.get("OMP_NUM_THREADS")
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if threads is None and ranks != "1":
        state = f"not set: each of {ranks} ranks starts a thread a core"
        remedy = "export OMP_NUM_THREADS=1 (torchrun and --local do), or cores over ranks"
        yield Finding(what="OMP_NUM_THREADS", state=state, ok=True, remedy=remedy)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < _FEW_FILES
    yield Finding(what="open files", state=f"at most {files}", ok=True, remedy="ulimit -n 4096" if few else "")
    yield _disk(run_dir)


def _disk(run_dir: Path) -> Finding:
    try:
        check_writable(run_dir / "metrics.jsonl")
        folder = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
    except (UserError, OSError) as error:
        return Finding(what="run folder", state=str(error), ok=False, remedy="choose another --run-dir")
    short = free < GiB
    remedy = "a checkpoint takes 12 bytes a parameter: free some space or choose another --run-dir" if short else ""
    return Finding(what="run folder", state=f"{show_bytes(free)} free for {run_dir}", ok=True, remedy=remedy)


def within(seconds: float, question: Callable[[], T]) -> T | None:
    """Return the answer, or None when it fails or is not there in time: a name server may be silent for minutes."""
    answers: list[T] = []

    def ask() -> None:
        try:
            answers.append(question())
        except OSError:
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None
