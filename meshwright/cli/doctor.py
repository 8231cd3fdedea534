"""meshwright doctor: what is installed, which backends work, what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import typer

from meshwright.cli.common import JsonFlag, show_json, show_line

_PLANNING = ("numpy", "pydantic", "PyYAML", "typer", "rich")
_TRAINING = ("torch", "safetensors", "tensorboard", "tokenizers")
_SELF_TEST_TIMEOUT_S = 60
# Forms a process group of one rank over gloo and reduces a number: shows whether sockets work.
_SELF_TEST = """
import torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
print(torch.cuda.is_available(), torch.cuda.device_count(), dist.is_nccl_available())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at; `remedy` is empty when it is well or not needed."""

    what: str
    state: str
    ok: bool
    remedy: str = ""


def doctor(json: JsonFlag = False) -> None:
    """Say what is installed, which backends work and what is wrong. Exit code 1 when training cannot work."""
    findings = list(_findings())
    if json:
        show_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            show_line(f"{'ok ' if finding.ok else 'NO '} {finding.what}: {finding.state}")
            if finding.remedy:
                show_line(f"     {finding.remedy}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    yield Finding(what="python", state=f"{platform.python_version()} on {platform.system()}", ok=True)
    for package in _PLANNING:
        yield _installed(package, remedy="pip install meshwright")
    missing = [package for package in _TRAINING if _version(package) is None]
    for package in _TRAINING:
        yield _installed(package, remedy="planning works without it; to train: pip install 'meshwright[train]'")
    if "torch" not in missing:
        yield from _backends()


def _installed(package: str, *, remedy: str) -> Finding:
    version = _version(package)
    if version is None:
        return Finding(what=package, state="not installed", ok=False, remedy=remedy)
    return Finding(what=package, state=version, ok=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[Finding]:
    """Try gloo in a process of its own, with a time limit: a wrong network interface hangs or aborts it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    hint = (
        f"GLOO_SOCKET_IFNAME is {interface!r}; unset it or name an interface of this machine"
        if interface
        else "set GLOO_SOCKET_IFNAME to a network interface of this machine, such as lo"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", _SELF_TEST],
            capture_output=True,
            text=True,
            timeout=_SELF_TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding(what="gloo", state=f"no answer in {_SELF_TEST_TIMEOUT_S} s", ok=False, remedy=hint)
        return
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        cause = lines[-1][:200] if lines else f"exit code {result.returncode}"
        yield Finding(what="gloo", state=f"failed: {cause}", ok=False, remedy=hint)
        return
    has_cuda, num_gpus, has_nccl = result.stdout.split()[-3:]
    yield Finding(what="gloo", state="works (training on CPU ranks)", ok=True)
    if has_cuda == "True":
        yield Finding(
            what="cuda",
            state=f"{num_gpus} GPUs, nccl {'built in' if has_nccl == 'True' else 'missing'}",
            ok=has_nccl == "True",
            remedy="" if has_nccl == "True" else "install a torch build with nccl",
        )
    else:
        yield Finding(what="cuda", state="no GPU found; plans for GPUs can be made but not run here", ok=True)
