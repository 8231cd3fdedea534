"""meshwright doctor: what is installed, which backends work, what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, show_json, show_line
from meshwright.cli.doctor_checks import Finding, interfaces, machine, meeting_point

_PLANNING = ("numpy", "pydantic", "PyYAML", "typer", "rich")
_TRAINING = ("torch", "safetensors", "tensorboard", "tokenizers")
_PYTHONS = ((3, 11), (3, 13))  # the oldest and the newest supported
_DRIVER = Path("/proc/driver/nvidia")
_SELF_TEST_TIMEOUT_S = 60
# Says what torch finds, then forms a process group of one rank over gloo and reduces a number:
# shows whether sockets work.
_SELF_TEST = """
import torch, torch.distributed as dist
print(torch.cuda.is_available(), torch.cuda.device_count(), dist.is_nccl_available(), torch.version.cuda, flush=True)
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
"""


def doctor(
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port where ranks meet (or MASTER_PORT).")] = None,
    run_dir: Annotated[Path, typer.Option(help="Where runs will go.")] = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """Say what is installed, which backends work and what is wrong. Exit code 1 when training cannot work."""
    findings = list(_findings(port, run_dir))
    if json:
        show_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            mark = "NO  " if not finding.ok else "note" if finding.remedy else "ok  "
            show_line(f"{mark} {finding.what}: {finding.state}")
            if finding.remedy:
                show_line(f"     -> {finding.remedy}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _findings(port: int | None, run_dir: Path) -> Iterator[Finding]:
    yield _python()
    for package in _PLANNING:
        yield _installed(package, remedy="pip install meshwright")
    for package in _TRAINING:
        yield _installed(package, remedy="planning works without it; to train: pip install 'meshwright[train]'")
    yield from machine(run_dir)
    yield from interfaces()
    yield from meeting_point(port)
    if _version("torch") is not None:
        yield from _backends()


def _python() -> Finding:
    state = f"{platform.python_version()} on {platform.system()}"
    oldest, newest = (".".join(map(str, version)) for version in _PYTHONS)
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        return Finding(what="python", state=state, ok=False, remedy=f"use Python {oldest} to {newest}")
    return Finding(what="python", state=state, ok=True)


def _installed(package: str, *, remedy: str) -> Finding:
    version = _version(package)
    if version is None:
        return Finding(what=package, state="not installed", ok=False, remedy=remedy)
    tested = _tested_range(package)
    if not _lies_in(version, tested):
        remedy = f"tested with {package}{tested}; pip install '{package}{tested}'"
        return Finding(what=package, state=f"{version}, outside of the tested range", ok=True, remedy=remedy)
    return Finding(what=package, state=version, ok=True)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tested_range(package: str) -> str:
    """Return the versions that meshwright's own metadata asks for, such as ">=2.13,<3"; "" when it is not installed."""
    try:
        requirements = importlib.metadata.requires("meshwright") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = (re.match(rf"{package}(?:\[.*\])?([<>=][^;]*)", requirement, re.IGNORECASE) for requirement in requirements)
    return next((match.group(1).strip() for match in found if match), "")


def _lies_in(version: str, bounds: str) -> bool:
    """Return whether `version` is in a range of >= and < bounds. Local parts such as +cu126 do not count."""
    return all(
        (_numbers(version) >= _numbers(number)) == (operator == ">=")
        for operator, number in re.findall(r"(>=|<)\s*([\d.]+)", bounds)
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])]


def _self_test() -> subprocess.CompletedProcess[str] | None:
    """Try torch and gloo in a process of its own; None when a wrong network interface hangs it."""
    try:
        return subprocess.run(
            [sys.executable, "-c", _SELF_TEST],
            capture_output=True,
            text=True,
            timeout=_SELF_TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def _backends() -> Iterator[Finding]:
    result = _self_test()
    hint = "set GLOO_SOCKET_IFNAME to a network interface of this machine, such as lo"
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        hint = f"GLOO_SOCKET_IFNAME is {interface!r}; unset it or name an interface of this machine"
    if result is None:
        yield Finding(what="gloo", state=f"no answer in {_SELF_TEST_TIMEOUT_S} s", ok=False, remedy=hint)
        return
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    cause = lines[-1].strip()[:200] if lines else f"exit code {result.returncode}"
    if not result.stdout:
        remedy = "install it anew: pip install --force-reinstall 'meshwright[train]'"
        yield Finding(what="torch", state=f"cannot be imported: {cause}", ok=False, remedy=remedy)
        return
    if result.returncode != 0:
        yield Finding(what="gloo", state=f"failed: {cause}", ok=False, remedy=hint)
    else:
        yield Finding(what="gloo", state="works (training on CPU ranks)", ok=True)
    yield _gpus(*result.stdout.split()[-4:])


def _gpus(has_cuda: str, num_gpus: str, has_nccl: str, cuda_build: str) -> Finding:
    """Say which GPUs torch finds and, when it finds none, why that may be. CPU ranks work all the same."""
    if has_cuda == "True" and has_nccl == "True":
        return Finding(what="cuda", state=f"{num_gpus} GPUs, nccl built in", ok=True)
    if has_cuda == "True":
        return Finding(
            what="cuda", state=f"{num_gpus} GPUs, nccl missing", ok=False, remedy="install a torch build with nccl"
        )
    has_driver = _DRIVER.exists() or shutil.which("nvidia-smi") is not None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    state, remedy = "no GPU found; CPU ranks work, plans for GPUs can be made but not run here", ""
    if has_driver and cuda_build == "None":
        state = f"{state}. An NVIDIA driver is here, but this torch is built for CPUs only"
        remedy = "install a CUDA build of torch (pytorch.org/get-started)"
    elif visible is not None:
        remedy = f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it to see all GPUs"
    elif has_driver:
        remedy = f"torch is built for CUDA {cuda_build}: does the driver (nvidia-smi) work, and is it new enough?"
    return Finding(what="cuda", state=state, ok=True, remedy=remedy)
