"""Defaults of frameworks: complete, each with its source, and overridden by what a run says."""

from __future__ import annotations

from typing import get_args

import pytest

from meshwright.errors import UserError
from meshwright.spec.frameworks import Framework, default_software, framework, held_of
from meshwright.spec.memory import CONFIDENCES, Excess, margin_bytes, shipped_memory
from meshwright.spec.run import FrameworkName, HeldBytes
from tests.runs import make_run

NAMES = get_args(FrameworkName)


@pytest.mark.parametrize("name", NAMES)
def test_every_framework_has_defaults_and_says_why(name: FrameworkName):
    defaults = framework(name)
    assert {"held", "software"} <= defaults.sources.keys() <= Framework.model_fields.keys()
    numbers = {field for field in Framework.model_fields if field.endswith("_bytes")}
    silent = {field for field in numbers if not getattr(defaults, field)}
    assert numbers - silent <= defaults.sources.keys(), "a number that is not 0 has its source"
    assert set(defaults.logit_bytes) == {"eager", "compiled", "vocab_parallel", "fused"}
    assert default_software(name).loss in defaults.logit_bytes


def test_a_run_says_otherwise():
    assert held_of(make_run()) == framework("megatron").held
    pure = HeldBytes(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, reduce_bytes=2)
    assert held_of(make_run(held=pure)) == pure


def test_mixed_precision_adam_holds_16_bytes_or_18():
    """ZeRO (arXiv 1910.02054, section 3.1): 16; with fp32 main gradients (Megatron-LM) 18."""

    def total(name: FrameworkName) -> float:
        held = framework(name).held
        return held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes

    found = {name: total(name) for name in NAMES}
    assert found == {
        "meshwright": 16, "megatron": 18, "megatron-deepspeed": 20, "deepspeed": 16, "fsdp": 16, "torchtitan": 16,
        "internevo": 16,
    }  # fmt: skip


def test_margins_are_quantiles_of_what_runs_used_above_predictions():
    constants = shipped_memory().model_copy(
        update={
            "excess": (
                Excess(kind="allocated", framework="fsdp", num_runs=10, quantiles=(-0.1, 0.0, 0.1, 0.2, 0.3)),
                Excess(kind="allocated", num_runs=30, quantiles=(0.0, 0.1, 0.2, 0.3, 0.4)),
            )
        }
    )

    def margin(name: FrameworkName, confidence: float) -> float:
        return margin_bytes(100.0, "allocated", name, confidence, constants)

    assert [margin("fsdp", one) for one in CONFIDENCES] == pytest.approx([0, 0, 10, 20, 30])
    assert margin("fsdp", 0.97) == pytest.approx(25)
    assert margin("megatron", 0.95) == pytest.approx(30), "no quantiles of its own: those of all frameworks"
    assert margin_bytes(100.0, "device", "fsdp", 0.9, constants) == pytest.approx(20), "nor of its kind"
    with pytest.raises(UserError, match=r"confidence: 1 is not between 0\.5 and 0\.99"):
        margin("fsdp", 1.0)


def test_shipped_margins_grow_with_confidence():
    shipped = shipped_memory()
    assert {one.kind for one in shipped.excess} == {"allocated", "reserved", "device"}
    for one in shipped.excess:
        assert len(one.quantiles) == len(CONFIDENCES)
        assert list(one.quantiles) == sorted(one.quantiles)
    for kind in ("allocated", "reserved", "device"):
        margins = [margin_bytes(1e9, kind, "fsdp", confidence) for confidence in CONFIDENCES]
        assert margins == sorted(margins)
        assert margins[0] >= 0
