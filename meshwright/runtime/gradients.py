"""When gradients are reduced and parameters let go, and what is summed once a step.

* ZeRO-0: accumulate locally, all-reduce with the last micro-batch; parameters stay gathered until then.
* ZeRO-2: reduce-scatter every micro-batch; parameters stay gathered until the last.
* ZeRO-3: reduce-scatter every micro-batch; parameters are let go after every pass.
With hybrid sharding the shards are all-reduced over the replicas with the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.groups import World
from meshwright.runtime.initialize import local_data
from meshwright.runtime.split import ZERO_3
from meshwright.spec.mesh import MeshShape
from meshwright.spec.parameters import ParameterSpec
from meshwright.spec.strategy import Strategy

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class HeldParameter:
    """A parameter of this rank: its tensor, what it is, and how its layer is spread."""

    name: str
    tensor: nn.Parameter
    spec: ParameterSpec
    strategy: Strategy
    is_second_copy: bool = False  # of a weight tied across stages

    @property
    def num_copies(self) -> int:
        """Ranks of the stage that hold the same elements."""
        return self.strategy.dp_replicate * (1 if self.spec.tp_dim is not None else self.strategy.tp)

    @property
    def local_gradient(self) -> Tensor:
        gradient = self.tensor.grad
        if gradient is None:
            raise RuntimeError(f"{self.name} has no gradient; does the layer use it?")
        return local_data(gradient)


def set_policy(unit: FSDPModule, strategy: Strategy, *, is_last: bool) -> None:
    """Tell one sharded unit what to do in the backward passes of this micro-batch."""
    unit.set_requires_gradient_sync(is_last or strategy.zero_stage > 0, recurse=False)
    unit.set_requires_all_reduce(is_last, recurse=False)
    unit.set_reshard_after_backward(is_last or strategy.zero_stage == ZERO_3, recurse=False)


def set_prefetch(units: list[FSDPModule]) -> None:
    """Let each unit, in the order of the backward pass, gather the next one's parameters ahead.

    Left to itself `fully_shard` prefetches by the order of past forward passes, which under 1F1B
    belong to other micro-batches: it would gather parameters that nobody is about to use.
    """
    for unit, following in zip(units, [*units[1:], *units[-1:]], strict=True):
        unit.set_modules_to_backward_prefetch([following])


def sum_split_norms(held: Iterable[HeldParameter], world: World) -> None:
    """Sum the gradients of norms that act on split heads over the tensor-parallel ranks."""
    for parameter in held:
        if parameter.spec.acts_on_split and parameter.strategy.tp > 1:
            gradient = parameter.local_gradient
            if gradient.numel():
                dist.all_reduce(gradient, group=world.axis_group(MeshShape.of(parameter.strategy), "tp"))


def sum_tied(held: Iterable[HeldParameter], world: World) -> None:
    """Sum the gradients of the two copies of a weight tied across stages, in place on both."""
    if world.plan.num_stages == 1 or not world.plan.model.tied_embedding:
        return
    pair = (world.column[0], world.column[-1])
    if world.rank in pair:
        weight = next(p for p in held if p.name == TIED_NAME)
        gradient = weight.local_gradient
        if gradient.numel():
            dist.all_reduce(gradient, group=world.groups[pair, "collective"])


def squared_norm(held: Iterable[HeldParameter]) -> Tensor:
    """Return this rank's share of the squared global gradient norm: shares of all ranks sum to it."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in held:
        if not parameter.is_second_copy:
            by_copies.setdefault(parameter.num_copies, []).append(parameter.local_gradient)
    total = torch.zeros((), dtype=torch.float64)
    for copies, gradients in by_copies.items():
        present = [g for g in gradients if g.numel()] or [torch.zeros(1)]
        norms = torch.stack(torch._foreach_norm(present))
        total = total + norms.double().square().sum().cpu() / copies
    return total


def clip(held: Iterable[HeldParameter], norm: float, max_norm: float) -> None:
    """Scale all gradients so that their global norm, `norm`, is at most `max_norm`."""
    scale = max_norm / (norm + _CLIP_EPS)
    if scale < 1.0:
        scale_gradients(held, scale)


def scale_gradients(held: Iterable[HeldParameter], scale: float) -> None:
    """Multiply every gradient of this rank by `scale`."""
    torch._foreach_mul_([p.local_gradient for p in held], scale)


TIED_NAME = "layers.0.token.weight"
