"""What a user may insist on, and what is refused in one line."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.search.wanted import Wanted, parse_wanted
from meshwright.spec.strategy import Strategy


def test_all_names_are_read():
    wanted = parse_wanted("tp=2 dp=4, replicate=2 shard=2 zero=3 recompute=full inner=dp pp=8 m=16")
    expected = Wanted(
        text=wanted.text, tp=2, dp=4, dp_replicate=2, dp_shard=2, zero_stage=3, recompute="full", inner="dp",
        num_stages=8, num_micro_batches=16,
    )  # fmt: skip
    assert wanted == expected


def test_what_is_not_said_is_free():
    wanted = parse_wanted("zero=3")
    assert wanted.allows(Strategy(dp_shard=4, zero_stage=3))
    assert wanted.allows(Strategy(tp=2, dp_shard=2, zero_stage=3, recompute="full", inner="dp"))
    assert not wanted.allows(Strategy(dp_shard=4, zero_stage=2))
    assert parse_wanted("dp=4").allows(Strategy(dp_replicate=2, dp_shard=2, zero_stage=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing is asked"),
        ("tp", "'tp' is not understood"),
        ("tp=8 tp=4", "tp is given twice"),
        ("tp=0", "tp must be a whole number of at least 1, not '0'"),
        ("zero=-1", "zero must be a whole number of at least 0, not '-1'"),
        ("tp=eight", "not 'eight'"),
        ("tp=\u0668", "must be a whole number"),
        ("recompute=some", "recompute must be none or full, not 'some'"),
        ("stages=4", "'stages=4' is not understood; write such as"),
        ("tp=99999999999999999999", "must be a whole number"),
    ],
)
def test_bad_wishes_are_one_line(text: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        parse_wanted(text)
    assert "\n" not in str(caught.value)
