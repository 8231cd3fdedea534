"""Start ranks of a test as processes of their own, bounded in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 150


def run_ranks(num_ranks: int, *arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run `python -m arguments...` as `num_ranks` gloo ranks on 127.0.0.1 and return what they printed."""
    command = [
        sys.executable, "-m", "torch.distributed.run",
        "--nproc-per-node", str(num_ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        "--local-addr", "127.0.0.1", "-m", *arguments,
    ]  # fmt: skip
    return run(command, timeout_s=timeout_s)


def environment() -> dict[str, str]:
    """Return the environment of a rank in tests: gloo on the loopback interface, one thread."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(ROOT),
    }


def run(command: list[str], *, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root with one thread a process."""
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def run_meshwright(*arguments: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return run([sys.executable, "-m", "meshwright", *arguments], timeout_s=timeout_s)
