"""Samples: what they are keyed by, how two measurements become one, how a profile keeps and refuses them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright
from meshwright.measure.overlap import slowdowns
from meshwright.measure.task import ladder
from meshwright.spec.profile import SAMPLE_FIELDS, CollectiveSample, CopySample, LayerSample, Profile, Sample


def copy(seconds: float, *, spread: float = 0.0, repeats: int = 3) -> CopySample:
    return CopySample(moved_bytes=8, busy_ranks=2, seconds=seconds, spread=spread, repeats=repeats)


def layer(forward_s: float, backward_s: float) -> LayerSample:
    return LayerSample(
        layer=meshwright.model("tiny-llama").groups[1].layer, tp=1, samples_per_rank=2, seq_len=8, dtype="fp32",
        busy_ranks=2, repeats=3, forward_s=forward_s, backward_s=backward_s, saved_bytes=100,
    )  # fmt: skip


def test_a_key_is_what_was_measured_and_not_what_came_out():
    assert copy(1.0).key == copy(2.0, spread=0.5, repeats=9).key
    assert layer(1.0, 2.0).key == layer(3.0, 4.0).key
    other = CollectiveSample(op="send", num_ranks=2, stride=1, message_bytes=8, seconds=1.0)
    assert other.key != other.model_copy(update={"stride": 2}).key
    assert other.key != other.model_copy(update={"dtype": "bf16"}).key


def test_two_measurements_become_one_that_covers_both():
    both = copy(1.0, spread=0.01).joined(copy(1.5, spread=0.02))
    assert both.seconds == pytest.approx(1.25)
    assert both.repeats == 6
    assert both.seconds * (1 - both.spread) <= 1.0 + 1e-12
    assert both.seconds * (1 + both.spread) >= 1.5 - 1e-12
    assert copy(1.0, spread=0.3).joined(copy(1.0)).spread == 0.3
    layers = layer(1.0, 2.0).joined(layer(1.0, 4.0))
    assert (layers.forward_s, layers.backward_s, layers.saved_bytes) == (1.0, pytest.approx(3.0), 100)
    assert layers.spread == pytest.approx(1 / 3)


def test_every_kind_of_sample_has_a_field_of_the_profile():
    kinds = set(Sample.__subclasses__())
    assert set(SAMPLE_FIELDS.values()) == kinds
    blank = Profile(device="d", backend="cpu", num_ranks=2, torch_version="0")
    kept = blank.with_samples((copy(1.0), layer(1.0, 1.0)), is_complete=False)
    assert kept.samples == (copy(1.0), layer(1.0, 1.0))
    assert not kept.is_complete


@given(smallest=st.integers(1, 100), factor=st.integers(1, 10_000), ratio=st.integers(2, 16))
def test_a_ladder_leaves_no_wide_gap(smallest: int, factor: int, ratio: int):
    sizes = ladder(smallest, smallest * factor, ratio)
    assert (sizes[0], sizes[-1]) == (smallest, smallest * factor)
    assert all(low < high <= ratio * low for low, high in pairwise(sizes))


@given(compute=st.floats(0.1, 10), communication=st.floats(0.1, 10), slower=st.floats(1, 3), its_slower=st.floats(1, 3))
def test_slowdowns_are_found_again(compute: float, communication: float, slower: float, its_slower: float):
    """Both start at 0, slow each other until one is done, and the other one goes on at its own speed."""
    first_s = min(compute * slower, communication * its_slower)
    compute_end_s = first_s + (compute - first_s / slower)
    end_s = first_s + (communication - first_s / its_slower)
    found = slowdowns(compute, communication, compute_end_s, end_s)
    assert found == (pytest.approx(slower, rel=1e-6), pytest.approx(its_slower, rel=1e-6))
