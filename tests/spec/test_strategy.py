"""What makes a strategy valid, its names, and which layers can use it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.files import from_data
from meshwright.spec.legality import why_illegal
from meshwright.spec.library import model
from meshwright.spec.model import BlockLayer
from meshwright.spec.strategy import Strategy


@pytest.mark.parametrize(
    ("fields", "label", "num_devices"),
    [
        ({}, "single", 1),
        ({"tp": 4}, "tp4", 4),
        ({"dp_replicate": 8}, "dp8", 8),
        ({"tp": 2, "dp_replicate": 4}, "tp2-dp4", 8),
        ({"tp": 2, "dp_shard": 4, "zero_stage": 3}, "tp2-zero3x4", 8),
        ({"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}, "hsdp2x2-zero3", 4),
        ({"tp": 2, "dp_replicate": 2, "inner": "dp", "recompute": "full"}, "tp2-dp2-dp-inner+recompute", 4),
        ({"tp": 2, "sequence_parallel": True}, "tp2+sp", 2),
        ({"cp": 2}, "cp2", 2),
    ],
)
def test_labels_and_sizes(fields: dict[str, Any], label: str, num_devices: int):
    strategy = Strategy(**fields)
    assert (strategy.label, strategy.num_devices) == (label, num_devices)
    assert strategy.dp * strategy.tp * strategy.cp == num_devices


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp_shard": 2}, "zero_stage 0 shards nothing, but dp_shard is 2; use dp_replicate instead"),
        ({"zero_stage": 2}, "zero_stage 2 needs dp_shard >= 2, not 1"),
        ({"tp": 2, "inner": "dp"}, 'inner "dp" is the same as "tp"'),
        ({"dp_replicate": 2, "inner": "dp"}, 'inner "dp" is the same as "tp"'),
        ({"sequence_parallel": True}, "sequence_parallel needs tp >= 2"),
        ({"tp": 0}, "tp: .*greater than or equal to 1, not 0"),
        ({"tp": 2.0}, "tp: .*integer, not 2.0"),
        ({"tp": True}, "tp: .*integer, not True"),
        ({"zero_stage": 4}, "zero_stage: .*0, 1, 2 or 3, not 4"),
        ({"recompute": "some"}, "recompute: .*'none' or 'full', not 'some'"),
        ({"pp": 2}, "pp: unknown key"),
    ],
)
def test_invalid_ones_are_one_line(fields: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as caught:
        from_data(Strategy, fields, where="strategy")
    assert "\n" not in str(caught.value)


def test_strategies_are_values():
    assert Strategy(tp=2) == Strategy(tp=2)
    assert len({Strategy(tp=2), Strategy(tp=2), Strategy(tp=4)}) == 2
    with pytest.raises(ValidationError):
        Strategy(tp=2).tp = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_sort_key_tells_all_fields_apart():
    ones = [
        Strategy(),
        Strategy(tp=2),
        Strategy(tp=2, sequence_parallel=True),
        Strategy(dp_replicate=2),
        Strategy(dp_shard=2, zero_stage=2),
        Strategy(dp_shard=2, zero_stage=3),
        Strategy(recompute="full"),
        Strategy(cp=2),
        Strategy(ep=2),
        Strategy(tp=2, dp_replicate=2),
        Strategy(tp=2, dp_replicate=2, inner="dp"),
    ]
    assert len({one.sort_key for one in ones}) == len(ones)
    assert len(Strategy().sort_key) == len(Strategy.model_fields)


@pytest.mark.parametrize(
    ("layer", "fields", "samples", "reason"),
    [
        (1, {"tp": 2}, 1, None),
        (1, {"tp": 4}, 1, "tp 4 does not divide num_kv_heads=2; allowed: 1, 2"),
        (0, {"tp": 4}, 1, None),
        (0, {"tp": 3}, 1, "tp 3 does not divide padded_vocab_size=256; allowed: 1, 2, 4, 8"),
        (-1, {"dp_replicate": 4}, 6, "dp 4 does not divide the micro-batch of 6 samples"),
        (-1, {"dp_replicate": 3}, 6, None),
    ],
)
def test_why_illegal(layer: int, fields: dict[str, Any], samples: int, reason: str | None):
    assert why_illegal(model("tiny-llama").layers[layer], Strategy(**fields), samples) == reason


def test_tensor_parallelism_splits_shared_experts_too():
    block = model("mixtral-8x7b").layers[1]
    assert isinstance(block, BlockLayer)
    assert block.mlp.experts is not None
    assert why_illegal(block, Strategy(tp=4), 1) is None
    shared = block.mlp.experts.model_copy(update={"shared_ffn_size": 6})
    layer = block.model_copy(update={"mlp": block.mlp.model_copy(update={"experts": shared})})
    assert why_illegal(layer, Strategy(tp=2), 1) is None
    assert why_illegal(layer, Strategy(tp=4), 1) == "tp 4 does not divide shared_ffn_size=6; allowed: 1, 2, 3, 6"
