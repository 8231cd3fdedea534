"""Summed cross-entropy over a vocabulary that may be split over tensor-parallel ranks.

Saves the logits in the compute dtype and one fp32 log-sum-exp a token; probabilities are computed
again in backward. Columns from `vocab_size` on are padding and take no part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.models.tensor_parallel import TensorParallel

IGNORE_INDEX = -100


def cross_entropy_sum(logits: Tensor, targets: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Return the fp32 sum of -log p(target) over all tokens whose target is not -100.

    `logits` is [tokens, padded vocabulary / tp], `targets` [tokens] int64.
    """
    return _CrossEntropy.apply(logits, targets, vocab_size, tp)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
        columns = logits.shape[-1]
        first = tp.index * columns
        num_valid = min(max(vocab_size - first, 0), columns)
        values = logits[:, :num_valid].float()
        highest = values.amax(-1) if num_valid else values.new_full((len(values),), -torch.inf)
        if tp.size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        position, is_here = _positions(targets, first, num_valid)
        exp_sum = (values - highest[:, None]).exp_().sum(-1)
        chosen = values.gather(-1, position[:, None]).squeeze(-1) if num_valid else torch.zeros_like(exp_sum)
        chosen = torch.where(is_here, chosen, 0.0)
        if tp.size > 1:
            both = torch.stack([exp_sum, chosen])
            dist.all_reduce(both, group=tp.group)
            exp_sum, chosen = both[0], both[1]
        log_sum_exp = highest + exp_sum.log()
        ctx.save_for_backward(logits, targets, log_sum_exp)
        ctx.first, ctx.num_valid = first, num_valid
        return torch.where(targets == IGNORE_INDEX, 0.0, log_sum_exp - chosen).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, log_sum_exp = ctx.saved_tensors
        probabilities = (logits[:, : ctx.num_valid].float() - log_sum_exp[:, None]).exp_()
        position, is_here = _positions(targets, ctx.first, ctx.num_valid)
        if ctx.num_valid:
            probabilities.scatter_add_(-1, position[:, None], -is_here[:, None].to(probabilities.dtype))
        probabilities.mul_((gradient * (targets != IGNORE_INDEX))[:, None])
        if ctx.num_valid == logits.shape[-1]:
            return probabilities.to(logits.dtype), None, None, None
        padded = torch.zeros_like(logits)
        padded[:, : ctx.num_valid] = probabilities
        return padded, None, None, None


def _positions(targets: Tensor, first: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Return each target's column on this rank (0 where it is elsewhere), and whether it is here."""
    position = targets - first
    is_here = (position >= 0) & (position < num_valid) & (targets != IGNORE_INDEX)
    return torch.where(is_here, position, 0), is_here
