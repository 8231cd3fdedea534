"""Start the ranks of a job on this machine through torch's own launcher, and join a job that was started."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.errors import UserError

_USER_ERROR = 2
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 600
# For ranks that share a machine, unless the user has set them. glibc otherwise keeps freed tensors in its
# heaps, and a CPU rank takes up to twice the memory it uses; giving them back costs page faults instead.
LOCAL_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "1000000"}
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
        sys.stderr.write(f"rank {rank} ended with exit code {failure.exitcode}; the other ranks were stopped\n")
        return 1
    return 0


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
    dist.init_process_group("nccl" if backend == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    return device


def leave() -> None:
    """Leave the job."""
    dist.destroy_process_group()


def _check_started() -> None:
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not set: start the ranks with torchrun, or with --local N on this machine"
        )
