"""Specs are values: a copy with other fields is as good as one made from them."""

from __future__ import annotations

from meshwright.spec.library import model
from meshwright.spec.strategy import Strategy


def test_a_changed_copy_equals_and_hashes_as_one_made_so():
    first = Strategy(tp=2, dp_replicate=2)
    assert {first: "first"}[first] == "first"  # its hash is known now
    changed = first.model_copy(update={"recompute": "full"})
    made = Strategy(tp=2, dp_replicate=2, recompute="full")
    assert changed == made
    assert hash(changed) == hash(made) != hash(first)
    assert {made, changed, first.model_copy()} == {made, first}


def test_what_follows_from_fields_follows_from_changed_ones():
    spec = model("tiny-llama")
    assert len(spec.layers) == 6
    groups = (spec.groups[0], spec.groups[1].model_copy(update={"num_layers": 2}), spec.groups[2])
    assert len(spec.model_copy(update={"groups": groups}).layers) == 4
