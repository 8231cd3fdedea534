"""Start the ranks of a job on this machine, through torch's own launcher."""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_USER_ERROR = 2


def launch_local(num_ranks: int, arguments: list[str]) -> int:
    """Run `python -m meshwright <arguments>` as `num_ranks` ranks on this machine; return the exit code.

    0 when all ended well, 2 when a rank refused its input (it has said why), 1 when a rank broke;
    then its number and exit code are printed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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
