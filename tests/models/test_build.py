"""What the modules refuse."""

from __future__ import annotations

import pytest

from meshwright.errors import UserError
from meshwright.models.build import build_layer
from meshwright.spec.library import model
from meshwright.spec.model import BlockLayer
from meshwright.spec.parts import ExpertsSpec, LatentSpec

BLOCK = model("tiny-llama").layers[1]


def test_experts_are_priced_only():
    assert isinstance(BLOCK, BlockLayer)
    mlp = BLOCK.mlp.model_copy(update={"experts": ExpertsSpec(num_experts=8, top_k=2)})
    with pytest.raises(UserError, match=r"^block with mlp\.experts can be planned and priced, but not trained yet$"):
        build_layer(BLOCK.model_copy(update={"mlp": mlp}))


def test_latent_attention_is_priced_only():
    assert isinstance(BLOCK, BlockLayer)
    latent = LatentSpec(query_rank=0, kv_rank=8, rope_size=4, value_size=16)
    attention = BLOCK.attention.model_copy(update={"latent": latent})
    with pytest.raises(
        UserError, match=r"^block with attention\.latent can be planned and priced, but not trained yet$"
    ):
        build_layer(BLOCK.model_copy(update={"attention": attention}))
