"""Training on one device, in the plainest way: what every plan is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models import build_model
from meshwright.models.loss import IGNORE_INDEX
from meshwright.runtime.initialize import initialize
from meshwright.spec.plan import Plan
from tests.parity.cases import SEQ_LEN

NUM_STEPS = 3


def make_batch(plan: Plan, step: int) -> tuple[Tensor, Tensor]:
    """Return ids and targets of a global batch; the share of ignored tokens differs from sample to sample."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (plan.global_batch_size, SEQ_LEN)
    ids = torch.randint(0, plan.model.vocab_size, shape, generator=generator)
    targets = torch.randint(0, plan.model.vocab_size, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < torch.linspace(0.0, 0.6, plan.global_batch_size)[:, None]
    return ids, targets.masked_fill(ignored, IGNORE_INDEX)


def train_reference(plan: Plan) -> dict[str, dict[str, Tensor]]:
    """Return losses, gradient norms, first-step gradients and final parameters of a few fp32 steps."""
    model = build_model(plan.model, "cpu")
    initialize(model, plan.model, seed=7)
    settings = plan.job.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses, norms, gradients = [], [], {}
    for step in range(NUM_STEPS):
        ids, targets = make_batch(plan, step)
        optimizer.zero_grad()
        loss = model(ids, targets) / (targets != IGNORE_INDEX).sum()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm).detach())
        losses.append(loss.detach())
        optimizer.step()
    return {
        "curve": {"losses": torch.stack(losses), "norms": torch.stack(norms)},
        "gradients": gradients,
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
    }
