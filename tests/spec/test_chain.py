"""Layers that do not follow each other are refused, by name and shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.spec.library import model
from meshwright.spec.model import LayerGroup, ModelSpec
from meshwright.spec.tensors import ParameterSpec

Groups = list[dict[str, Any]]


def remade(name: str, change: Any) -> ModelSpec:
    data = model(name).model_dump(mode="json")
    change(data["groups"])
    return ModelSpec.model_validate_json(json.dumps(data))


def swap(groups: Groups, one: int, other: int) -> None:
    groups[one], groups[other] = groups[other], groups[one]


def kinds(name: str) -> list[int]:
    """Return the indices of the decoder's groups."""
    return [
        index
        for index, group in enumerate(model(name).groups)
        if getattr(group.layer, "cross_attention", None) is not None
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: swap(groups, kinds("t5-small")[0], kinds("t5-small")[1]),
        lambda groups: swap(groups, 1, 2),
        lambda groups: groups[1]["layer"].update(carries=[]),
        lambda groups: groups[kinds("t5-small")[0]]["layer"].update(carries=[]),
        lambda groups: groups[1]["layer"]["carries"].reverse(),
        lambda groups: groups[1]["layer"]["carries"][0].update(name="foo"),
        lambda groups: groups[1]["layer"]["carries"][0].update(shape=["target_seq", 97]),
        lambda groups: groups[1]["layer"]["attention"]["relative"].update(owns_table=False),
        lambda groups: groups[2]["layer"]["attention"]["relative"].update(num_buckets=16),
        lambda groups: groups[1].update(num_layers=2),
        lambda groups: groups[-2]["layer"].update(carries=groups[-3]["layer"]["carries"]),
    ],
)
def test_what_travels_beside_must_agree(change: Any):
    with pytest.raises(ValidationError, match=r"groups\[\d+\].*is handed on, but .* taken"):
        remade("t5-small", change)


def twice(groups: Groups) -> None:
    next(group for group in groups if group["layer"]["kind"] == "merge").update(num_layers=2)


def test_widths_must_agree_also_with_repetition():
    with pytest.raises(ValidationError, match=r"groups\[\d+\]: merge cannot follow itself 2 times"):
        remade("tiny-swin", twice)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tiny-vit", {"usual_seq_len": 5}, "not the 17 tokens of an image"),
        ("bert-base", {"max_seq_len": 4000}, r"max_seq_len \(4000\) is above the embedding's max_positions \(512\)"),
        ("bert-base", {"usual_seq_len": 513}, "usual_seq_len .513. is above max_seq_len"),
        ("bert-base", {"name": "a\nb"}, "name must be printable"),
    ],
)
def test_lengths_and_names(name: str, change: dict[str, Any], message: str):
    data = model(name).model_dump()
    with pytest.raises(ValidationError, match=message):
        ModelSpec.model_validate(data | change)


def test_a_vocabulary_needs_tokens():
    swin, gpt = model("tiny-swin"), model("tiny-gpt2")
    head = gpt.head.model_copy(update={"hidden_size": swin.head.hidden_size, "length": swin.head.length})
    groups = (*swin.groups[:-1], LayerGroup(num_layers=1, layer=head))
    with pytest.raises(ValidationError, match="needs an embedding of tokens"):
        ModelSpec(name="x", family="x", groups=groups)


@pytest.mark.parametrize("change", [{"tp_dim": 2}, {"shape": ()}])
def test_parameters_that_cannot_be(change: dict[str, Any]):
    with pytest.raises(ValidationError, match=r"tp_dim|shape"):
        ParameterSpec.model_validate({"name": "w", "shape": (4, 4), **change})
