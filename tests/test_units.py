"""Sizes and times between people and the program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.units import GiB, parse_bytes, show_bytes, show_count, show_percent, show_seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GiB", 80 * GiB), ("40 GB", 40_000_000_000), ("512mib", 512 * 1024**2), ("1.5e9", 1_500_000_000), ("7B", 7)],
)
def test_parse_bytes(text: str, num_bytes: int):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "80 XB", "-1GiB", "1e999", "0", "nan", "80 GiB each"])
def test_parse_bytes_refuses(text: str):
    with pytest.raises(UserError, match="budget: "):
        parse_bytes(text, field="budget")


@given(st.integers(1, 10**15))
def test_shown_bytes_are_near_what_was_meant(num_bytes: int):
    assert parse_bytes(show_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


def test_shown():
    assert (show_bytes(0), show_bytes(1023), show_bytes(1.5 * GiB)) == ("0 B", "1023 B", "1.50 GiB")
    assert (show_seconds(0), show_seconds(2.409), show_seconds(0.0352)) == ("0 s", "2.41 s", "35.2 ms")
    assert (show_seconds(8.1e-6), show_seconds(5e-9)) == ("8.10 us", "5 ns")
    assert (show_count(124_439_808), show_count(512), show_percent(0.031)) == ("124M", "512", "+3.1 %")


def test_a_small_number_without_a_unit_is_refused():
    with pytest.raises(UserError, match="38GiB"):
        parse_bytes("38")
    assert parse_bytes("1500000000") == 1_500_000_000
