"""The table of bad inputs: each is refused with one line that says what is wrong, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.cli.bad import PLAN, Bad, ask
from tests.cli.bad_runs import CHECKPOINTS, DATA, EVIL, MARKER, METRICS, OTHERS, OUTPUTS, PLANS, USAGE, train
from tests.cli.bad_specs import CLUSTERS, JOBS, MODELS, PROFILES
from tests.cli.bad_tasks import TASKS
from tests.cli.conftest import PlanFile, Run

TABLE: list[Bad] = [
    *MODELS, *CLUSTERS, *JOBS, *PROFILES, *PLANS, *CHECKPOINTS, *DATA, *TASKS, *METRICS, *OUTPUTS, *OTHERS, *USAGE,
]  # fmt: skip

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts ranks: bad input is found before."""

    def launched(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("meshwright.runtime.launch.launch_local", launched)


def check_refusal(outcome: tuple[int, str, str], bad: Bad) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert bad.says in err
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, "one line"
    assert len(err) < (6000 if "y" * 5000 in err else 700), "a line that can be read"


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name.encode("unicode_escape").decode())
def test_bad_input_is_one_line_and_leaves_nothing(run: Run, bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    bad.write_files(tmp_path)
    for path in tmp_path.glob("ro.*"):
        path.chmod(0o444)
    before = files_below(tmp_path)
    check_refusal(run(*bad.command), bad)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.glob(bad.keeps)} if bad.keeps else set()
    assert {name: content for name, content in files_below(tmp_path).items() if name not in kept} == before


def test_the_table_is_large_and_its_rows_differ():
    assert len(TABLE) >= 100
    names = [bad.name for bad in TABLE]
    assert not [name for name in names if names.count(name) > 1]


def test_reading_the_tensors_of_a_checkpoint_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("evil.pt", "__0_0.distcp", ".metadata"):
        (tmp_path / name).write_bytes(EVIL)
    assert HuggingFaceStorageReader(str(tmp_path)).read_metadata().state_dict_metadata == {}
    assert not (tmp_path / MARKER).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize(
    "command",
    [
        *(ask(**{option: "closed/x.json"}) for option in ("model", "cluster", "profile", "output")),
        *(train(option, "closed/x") for option in ("--data", "--tokenizer", "--resume", "--cache-dir")),
        ("show", "closed/x"),
        ("compare", "plan.json", "closed/x"),
    ],
    ids=lambda command: " ".join(command[-2:]),
)
def test_what_is_closed_to_the_user_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    Bad(name="", command=(), says="", files={"plan.json": PLAN}).write_files(tmp_path)
    (tmp_path / "closed").mkdir(mode=0o000)
    bad = Bad(name="", command=(), says="Permission denied")
    check_refusal(run(*command), bad)


def test_the_number_of_ranks_must_be_the_plans(run: Run, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch):
    outside = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    # Joining would wait for the other rank.
    monkeypatch.setattr("meshwright.runtime.train.supervised", lambda work, *_, **__: work(None, None))
    says = "rank 0: num_devices: the plan is for 4 ranks, but 2 were started"
    check_refusal(run("train", plan_file()), Bad(name="", command=(), says=says))


def test_what_cannot_run_yet_can_be_priced(run: Run, plan_file: PlanFile):
    def shard_optimizer_states(data: dict) -> None:
        strategy = {"dp_shard": 4, "zero_stage": 1}
        data["stages"] = [{"runs": [{"num_layers": 6, "strategy": strategy}]}]
        data["num_micro_batches"] = 1

    assert run("predict", plan_file(shard_optimizer_states))[0] == 0
