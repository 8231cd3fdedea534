"""Doctor names the cause and the remedy of what keeps training from working."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import doctor as command
from meshwright.cli import doctor_checks as checks
from tests.cli.conftest import Run
from tests.launch import ROOT

NO_INTERFACE = "nowhere7"
VARIABLES = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have nothing set, an empty folder, and a machine without an NVIDIA driver whose torch works on CPUs."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.cli.doctor._DRIVER", tmp_path / "no-driver")
    monkeypatch.setattr("meshwright.cli.doctor.shutil.which", lambda _name: None)
    torch_says(monkeypatch, "False 0 False None")


def torch_says(monkeypatch: pytest.MonkeyPatch, out: str, err: str = "", code: int = 0) -> None:
    """Let the self-test end like this, without running it."""
    ended = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr("meshwright.cli.doctor._self_test", lambda: ended)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def examine(run: Run, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code, out, err = run("doctor", "--json", *options)
    assert err == ""
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == (0 if all(finding["ok"] for finding in findings.values()) else 1)
    return code, findings


def check_bad(finding: dict[str, Any], state: str, remedy: str) -> None:
    assert not finding["ok"]
    assert state in finding["state"]
    assert remedy in finding["remedy"]


def test_this_environment_is_well(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    code, findings = examine(run)
    assert code == 0, findings
    assert findings["torch"]["ok"]
    assert findings["gloo"]["state"].startswith("works")
    assert {"python", "machine", "open files", "run folder", "cuda"} <= findings.keys()


def test_findings_are_lines_with_remedies_below(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", NO_INTERFACE)
    code, out, _ = run("doctor")
    assert code == 1
    assert f"NO   GLOO_SOCKET_IFNAME: '{NO_INTERFACE}' is no network interface" in out
    assert "     -> unset GLOO_SOCKET_IFNAME, or set it to one of lo" in out
    assert "ok   python: " in out


# ---- packages


def test_without_torch_planning_works_and_training_does_not(run: Run, monkeypatch: pytest.MonkeyPatch):
    version = importlib.metadata.version

    def all_but_torch(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", all_but_torch)
    code, findings = examine(run)
    assert code == 1
    check_bad(
        findings["torch"], "not installed", "planning works without it; to train: pip install 'meshwright[train]'"
    )
    assert "gloo" not in findings


def test_doctor_runs_where_torch_cannot_be_imported():
    code = "import sys; sys.modules['torch'] = None\nfrom meshwright.cli import main\nmain(['doctor', '--help'])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_broken_torch_is_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    torch_says(monkeypatch, "", "Traceback\nImportError: libtorch.so: no such file\n", code=1)
    _, out, _ = run("doctor")
    assert "NO   torch: cannot be imported: ImportError: libtorch.so: no such file" in out
    assert "install it anew" in out


@pytest.mark.parametrize(
    ("installed", "is_tested"),
    [("2.13.0", True), ("2.13.0+cu126", True), ("2.20.1", True), ("2.12.9", False), ("3.0.0", False)],
)
def test_versions_outside_of_the_tested_range_are_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch, installed: str, is_tested: bool
):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed if name == "torch" else version(name))
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["numpy<3,>=2", 'torch<3,>=2.13; extra == "train"'])
    _, findings = examine(run)
    assert findings["torch"]["ok"]
    assert ("tested with torch<3,>=2.13" in findings["torch"]["remedy"]) is not is_tested


def test_an_old_python_is_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_PYTHONS", ((3, 90), (3, 91)))
    check_bad(examine(run)[1]["python"], "on ", "use Python 3.90 to 3.91")


# ---- GPUs


def test_without_a_gpu_cpu_ranks_work(run: Run):
    code, findings = examine(run)
    assert code == 0
    assert "CPU ranks work, plans for GPUs can be made but not run here" in findings["cuda"]["state"]
    assert findings["cuda"]["remedy"] == ""


@pytest.mark.parametrize("sign", ["nvidia-smi", "driver"])
def test_a_driver_with_a_cpu_build_of_torch_is_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sign: str
):
    if sign == "driver":
        monkeypatch.setattr(command, "_DRIVER", tmp_path)
    else:
        monkeypatch.setattr(command.shutil, "which", lambda name: f"bin/{name}")
    _, findings = examine(run)
    assert "this torch is built for CPUs only" in findings["cuda"]["state"]
    assert "install a CUDA build of torch" in findings["cuda"]["remedy"]


def test_a_cuda_build_that_finds_no_gpu_points_at_the_driver(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    torch_says(monkeypatch, "False 0 True 12.6")
    assert examine(run)[1]["cuda"]["remedy"] == "", "a machine without GPUs"
    monkeypatch.setattr(command, "_DRIVER", tmp_path)
    assert "built for CUDA 12.6: does the driver" in examine(run)[1]["cuda"]["remedy"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in examine(run)[1]["cuda"]["remedy"]


def test_gpus_without_nccl_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch):
    torch_says(monkeypatch, "True 8 True 12.6")
    assert examine(run)[1]["cuda"]["state"] == "8 GPUs, nccl built in"
    torch_says(monkeypatch, "True 8 False 12.6")
    check_bad(examine(run)[1]["cuda"], "8 GPUs, nccl missing", "install a torch build with nccl")


# ---- where ranks meet


def test_a_port_in_use_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, busy_port: int):
    check_bad(examine(run, "--port", str(busy_port))[1]["port"], f"{busy_port} is in use here", "choose another")
    monkeypatch.setenv("MASTER_PORT", str(busy_port))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_bad(examine(run)[1]["port"], f"{busy_port} is in use here", f"sport = :{busy_port}")


def test_a_free_port_is_well(run: Run, free_port: int):
    assert examine(run, "--port", str(free_port))[1]["port"]["state"] == f"{free_port} is free here"


@pytest.mark.parametrize("given", ["", "many", "0", "70000", "-1", "\u0664\u0662"])
def test_a_port_that_is_none_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, given: str):
    monkeypatch.setenv("MASTER_PORT", given)
    check_bad(examine(run)[1]["MASTER_PORT"], "is not a port", "set it to a number from 1 to 65535")


def test_a_host_that_does_not_resolve_is_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "node0.invalid")
    started = time.monotonic()
    check_bad(examine(run)[1]["MASTER_ADDR"], "node0.invalid does not resolve", "correct MASTER_ADDR")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("raised", "ok", "says"),
    [
        (None, True, "node0:1234 answers"),
        (ConnectionRefusedError(), True, "nothing listens on 1234 yet"),
        (TimeoutError(), False, "node0:1234 cannot be reached: no answer in 3 s"),
        (OSError(101, "Network is unreachable"), False, "cannot be reached: Network is unreachable"),
    ],
)
def test_another_host_is_tried_and_no_port_bound_here(
    run: Run, monkeypatch: pytest.MonkeyPatch, raised: OSError | None, ok: bool, says: str
):
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("192.0.2.7", 1234)
        assert timeout <= 5
        if raised is not None:
            raise raised
        return socket.socket()

    resolve = socket.gethostbyname
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "192.0.2.7" if name == "node0" else resolve(name))
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    _, findings = examine(run)
    assert findings["MASTER_ADDR"]["ok"] is ok
    assert says in findings["MASTER_ADDR"]["state"]
    assert ("firewall" in findings["MASTER_ADDR"]["remedy"]) is not ok
    assert "port" not in findings


def test_a_silent_name_server_does_not_hold_doctor_up():
    assert checks.within(0.05, lambda: time.sleep(1)) is None
    assert checks.within(1, lambda: 5) == 5


# ---- interfaces


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_wrong_interface_is_named_with_those_that_exist(run: Run, monkeypatch: pytest.MonkeyPatch, variable: str):
    monkeypatch.setenv(variable, NO_INTERFACE)
    names = ", ".join(name for _, name in socket.if_nameindex())
    check_bad(examine(run)[1][variable], f"'{NO_INTERFACE}' is no network interface", f"set it to one of {names}")


@pytest.mark.parametrize(
    ("variable", "value", "ok"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "lo,nowhere7", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "=lo", True),
        ("NCCL_SOCKET_IFNAME", "eth,lo", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "^l", False),
    ],
)
def test_lists_prefixes_and_exclusions_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, ok: bool
):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    monkeypatch.setenv(variable, value)
    assert examine(run)[1][variable]["ok"] is ok


def test_gloo_itself_fails_on_a_wrong_interface(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", NO_INTERFACE)
    check_bad(examine(run)[1]["gloo"], "failed: ", f"GLOO_SOCKET_IFNAME is '{NO_INTERFACE}'; unset it")


def test_a_gloo_that_hangs_is_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_self_test", lambda: None)
    check_bad(examine(run)[1]["gloo"], "no answer in 60 s", "set GLOO_SOCKET_IFNAME to a network interface")


@pytest.mark.parametrize(("address", "state"), [(None, "does not resolve"), ("192.0.2.7", "which is not here")])
def test_a_host_that_does_not_know_itself_is_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch, address: str | None, state: str
):
    def resolve(_name: str) -> str:
        if address is None:
            raise socket.gaierror("unknown")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(checks, "_is_here", lambda given: given != "192.0.2.7")
    finding = examine(run)[1]["host name"]
    assert finding["ok"], "ranks on one machine meet all the same"
    assert state in finding["state"]
    assert "set GLOO_SOCKET_IFNAME to the network between them, one of lo" in finding["remedy"]


# ---- the machine


def test_threads_of_several_ranks_are_noted(run: Run, monkeypatch: pytest.MonkeyPatch):
    assert "OMP_NUM_THREADS" not in examine(run)[1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "export OMP_NUM_THREADS=1" in examine(run)[1]["OMP_NUM_THREADS"]["remedy"]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in examine(run)[1]


def test_cores_and_memory_are_shown(run: Run):
    assert f"{len(os.sched_getaffinity(0))} cores, " in examine(run)[1]["machine"]["state"]


def test_few_open_files_are_noted(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert examine(run)[1]["open files"] | {"ok": True} == {
        "what": "open files", "state": "at most 256", "ok": True, "remedy": "ulimit -n 4096",
    }  # fmt: skip


def test_a_full_disk_is_noted_and_a_bad_run_folder_refused(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    check_bad(examine(run, "--run-dir", "file")[1]["run folder"], "cannot be written", "choose another --run-dir")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    monkeypatch.setattr(checks, "GiB", 1 << 62)
    assert "a checkpoint takes 12 bytes a parameter" in examine(run)[1]["run folder"]["remedy"]
