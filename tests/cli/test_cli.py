"""The command line in process: what it prints, what it writes, and the one line for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cli import main
from meshwright.cli.schema import KINDS
from meshwright.files import canonical_json
from tests.launch import ROOT

QUESTION = ["--model", "tiny-llama", "--cluster", "4xcpu", "--global-batch", "8", "--seq-len", "64"]
PLAN = ["plan", *QUESTION]
Run = Callable[..., tuple[int, str, str]]
PlanFile = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command and returns exit code, stdout and stderr."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def plan() -> meshwright.Plan:
    found = meshwright.plan("tiny-llama", "4xcpu", global_batch=8, seq_len=64)
    assert isinstance(found, meshwright.Found)
    return found.plan


@pytest.fixture
def plan_file(plan: meshwright.Plan, tmp_path: Path) -> PlanFile:
    """Return a function that writes the plan, its data changed by `change`, and returns the path."""

    def write(change: Callable[[dict[str, Any]], object] = lambda data: None) -> str:
        data = json.loads(canonical_json(plan))
        change(data)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        return str(path)

    return write


def test_plan_shows_and_writes(run: Run, tmp_path: Path):
    path = tmp_path / "plan.json"
    code, out, err = run(*PLAN, "-o", str(path))
    assert code == 0
    assert err == f"plan written to {path}\n"
    for part in ("tiny-llama", "predicted", "optimal under this cost model", "searched"):
        assert part in out
    assert meshwright.load_plan(path).predicted is not None


def test_plan_prints_json(run: Run, plan: meshwright.Plan):
    code, out, err = run(*PLAN, "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["plan"] == plan.model_dump(mode="json")
    assert {"runners_up", "tried", "search_s"} <= data.keys()


def test_nothing_fits_is_an_answer_with_code_1(run: Run):
    code, out, err = run(*PLAN, "--memory", "100KiB")
    assert (code, err) == (1, "")
    assert out.startswith("nothing fits: the smallest plan needs")
    assert "too much" in out
    code, out, _ = run(*PLAN, "--memory", "100KiB", "--json")
    data = json.loads(out)
    assert code == 1
    assert max(data["shortfall_bytes"]) > 0
    assert data["nearest"]["model"]["name"] == "tiny-llama"


def test_show_and_predict_read_what_plan_wrote(run: Run, plan: meshwright.Plan, plan_file: PlanFile):
    path = plan_file()
    code, shown, err = run("show", path)
    assert (code, err) == (0, "")
    assert "predicted" in shown
    code, out, _ = run("show", path, "--json")
    assert json.loads(out) == plan.model_dump(mode="json")
    code, out, err = run("predict", path, "--json")
    assert (code, err) == (0, "")
    assert plan.predicted is not None
    assert json.loads(out) == plan.predicted.model_dump(mode="json")


def test_predict_prices_a_uniform_plan(run: Run):
    uniform = ["--tp", "2", "--pp", "2", "--micro-batches", "4", "--recompute"]
    code, out, err = run("predict", *QUESTION, *uniform, "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["stages"]) == 2
    code, out, _ = run("predict", *QUESTION, "--zero-stage", "3", "--dp-shard", "2")
    assert code == 0
    assert "hsdp2x2-zero3" in out


@pytest.mark.parametrize("kind", KINDS)
def test_schema_prints_json_schema(run: Run, kind: str):
    code, out, err = run("schema", kind)
    assert (code, err) == (0, "")
    assert json.loads(out)["type"] == "object"


def test_schema_lists_the_formats(run: Run):
    code, out, _ = run("schema")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == list(KINDS)


def test_doctor_finds_this_environment_well(run: Run):
    code, out, err = run("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert (code, err) == (0, ""), findings
    assert findings["torch"]["ok"]
    assert findings["gloo"]["state"].startswith("works")


def check_refusal(outcome: tuple[int, str, str], message: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1, "one line"
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert message in err


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        (PLAN, {"--model": "llama-9"}, "model: 'llama-9' is neither a known model nor a file"),
        (PLAN, {"--model": "missing/config.json"}, "missing/config.json: no such file"),
        (PLAN, {"--cluster": "8xabacus"}, "device: 'abacus' is not known"),
        (PLAN, {"--cluster": "0xcpu"}, "cluster: '0xcpu' has no devices"),
        (PLAN, {"--cluster": "many"}, "cluster: 'many' is not a cluster"),
        (PLAN, {"--space": "biggest"}, "space: 'biggest' is not known; choose one of full"),
        (PLAN, {"--global-batch": "-4"}, "global-batch: '-4' is not a batch size"),
        (PLAN, {"--global-batch": "16..8"}, "global-batch: '16..8' is not a batch size"),
        (PLAN, {"--global-batch": "lots"}, "write 64, 8..512 or auto"),
        (PLAN, {"--seq-len": "512"}, "seq-len: 512 is above what tiny-llama has positions for (256)"),
        (PLAN, {"--memory": "-5GB"}, "memory: '-5GB' is not a size"),
        (PLAN, {"--memory": "0GB"}, "memory: '0GB' is not a positive number of bytes"),
        (PLAN, {"--memory": "nan"}, "memory: 'nan' is not a size"),
        (PLAN, {"--memory": "5GiB"}, "memory: 5GiB is more than a cpu has"),
        (PLAN, {"--reserve": "4GiB"}, "reserved_bytes (4294967296) leaves nothing of 4294967296"),
        (PLAN, {"--stages": "3"}, "stages: 3 does not divide 4 devices"),
        (PLAN, {"--stages": "2", "--space": "ddp"}, "stages: space ddp has no plan of 2 stages"),
        (PLAN, {"--micro-batches": "3"}, "micro-batches: 3 does not divide the global batch (8)"),
        (PLAN, {"--profile": "missing.json"}, "missing.json: no such file"),
        (PLAN, {"--output": "/proc/nowhere/plan.json"}, "/proc/nowhere/plan.json: cannot be written"),
        (["predict", *QUESTION], {"--tp": "3"}, "devices of a stage over tp: 4 is not divisible by 3"),
        (["predict", *QUESTION], {"--tp": "4"}, "tp 4 does not divide num_kv_heads=2; allowed: 1, 2"),
        (["predict", *QUESTION], {"--pp": "3"}, "devices over pp: 4 is not divisible by 3"),
        (["predict", *QUESTION], {"--cluster": "8xcpu", "--pp": "8"}, "pp: 8 stages need at least 8 blocks"),
        (["predict", *QUESTION], {"--micro-batches": "4"}, "dp 4 does not divide the micro-batch of 2 samples"),
        (["predict", *QUESTION], {"--micro-batches": "3"}, "num_micro_batches (3) does not divide"),
        (["predict", *QUESTION], {"--dp-shard": "2"}, "dp-shard: 2 needs zero-stage 2 or 3"),
        (["predict", *QUESTION], {"--dp-shard": "3", "--zero-stage": "3"}, "dp over dp-shard: 4 is not divisible by 3"),
        (["predict", *QUESTION], {"--seq-len": "257"}, "job.seq_len (257) is above the model's 256"),
        (["predict"], {"--model": "gpt2"}, "predict: give a plan file, or also --cluster, --global-batch, --seq-len"),
        (["schema", "plans"], {}, "schema: 'plans' is not a format; choose one of plan, model"),
        (["show", "missing.json"], {}, "missing.json: no such file"),
        (["train", "missing.json"], {}, "missing.json: no such file"),
        (["profile", "-o", "p.json"], {}, "start the ranks with torchrun, or with --local N"),
        (["profile", "-o", "p.json", "--backend", "cuda"], {"--local": "99"}, "local: 99 ranks need a GPU each"),
    ],
)
def test_bad_options_are_one_line(run: Run, command: list[str], changes: dict[str, str], message: str):
    arguments = list(command)
    for name, value in changes.items():
        if name in arguments:
            arguments[arguments.index(name) + 1] = value
        else:
            arguments += [name, value]
    check_refusal(run(*arguments), message)


def wider(data: dict[str, Any]) -> None:
    data["stages"][0]["runs"][0]["strategy"]["cp"] = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(color="red"), "color: unknown key"),
        (lambda data: data["job"].update(sequence=5), "job.sequence: unknown key"),
        (lambda data: data.update(schema_version=2), "schema_version: 2 is newer than this meshwright reads (1)"),
        (lambda data: data.pop("stages"), "stages: required, but missing"),
        (lambda data: data["cluster"]["device"].update(memory_bytes_per_s=float("nan")), "memory_bytes_per_s"),
        (lambda data: data["cluster"]["intra_node"].update(latency_s=float("inf")), "latency_s"),
        (lambda data: data["budget"].update(memory_bytes=-1), "budget.memory_bytes"),
        (lambda data: data.update(num_devices="4"), "num_devices"),
        (lambda data: data.update(num_devices=5), "num_devices (5) is above the cluster's 4"),
        (lambda data: data.update(num_micro_batches=3), "num_micro_batches (3) does not divide global_batch_size (8)"),
        (lambda data: data["model"]["groups"][1].update(num_layers=9), "layers planned, but tiny-llama has 11"),
        (lambda data: data.update(schedule="zigzag"), "schedule"),
        (lambda data: data["job"].update(seq_len=1000), "job.seq_len (1000) is above the model's 256"),
        (wider, "devices, but a stage has"),
    ],
)
@pytest.mark.parametrize("command", ["show", "predict", "train"])
def test_bad_plan_files_are_one_line(
    run: Run, plan_file: PlanFile, command: str, change: Callable[[dict[str, Any]], object], message: str
):
    check_refusal(run(command, plan_file(change)), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model": {"name": ', "not readable as JSON"),
        (b"", "not readable as JSON"),
        (b"[1, 2]", "should be an object"),
        (b"\xff\xfe\x00", "not a UTF-8 text file"),
        (b"[" * 100_000, "not readable as JSON"),
    ],
)
def test_files_that_are_no_plan_are_one_line(run: Run, tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    check_refusal(run("show", str(path)), message)
    check_refusal(run("show", str(tmp_path)), "cannot be read")


def test_a_plan_file_and_options_for_another_plan_are_refused(run: Run, plan_file: PlanFile):
    check_refusal(run("predict", plan_file(), "--model", "gpt2", "--seq-len", "8"), "leave out --model, --seq-len")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "start the ranks with torchrun, or with --local N"),
        (["--local", "3"], "local: the plan is for 4 ranks, not 3; use --local 4"),
        (["--local", "4", "--data", "missing.txt"], "data: missing.txt: no such file or folder"),
        (["--local", "4", "--tokenizer", "missing.json"], "missing.json"),
        (["--local", "4", "--resume", "missing"], "missing: holds no whole checkpoint"),
    ],
)
def test_training_is_refused_before_ranks_start(
    run: Run, plan_file: PlanFile, tmp_path: Path, options: list[str], message: str
):
    folders = ["--run-dir", str(tmp_path / "run"), "--cache-dir", str(tmp_path / "cache")]
    check_refusal(run("train", plan_file(), *folders, *options), message)
    assert not (tmp_path / "run").exists()


def test_the_number_of_ranks_must_be_the_plans(run: Run, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch):
    outside = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    path = plan_file()
    with monkeypatch.context() as context:
        for name, value in outside.items():
            context.setenv(name, value)
        capture = run("train", path)
    check_refusal(capture, "rank 0: num_devices: the plan is for 4 ranks, but 2 were started")


def test_a_checkpoint_of_another_model_is_refused(run: Run, plan_file: PlanFile, tmp_path: Path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    data = {"seed": 0, "seq_len": 8, "tokens_sha256": "0" * 64, "held_out_fraction": 0.05}
    info = {"model_sha256": "0" * 64, "model": "gpt2", "step": 3, "num_samples": 24}
    (checkpoint / "checkpoint.json").write_text(json.dumps(info | {"torch_version": "0", "files": [], "data": data}))
    outcome = run("train", plan_file(), "--local", "4", "--resume", str(tmp_path / "run"))
    check_refusal(outcome, "is of gpt2, a model other than the plan's tiny-llama")


def test_what_can_be_priced_but_not_run_is_refused(run: Run, plan_file: PlanFile):
    def shard_states_only(data: dict[str, Any]) -> None:
        strategy = {"dp_shard": 4, "zero_stage": 1}
        data["stages"] = [{"runs": [{"num_layers": 6, "strategy": strategy}]}]
        data["num_micro_batches"] = 1

    path = plan_file(shard_states_only)
    assert run("predict", path)[0] == 0
    check_refusal(run("train", path, "--local", "4"), "zero_stage 1 can be priced but not run yet; use 0, 2 or 3")


@pytest.mark.parametrize(
    "arguments",
    [["plan"], ["fly"], [*PLAN, "--seq-len", "0"], [*PLAN, "--dtype", "fp8"], [*PLAN, "--time-limit", "0"]],
)
def test_wrong_usage_ends_with_code_2(run: Run, arguments: list[str]):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: " in err
    assert "Traceback" not in err


def test_planning_imports_no_torch():
    code = "import meshwright, meshwright.cli, sys; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_plan_for_eight_gpus_takes_seconds_without_torch(tmp_path: Path):
    options = {"model": "llama-2-7b", "cluster": "8xa100-sxm-40g", "global-batch": "64", "seq-len": "4096"}
    arguments = ["plan", "-o", str(tmp_path / "plan.json")]
    for name, value in options.items():
        arguments += [f"--{name}", value]
    code = f"import sys; sys.modules['torch'] = None\nfrom meshwright.cli import main\nmain({arguments!r})"
    started = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert time.perf_counter() - started < 5
    assert meshwright.load_plan(tmp_path / "plan.json").num_devices == 8
