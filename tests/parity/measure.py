"""What a rank really holds: storage bytes of states, and of what autograd keeps of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.models.tables import shared_tables
from meshwright.runtime.initialize import local_data
from meshwright.runtime.parallelize import Batch, Engine


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind `tensors`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(local_data, tensors)}
    return sum(storages.values())


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(local_data(value).numel() * local_data(value).element_size() for value in states)


def saved_activation_bytes(engine: Engine, batch: Batch) -> int:
    """Return the bytes that one micro-batch's forward pass keeps for backward on this rank, parameters excluded.

    The pipeline is run whole (forward and backward); only the first micro-batch's forward is counted.
    """
    kept: dict[int, int] = {}
    count_calls = 0

    def note(x: Tensor) -> Tensor:
        x_local = x.to_local() if isinstance(x, DTensor) else x
        storage = x_local.untyped_storage()
        # Asked anew each time: ZeRO-3 lets parameters go, and their addresses are used again.
        if storage.data_ptr() not in _parameter_storages(engine):
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    def note_inputs(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        if count_calls == 1:
            for x in args:
                note(x)

    hooks = [
        layer.register_forward_pre_hook(note_inputs)
        for name, layer in engine.stage.layers.items()
        if engine.plan.strategies[int(name)].recompute == "full"
    ]
    forward = engine.stage.forward

    def counted(*args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        nonlocal count_calls
        count_calls += 1
        if count_calls > 1:
            return forward(*args, **kwargs)
        with saved_tensors_hooks(note, lambda x: x):
            return forward(*args, **kwargs)

    engine.stage.forward = counted  # type: ignore[method-assign]
    try:
        engine.forward_backward(batch)
    finally:
        engine.stage.forward = forward  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return sum(kept.values())


def _parameter_storages(engine: Engine) -> set[int]:
    """Return the storages of parameters (sharded and gathered) and of the tables that all layers share."""
    found = {local_data(p).untyped_storage().data_ptr() for p in engine.parameters()}
    for layer in engine.stage.layers.values():
        group = layer._get_fsdp_state()._fsdp_param_group if isinstance(layer, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            found.update(x.untyped_storage().data_ptr() for x in parameter.all_gather_outputs)
    found.update(table.untyped_storage().data_ptr() for table in shared_tables())
    return found
