"""What the modules refuse, how whole models are called, and with which values they start."""

from __future__ import annotations

import re

import pytest
import torch

from meshwright.errors import UserError
from meshwright.models.build import build_layer, build_model
from meshwright.runtime.initialize import initial_parameter, initialize
from meshwright.spec.library import model
from meshwright.spec.model import BlockLayer, ClassifierLayer, PatchEmbeddingLayer
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"relative": None}, "cross_attention, but without attention.relative"),
        ({"num_kv_heads": 2}, "attention.relative and grouped queries"),
    ],
)
def test_what_no_family_has_is_priced_only(changes: dict[str, object], reason: str):
    block = model("tiny-t5").layers[-2]
    assert isinstance(block, BlockLayer)
    attention = block.attention.model_copy(update=changes)
    with pytest.raises(UserError, match=f"^block with {re.escape(reason)} can be planned and priced, but not trained"):
        build_layer(block.model_copy(update={"attention": attention}))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-swin"])
def test_a_model_takes_targets_by_name_too(name: str):
    spec = model(name)
    whole = build_model(spec, "cpu")
    initialize(whole, spec, seed=0)
    if isinstance(spec.embedding, PatchEmbeddingLayer):
        size = spec.embedding.image_size
        inputs, targets = (torch.randn(2, spec.embedding.num_channels, size, size),), torch.tensor([0, 1])
    else:
        inputs = tuple(torch.randint(0, 9, (2, length)) for length in ((8, 6) if spec.has_targets else (8,)))
        targets = inputs[-1]
    assert torch.equal(whole(*inputs, targets), whole(*inputs, targets=targets))
    classes = spec.head.num_classes if isinstance(spec.head, ClassifierLayer) else spec.vocab_size
    assert whole.logits(*inputs).shape == (*targets.shape, classes)


def test_initial_values():
    """Norms one, biases and padding zero, a class token and tables small, queries of unscaled scores smaller."""
    draw = initial_parameter(model("tiny-vit"), seed=0)
    assert 0.01 < draw("layers.0.class_token").std() < 0.03
    assert not draw("layers.0.projection.bias").any()
    assert (draw("layers.1.norm1.weight") == 1).all()
    spec = model("tiny-t5")
    block, draw = spec.layers[1], initial_parameter(spec, seed=0)
    assert isinstance(block, BlockLayer)
    assert 0.01 < draw("layers.1.attention.relative.weight").std() < 0.03
    keys, queries = (draw(f"layers.1.attention.{part}.weight").std() for part in "kq")
    assert float(keys / queries) == pytest.approx(block.attention.head_size**0.5, rel=0.1)
    last = len(spec.layers) - 2
    outputs = [draw(f"layers.{last}.{part}.out.weight").std() for part in ("attention", "cross_attention")]
    assert float(outputs[0] / outputs[1]) == pytest.approx(1.0, rel=0.1)
    assert (draw("layers.0.token.weight")[spec.vocab_size :] == 0).all()
