"""Where a loss or a gradient stopped being finite: which layer first, on which rank, in which micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.runtime.parallelize import Batch, Engine

_NOWHERE = 1 << 30


class NotFiniteError(UserError):
    """Training has diverged: one line with the step and what first was not finite."""

    exit_code = 1
    on_every_rank = True


def raise_not_finite(engine: Engine, batch: Batch, step: int) -> None:
    """Raise NotFiniteError that names the layer. Collective: every rank has seen the same bad loss or norm.

    Looks at the gradients in hand, then runs the batch forward once more with an eye on every output.
    """
    bad_gradients = _first(
        [-_layer_of(held.name) for held in engine.held if not bool(torch.isfinite(held.local_gradient).all())]
    )
    micro_batch, layer, rank = _first_bad_output(engine, batch)
    if layer < _NOWHERE:
        what = _describe(engine, layer)
        raise NotFiniteError(
            f"step {step}: the loss is not finite; {what} first produced values that are not, "
            f"in micro-batch {micro_batch} on rank {rank}. Lower the learning rate or look at the data of this step"
        )
    what = _describe(engine, -bad_gradients) if bad_gradients < _NOWHERE else "no single layer"
    raise NotFiniteError(
        f"step {step}: the gradient norm is not finite, though the loss is; in the backward pass {what} is the first. "
        "Lower the learning rate or clip_norm"
    )


def _first_bad_output(engine: Engine, batch: Batch) -> tuple[int, int, int]:
    """Return micro-batch, layer and rank of the first output that is not finite, over all ranks."""
    found = [_NOWHERE]
    calls: dict[int, int] = {}
    hooks = [
        layer.register_forward_hook(_watcher(int(name), calls, found, len(engine.plan.model.layers)))
        for name, layer in engine.stage.layers.items()
    ]
    try:
        engine.evaluate(batch, engine.plan.num_micro_batches)
    finally:
        for hook in hooks:
            hook.remove()
    ranks = dist.get_world_size()
    place = _first([found[0] * ranks + engine.world.rank] if found[0] < _NOWHERE else [])
    if place >= _NOWHERE:
        return 0, _NOWHERE, 0
    order, rank = divmod(place, ranks)
    micro_batch, layer = divmod(order, len(engine.plan.model.layers))
    return micro_batch, layer, rank


def _watcher(
    index: int, calls: dict[int, int], found: list[int], num_layers: int
) -> Callable[[nn.Module, object, object], None]:
    def watch(_module: nn.Module, _inputs: object, output: object) -> None:
        micro_batch = calls.get(index, 0)
        calls[index] = micro_batch + 1
        outputs = output if isinstance(output, tuple) else (output,)
        if any(isinstance(x, Tensor) and not bool(torch.isfinite(x).all()) for x in outputs):
            found[0] = min(found[0], micro_batch * num_layers + index)

    return watch


def _first(candidates: list[int]) -> int:
    """Return the least candidate over all ranks."""
    least = torch.tensor([min(candidates, default=_NOWHERE)], dtype=torch.int64)
    if dist.get_backend() == "nccl":
        least = least.cuda()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def _describe(engine: Engine, layer: int) -> str:
    return f"layer {layer} ({engine.plan.model.layers[layer].kind})"
