"""Training under any plan equals training on one device: loss, every gradient, norm, parameters, bytes, calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from tests.launch import run_ranks
from tests.parity.cases import Case, all_cases
from tests.parity.faults import FAULTS
from tests.parity.worker import TUPLES_AFTER
from tests.parity.zoo import CONFIGS, VARIANTS, zoo_cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASES = {case.name: case for case in [*all_cases(), *zoo_cases()]}
Records = list[dict[str, Any]]
ByName = Callable[[str], Records]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> ByName:
    """Return the records of a case (or a planted fault) by rank; each world size is launched once."""
    folder = tmp_path_factory.mktemp("parity")

    @lru_cache
    def of_world(num_ranks: int) -> dict[str, Records]:
        path = folder / f"{num_ranks}.json"
        result = run_ranks(num_ranks, "tests.parity.worker", str(path))
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[:6000]
        return json.loads(path.read_text())

    def by_name(name: str) -> Records:
        where = {"tuples": TUPLES_AFTER, **{f"fault:{fault}": case for fault, case in FAULTS.items()}}
        case = CASES[where.get(name, name)]
        return of_world(case.plan.num_devices)[name]

    return by_name


def by_dtype(dtype: str) -> list[Case]:
    return [case for case in CASES.values() if case.plan.job.param_dtype == dtype]


def test_there_are_enough_plans_of_every_sort():
    plans = [case.plan for case in CASES.values()]
    assert len(plans) >= 30
    assert {plan.num_devices for plan in plans} == {1, 2, 4, 6, 8}
    assert all(plan.model.num_blocks >= 4 for plan in plans)
    assert {plan.schedule for plan in plans} == {"1f1b", "gpipe"}
    assert {plan.model.tied_embedding for plan in plans} == {True, False}
    pipelines = [plan for plan in plans if plan.num_stages > 1]
    assert sum(plan.num_micro_batches >= 2 * plan.num_stages for plan in pipelines) >= len(pipelines) - 1


def test_every_family_is_there_under_every_dimension():
    kinds = {"dp2", "zero3x2", "tp2-recompute", "pp2", "hsdp2x2", "mixed-uneven"}
    for family in (*(name for name in CONFIGS if name not in VARIANTS), "own"):
        assert {f"{family}-{kind}" for kind in kinds} <= CASES.keys()
        assert {CASES[f"{family}-{kind}"].plan.job.dropout > 0 for kind in kinds} == {True, False}


@pytest.mark.parametrize("name", [case.name for case in by_dtype("fp32")])
def test_equals_one_device(name: str, records: ByName):
    for rank, record in enumerate(records(name)):
        where = f"rank {rank}"
        assert record["loss_error"][0] <= 1e-6, where
        assert record["gradient_error"] <= 1.0, where
        assert record["norm_error"][0] <= 1e-5, where
        assert max(record["loss_error"]) <= 1e-5, where
        assert record["parameter_error"] <= 5e-5, where
        assert record["tied_copies"] == 0.0, where


@pytest.mark.parametrize("name", [case.name for case in by_dtype("bf16")])
def test_bf16_is_near_one_device(name: str, records: ByName):
    for record in records(name):
        assert max(record["loss_error"]) <= 2e-2
        assert record["tied_copies"] == 0.0


def test_layers_may_hand_on_several_tensors(records: ByName):
    """Two float tensors with gradients and one of integers, through re-layouts, recomputation and a border."""
    for record in records("tuples"):
        assert record["loss_error"][0] <= 1e-6
        assert record["gradient_error"] <= 1.0


@pytest.mark.parametrize("name", CASES)
def test_issues_what_is_priced(name: str, records: ByName):
    for rank, record in enumerate(records(name)):
        assert not record["calls"], f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_holds_what_is_predicted(name: str, records: ByName):
    for rank, record in enumerate(records(name)):
        predicted, held = record["states"]
        assert predicted == held, f"rank {rank}: master, gradient, optimizer bytes"
        predicted, held = record["activations"]
        assert abs(predicted / held - 1) <= 0.05, f"rank {rank}: saved activations {predicted} and {held}"


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, records: ByName):
    worst = max(max(record["gradient_error"], record["loss_error"][0] / 1e-6) for record in records(f"fault:{fault}"))
    assert worst > 10.0, "the comparison does not see this fault"
