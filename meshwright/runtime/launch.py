"""Start the ranks of a job on this machine through torch's own launcher, and join a job that was started."""

from __future__ import annotations

import logging
import os
import signal
import sys
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.errors import UserError

_USER_ERROR = 2
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 600
MEETING_TIMEOUT_S = 60
_HERE = "here"
# For ranks that share a machine, unless the user has set them.
LOCAL_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
if sys.platform == "linux":
    LOCAL_ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"


def launch_local(num_ranks: int, arguments: list[str]) -> int:
    """Run `python -m meshwright <arguments>` as `num_ranks` ranks on this machine; return the exit code.

    0 when all ended well, 2 when a rank refused its input (it has said why), 1 when a rank broke;
    then its number and exit code are printed.
    """
    for name, value in LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="meshwright",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "meshwright", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == _USER_ERROR:
            return _USER_ERROR
        sys.stderr.write(f"error: rank {rank} {_how_it_ended(failure.exitcode)}; the other ranks were stopped\n")
        return 1
    except SignalException as stopped:
        # The ranks have been told, have saved, and are gone.
        sys.stderr.write(f"stopped by {signal.Signals(stopped.sigval).name}\n")
        return 128 + stopped.sigval
    return 0


def check_devices(backend: Literal["cpu", "cuda"], num_ranks: int) -> None:
    """Raise UserError unless this machine has a GPU for each of `num_ranks` ranks that need one."""
    if backend == "cuda" and torch.cuda.device_count() < num_ranks:
        raise UserError(f"local: {num_ranks} ranks need a GPU each, but torch finds {torch.cuda.device_count()} here")


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def check_world_size(num_ranks: int) -> None:
    """Raise UserError unless this process was started as one of `num_ranks` ranks."""
    _check_started()
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != num_ranks:
        raise UserError(f"num_devices: the plan is for {num_ranks} ranks, but {world_size} were started")


def join(backend: Literal["cpu", "cuda"], *, timeout_s: int = _TIMEOUT_S) -> torch.device:
    """Join the job that a launcher started and return this rank's device (gloo on CPUs, nccl on GPUs)."""
    _check_started()
    device = torch.device("cpu")
    if backend == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
            raise UserError(f"cluster: has GPUs, but torch finds none for local rank {local_rank} here")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if backend == "cuda" else "gloo",
        store=_meet(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    return device


def _meet() -> dist.Store:
    """Return the store of the job once every rank has signed in; name those who have not in time."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"{host}:{port}"
    patience = timedelta(seconds=MEETING_TIMEOUT_S)
    # torchrun's agent may hold the store already; otherwise the first rank does.
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: dist.Store = dist.TCPStore(host, port, is_master=is_host, timeout=patience, wait_for_workers=False)
    except (dist.DistError, ValueError, OSError) as error:
        raise UserError(
            f"MASTER_ADDR: rank {rank} cannot {'listen on' if is_host else 'reach'} {address} "
            f"({_first_line(error)}); is the port free, and is rank 0 started on that host?"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"meshwright/{attempt}", store)
    store.set(f"{_HERE}/{rank}", "here")
    missing: list[int] = []
    for other in range(world_size):
        try:
            store.wait([f"{_HERE}/{other}"], patience if not missing else timedelta(seconds=1))
        except dist.DistError:
            missing.append(other)
    if missing:
        raise UserError(
            f"ranks {', '.join(map(str, missing))} of {world_size} have not signed in at {address} within "
            f"{MEETING_TIMEOUT_S} s; are they started, and do their hosts reach that address?"
        )
    return store


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def leave() -> None:
    """Leave the job."""
    dist.destroy_process_group()


def _check_started() -> None:
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: start the ranks with torchrun, or with --local N on this machine"
        )
