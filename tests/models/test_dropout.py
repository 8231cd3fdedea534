"""Masks depend on what is dropped alone: rates, independence of how a batch is cut, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.models import build_model
from meshwright.models.dropout import Place, drop
from meshwright.runtime.initialize import initialize
from meshwright.spec.families import model_from_config
from tests.configs import BERT, GPT2, SWIN, T5, VIT

PLACE = Place(seed=1, step=2, layer=3, first_sample=0, rate=0.1)
ONES = torch.ones(64, 128, 96)


def mask(place: Place = PLACE, site: int = 0, like: Tensor = ONES) -> Tensor:
    """Return which elements stay."""
    return drop(torch.ones_like(like), place, site) != 0


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_kept_everywhere(rate: float):
    """In all, and in every sample, position and channel, within five standard deviations."""
    dropped = (~mask(PLACE._replace(rate=rate))).double()
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        mean = dropped.mean(dims)
        deviation = (rate * (1 - rate) / (dropped.numel() / mean.numel())) ** 0.5
        assert (mean - rate).abs().max() < 5 * deviation


def test_what_stays_is_scaled_up():
    values = drop(torch.full((4, 8, 8), 3.0), PLACE._replace(rate=0.25), 0).unique()
    assert torch.allclose(values, torch.tensor([0.0, 4.0]))


def test_masks_of_different_places_are_independent():
    masks = [
        mask(),
        mask(site=1),
        *(mask(PLACE._replace(**{field: getattr(PLACE, field) + 1})) for field in ("seed", "step", "layer")),
        mask(PLACE._replace(first_sample=len(ONES))),
        mask().roll(1, 0),  # a sample and the next
        mask().roll(1, 1),
        mask().roll(1, 2),
    ]
    deviation = 1 / (ONES.numel() ** 0.5)  # of a correlation
    for i, one in enumerate(masks):
        for other in masks[:i]:
            correlation = torch.corrcoef(torch.stack([one.flatten().float(), other.flatten().float()]))[0, 1]
            assert abs(correlation) < 5 * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_of_the_batch_drops_the_same(dtype: torch.dtype):
    x = torch.randn(12, 7, 5).to(dtype)
    whole = drop(x, PLACE, 0)
    for first, count in ((0, 12), (3, 4), (11, 1)):
        part = drop(x[first : first + count], PLACE._replace(first_sample=first), 0)
        assert torch.equal(part, whole[first : first + count])


def test_the_gradient_has_the_same_mask_and_nothing_is_kept():
    x = torch.randn(6, 7, 5, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = drop(x, PLACE._replace(rate=0.4), 0)
    assert not kept
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, weights * (y / x).detach())
    assert (x.grad == 0).sum() == (y == 0).sum()


def test_no_place_or_no_rate_drops_nothing():
    assert drop(ONES, None, 0) is ONES
    assert drop(ONES, PLACE._replace(rate=0.0), 0) is ONES


MODELS: dict[str, dict[str, Any]] = {"gpt2": GPT2, "bert": BERT, "t5": T5, "vit": VIT, "swin": SWIN}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_micro_batches_drops_what_it_drops_whole(name: str):
    spec = model_from_config({"model_type": name, **MODELS[name]}, name=name, where="config.json")
    model = build_model(spec, "cpu")
    initialize(model, spec, seed=0)
    torch.manual_seed(0)
    if spec.fixed_seq_len:
        inputs, targets = (torch.randn(4, 3, 32, 32),), torch.randint(0, 2, (4,))
    else:
        inputs = tuple(torch.randint(0, 300, (4, length)) for length in ((8, 6) if spec.has_targets else (8,)))
        targets = torch.randint(0, 300, inputs[-1].shape)
    place = PLACE._replace(rate=0.3)
    with torch.no_grad():
        whole = model(*inputs, targets=targets, at=place).item()
        parts = [
            model(*(x[i : i + 2] for x in inputs), targets=targets[i : i + 2], at=place._replace(first_sample=i)).item()
            for i in (0, 2)
        ]
        assert sum(parts) == pytest.approx(whole, rel=1e-5)
        assert abs(whole - model(*inputs, targets).item()) > 1e-4, "something is dropped"
        assert model(*inputs, targets, at=place._replace(step=3)).item() != whole
