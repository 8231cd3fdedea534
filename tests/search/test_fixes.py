"""Every fix makes it fit when its options are planned again, and is the least of its kind that was promised."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest

import meshwright
from meshwright import Found, Infeasible
from meshwright.search.engine import Request, search
from meshwright.search.fixes import Fix, fixes
from meshwright.search.planner import make_request
from meshwright.spec.library import cluster
from meshwright.units import parse_bytes
from tests.search.uniform import bound_bytes

_ARGUMENTS = {
    "--memory": "memory",
    "--cluster": "cluster",
    "--global-batch": "global_batch",
    "--space": "space",
    "--schedule": "schedule",
    "--stages": "stages",
    "--micro-batches": "micro_batches",
    "--partition": "partition",
}
ASKED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "memory": (
        {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 8, "seq_len": 64, "memory": "600KiB"},
        {"memory", "devices"},
    ),
    "reserve": (
        {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 8, "seq_len": 64, "memory": "3MiB",
         "reserve": "2300KiB"},
        {"memory", "devices"},
    ),
    "space": (
        {"model": "tiny-gpt2", "cluster": "4xcpu", "global_batch": 8, "seq_len": 128, "memory": "3MiB", "space": "ddp"},
        {"space", "memory"},
    ),
    "batch": (
        {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 64, "seq_len": 128, "memory": "8MiB",
         "micro_batches": 1, "stages": 1},
        {"space", "memory", "batch"},
    ),
    "gpipe": (
        {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 32, "seq_len": 256, "memory": "3MiB",
         "schedule": "gpipe", "stages": 4, "micro_batches": 32},
        {"space", "memory"},
    ),
    "no strategy": (
        {"model": "tiny-llama", "cluster": "8xcpu", "global_batch": 4, "seq_len": 64, "space": "ddp"}, {"space"},
    ),
    "uniform": (
        {"model": "gpt2", "cluster": "8xa100-sxm-40g", "global_batch": 16, "seq_len": 1024, "memory": "500MiB",
         "space": "3d"},
        {"space", "memory"},
    ),
    "gpus": (
        {"model": "llama-2-7b", "cluster": "2xa100-sxm-40g", "global_batch": 8, "seq_len": 4096},
        {"memory", "devices"},
    ),
}  # fmt: skip


def asked(arguments: dict[str, Any]) -> Request:
    rest = {name: value for name, value in arguments.items() if name not in ("model", "cluster")}
    return make_request(arguments["model"], arguments["cluster"], **rest)


@cache
def fixed(name: str) -> tuple[tuple[Fix, ...], float]:
    request = asked(ASKED[name][0])
    outcome = search(request)
    assert isinstance(outcome, Infeasible)
    started = time.perf_counter()
    return fixes(request, outcome), time.perf_counter() - started


@pytest.mark.parametrize("name", ASKED)
def test_each_fix_fits_when_it_is_typed(name: str):
    arguments, kinds = ASKED[name]
    found, _ = fixed(name)
    assert kinds <= {fix.kind for fix in found}
    assert len({fix.kind for fix in found}) == len(found)
    for fix in found:
        assert fix.plan.predicted is not None
        assert max(bound_bytes(fix.plan)) <= fix.plan.budget.usable_bytes
        if not fix.options and not fix.leave_out:
            assert fix.plan.budget.memory_bytes > cluster(arguments["cluster"]).device.memory_bytes
            continue
        typed = dict(zip(fix.options[::2], fix.options[1::2], strict=True))
        again = {name: value for name, value in arguments.items() if f"--{name.replace('_', '-')}" not in fix.leave_out}
        again |= {_ARGUMENTS[option]: value for option, value in typed.items()}
        outcome = search(asked(again))
        assert isinstance(outcome, Found), (fix.kind, fix.options)
        assert outcome.plan.predicted is not None
        assert outcome.plan.predicted.step_s <= fix.plan.predicted.step_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["memory", "reserve", "gpus"])
def test_less_memory_than_the_fix_is_too_little(name: str):
    arguments, _ = ASKED[name]
    (fix,) = (fix for fix in fixed(name)[0] if fix.kind == "memory")
    rounded = 1 << 20 if fix.plan.budget.memory_bytes >= 1 << 30 else 1 << 10
    if fix.options:
        assert parse_bytes(fix.options[1]) == fix.plan.budget.memory_bytes
        less = {**arguments, "memory": fix.plan.budget.memory_bytes - rounded}
        assert isinstance(search(asked(less)), Infeasible)


def test_a_larger_batch_than_the_fix_is_too_large():
    arguments, _ = ASKED["batch"]
    (fix,) = (fix for fix in fixed("batch")[0] if fix.kind == "batch")
    batch = int(fix.options[1])
    for size in range(batch + 8, 64, 8):
        assert isinstance(search(asked({**arguments, "global_batch": size})), Infeasible)


def test_fewer_devices_than_the_fix_are_too_few():
    (fix,) = (fix for fix in fixed("gpus")[0] if fix.kind == "devices")
    assert fix.plan.num_devices in (4, 8, 16)
    for devices in range(4, fix.plan.num_devices, 4):
        outcome = meshwright.plan("llama-2-7b", f"{devices}xa100-sxm-40g", global_batch=8, seq_len=4096)
        assert isinstance(outcome, Infeasible)


@pytest.mark.parametrize("name", ASKED)
def test_fixes_take_seconds(name: str):
    assert fixed(name)[1] < 20


def test_what_nothing_can_help_has_no_fix():
    request = make_request("tiny-llama", "1xcpu", global_batch=1, seq_len=1, memory=1)
    outcome = search(request)
    assert isinstance(outcome, Infeasible)
    assert {fix.kind for fix in fixes(request, outcome)} == {"memory"}


def test_a_cluster_of_its_own_cannot_be_typed():
    own = cluster("2xcpu")
    own = own.model_copy(update={"name": "mine", "intra_node": own.intra_node.model_copy(update={"latency_s": 1e-3})})
    request = make_request("tiny-llama", own, global_batch=8, seq_len=64, memory="1MiB")
    outcome = search(request)
    assert isinstance(outcome, Infeasible)
    (fix,) = (fix for fix in fixes(request, outcome) if fix.kind == "devices")
    assert fix.options == ()
    assert str(fix.plan.num_devices) in fix.what
