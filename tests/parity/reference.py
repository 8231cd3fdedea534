"""Training on one device, in the plainest way: what every plan is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.models import build_model
from meshwright.models.dropout import Place
from meshwright.models.loss import IGNORE_INDEX
from meshwright.runtime.initialize import initialize
from meshwright.spec.model import ClassifierLayer
from meshwright.spec.plan import Plan
from meshwright.spec.sample import input_shapes, target_shape

NUM_STEPS = 3


def make_batch(plan: Plan, step: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return inputs and targets of a global batch; the share of ignored targets differs from sample to sample."""
    generator = torch.Generator().manual_seed(1000 + step)
    model, batch = plan.model, plan.global_batch_size

    def numbers(below: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, below, (batch, *shape), generator=generator)

    shapes = input_shapes(model, plan.job)
    if model.vocab_size:
        inputs = tuple(numbers(model.vocab_size, shape) for shape in shapes)
    else:
        inputs = tuple(torch.randn(batch, *shape, generator=generator) for shape in shapes)
    shape = target_shape(model, plan.job)
    classes = model.head.num_classes if isinstance(model.head, ClassifierLayer) else model.vocab_size
    targets = numbers(classes, shape)
    shares = torch.linspace(0.0, 0.6, batch).reshape(-1, *[1] * len(shape))
    ignored = torch.rand(targets.shape, generator=generator) < shares
    return inputs, targets.masked_fill(ignored, IGNORE_INDEX)


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
        inputs, targets = make_batch(plan, step)
        at = Place(seed=7, step=step, layer=0, first_sample=0, rate=plan.job.dropout)
        optimizer.zero_grad()
        loss = model(*inputs, targets=targets, at=at) / (targets != IGNORE_INDEX).sum()
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
