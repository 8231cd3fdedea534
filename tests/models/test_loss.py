"""The summed cross-entropy against torch's, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from meshwright.models.loss import IGNORE_INDEX, cross_entropy_sum
from meshwright.models.tensor_parallel import SINGLE


def case(dtype: torch.dtype, padded: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(padded)
    logits = (scale * torch.randn(40, padded)).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (40,)).masked_fill(torch.rand(40) < 0.3, IGNORE_INDEX)
    return logits, targets


def reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return torch's loss and its gradient, in fp64, of the columns that are not padding."""
    exact = logits.detach().double().requires_grad_()
    loss = cross_entropy(exact[:, :50], targets, ignore_index=IGNORE_INDEX, reduction="sum")
    loss.backward()
    assert exact.grad is not None
    return loss.detach(), exact.grad


@pytest.mark.parametrize("padded", [50, 64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_it_is_torchs_loss(dtype: torch.dtype, tolerance: float, padded: int):
    logits, targets = case(dtype, padded)
    loss = cross_entropy_sum(logits, targets, 50, SINGLE)
    (3.0 * loss).backward()
    expected, gradient = reference(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6), "sums are in fp32 whatever the logits are"
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert torch.allclose(logits.grad.double(), 3.0 * gradient, atol=3 * tolerance, rtol=tolerance)
    assert not logits.grad[:, 50:].any()
    assert not logits.grad[targets == IGNORE_INDEX].any()


def test_padding_columns_count_nothing_whatever_they_hold():
    logits, targets = case(torch.float32, 64)
    other = logits.detach().clone()
    other[:, 50:] = 1e4
    assert torch.equal(cross_entropy_sum(other, targets, 50, SINGLE), cross_entropy_sum(logits, targets, 50, SINGLE))


def test_large_logits_do_not_overflow():
    logits, targets = case(torch.float32, 64, scale=1e4)
    assert cross_entropy_sum(logits, targets, 50, SINGLE).item() == pytest.approx(reference(logits, targets)[0].item())


def test_nothing_counts_when_all_is_ignored():
    logits, targets = case(torch.float32, 64)
    loss = cross_entropy_sum(logits, torch.full_like(targets, IGNORE_INDEX), 50, SINGLE)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
