"""AdamW over the parameters that a rank holds, and the learning rate of a step."""

from __future__ import annotations

from math import cos, pi

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.spec.job import AdamW


def make_optimizer(parameters: list[nn.Parameter], settings: AdamW) -> torch.optim.AdamW:
    """Return fused AdamW with its states allocated. Matrices decay, norms and biases do not."""
    # One fused call takes DTensors or ordinary tensors, never both.
    groups = [
        {
            "params": [p for p in parameters if (p.ndim > 1) == decays and isinstance(p, DTensor) == is_dtensor],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
        for is_dtensor in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters:
        # Made now and not at the first step, so that a checkpoint can be loaded into them.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(settings: AdamW, step: int, num_steps: int) -> float:
    """Return the rate of step `step` (from 0): a linear warm-up, then a cosine down to the final fraction."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    decay_steps = max(1, num_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    final = settings.final_lr_fraction
    return settings.lr * (final + (1.0 - final) * 0.5 * (1.0 + cos(pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
