"""Layers that hand on several tensors: hidden states, a second float tensor with its own gradient, and integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshwright.models import Transformer, build_model
from meshwright.models.blocks import Block
from meshwright.models.embedding import Embedding
from meshwright.models.heads import Head
from meshwright.runtime import pipeline
from meshwright.runtime.initialize import initialize
from meshwright.spec.model import LayerSpec
from meshwright.spec.plan import Plan
from meshwright.spec.tensors import TensorSpec
from tests.parity.cases import llama, make_plan, s
from tests.parity.reference import make_batch

Tensors = tuple[Tensor, ...]


def tuple_plan() -> Plan:
    """Two uneven stages of two ranks, with re-layouts inside both and at the border."""
    return make_plan(
        llama(),
        [[(1, s(rep=2)), (1, s(tp=2, recompute=True))], [(2, s(shard=2, zero=3)), (1, s(tp=2)), (1, s(rep=2))]],
        micro_batches=4,
        batch=16,
    )


@contextmanager
def handing_on_tuples() -> Iterator[None]:
    """Let every layer hand on (hidden, memory, ids) inside the block."""
    embedding, block, head = Embedding.forward, Block.forward, Head.forward

    def from_embedding(self: Embedding, ids: Tensor) -> Tensors:
        x = embedding(self, ids)
        return x, 0.5 * x, ids

    def from_block(self: Block, x: Tensor, memory: Tensor, ids: Tensor) -> Tensors:
        return block(self, x) + memory * (ids % 3 == 0)[..., None], 1.1 * memory, ids

    def from_head(self: Head, x: Tensor, memory: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        return head(self, x + memory * (ids % 2)[..., None], targets)

    def hands_on(layer: LayerSpec) -> tuple[TensorSpec, ...]:
        hidden = ("seq", layer.hidden_size)
        return (
            TensorSpec(name="hidden", shape=hidden),
            TensorSpec(name="memory", shape=hidden),
            TensorSpec(name="ids", shape=("seq",), dtype="int64"),
        )

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (Embedding, "forward", from_embedding),
        (Block, "forward", from_block),
        (Head, "forward", from_head),
        (pipeline, "hands_on", hands_on),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def tuple_reference(plan: Plan, seed: int) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients on one device, layer by layer in a plain loop."""
    model: Transformer = build_model(plan.model, "cpu")
    initialize(model, plan.model, seed=seed)
    handed, targets = make_batch(plan, 0)
    for layer in list(model.layers)[:-1]:
        handed = layer(*handed)
    loss = model.layers[-1](*handed, targets) / (targets != -100).sum()
    loss.backward()
    gradients = {name: torch.clone(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients
