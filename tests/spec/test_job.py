"""Batch sizes as people write them."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.spec.job import BatchRange, parse_batch


def test_a_number_a_range_and_auto():
    assert parse_batch(" 64 ") == 64
    assert parse_batch("8..512") == BatchRange(smallest=8, largest=512)
    assert parse_batch("auto") == "auto"


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "\u00b2", "\u0663", "8..4", "0..4", "1e3", "9" * 30, "1..1000000000000", "8...16", "x"],
)
def test_anything_else_is_refused_in_one_line(text: str):
    with pytest.raises(UserError, match="global-batch") as caught:
        parse_batch(text)
    assert "\n" not in str(caught.value)
