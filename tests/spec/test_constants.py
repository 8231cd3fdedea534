"""Shipped constants: what they are fitted on, and which devices they stand for."""

from __future__ import annotations

import pytest

from meshwright.spec.constants import shipped_constants
from meshwright.spec.library import device, device_names


def test_every_type_names_devices_and_what_it_was_fitted_on():
    for kind in shipped_constants().devices:
        assert kind.fitted_on
        assert any(name.startswith(kind.prefixes) for name in device_names()), kind.name


def test_no_device_is_of_two_types():
    for name in device_names():
        kinds = [kind.name for kind in shipped_constants().devices if name.startswith(kind.prefixes)]
        assert len(kinds) < 2, name


@pytest.mark.parametrize("name", ["cpu", "a100-pcie-40g"])
def test_a_device_of_no_type_keeps_its_own_efficiencies(name: str):
    spec, constants = device(name), shipped_constants()
    assert not constants.is_fitted(spec)
    assert constants.of(spec).matmul_efficiency == spec.matmul_efficiency
    assert constants.of(spec).flash2_efficiency == spec.attention_efficiency
    assert constants.of(spec).memory_efficiency == spec.memory_efficiency


def test_values_are_plausible():
    constants = shipped_constants()
    assert constants.eager_factor > constants.eager_plain_factor > 1
    assert 0 < constants.straggler_share < 0.02
    for kind in constants.devices:
        assert 0.3 < kind.constants.matmul_efficiency < 0.95
        assert kind.constants.unfused_efficiency < kind.constants.matmul_efficiency
