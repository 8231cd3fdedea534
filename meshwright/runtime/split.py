"""Apply one strategy to one layer, in the order that works: split weights, recompute, shard data-parallel.

Reductions are sums, never means: the loss is divided once by the token count of the whole batch.
A mean over each layer's own dp degree would be wrong as soon as two layers differ in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from meshwright.models.tensor_parallel import TensorParallel
from meshwright.runtime.groups import World
from meshwright.spec.base import Dtype, divide
from meshwright.spec.job import JobSpec
from meshwright.spec.mesh import MeshShape
from meshwright.spec.parameters import ParameterSpec
from meshwright.spec.strategy import Strategy

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ZERO_3 = 3


def split_weights(
    layer: nn.Module, parameters: Sequence[ParameterSpec], tp: TensorParallel, tp_mesh: DeviceMesh
) -> None:
    """Replace the parameters of a layer on the meta device by this rank's tensor-parallel slices."""
    for module in layer.modules():
        if hasattr(module, "tp"):
            module.tp = tp  # pyright: ignore[reportArgumentType] nn.Module knows tensors and modules only
    for parameter in parameters:
        if parameter.tp_dim is not None:
            _split(layer, parameter, tp_mesh, tp)


def recompute(layer: nn.Module) -> None:
    """Keep only the layer's input in forward; run it again in backward.

    Replaces the bound `forward`, so that hooks of `fully_shard` stay outside (no third gather) and
    names do not change. No random state is kept: layers have no dropout of torch's generator.
    """
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard_data_parallel(
    modules: list[nn.Module],
    strategy: Strategy,
    world: World,
    job: JobSpec,
    *,
    leave_alone: set[nn.Parameter] | None = None,
) -> None:
    """Let `fully_shard` hold the parameters of `modules` as one unit, replicated or sharded as the strategy says.

    Parameters to `leave_alone` stay ordinary.
    """
    mesh = data_parallel_mesh(strategy, world)
    shard_over(modules, mesh, job, lets_go=strategy.zero_stage == ZERO_3, leave_alone=leave_alone)


def shard_over(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    job: JobSpec,
    *,
    lets_go: bool,
    leave_alone: set[nn.Parameter] | None = None,
) -> None:
    """Make one unit of `modules` over a mesh as `fully_shard` wants it; `lets_go` of parameters after each forward.

    The fp32 shards are the master weights; forward and backward see them in `param_dtype`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[job.param_dtype],
        reduce_dtype=TORCH_DTYPES[job.reduce_dtype],
        cast_forward_inputs=False,
    )
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=lets_go,
        ignored_params=leave_alone,
    )
    unit = modules[0]
    assert isinstance(unit, FSDPModule)  # noqa: S101 fully_shard makes it one
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def data_parallel_mesh(strategy: Strategy, world: World) -> DeviceMesh:
    """Return the mesh that `fully_shard` wants: 1-D to shard (or alone), 2-D (replicas, shards) otherwise."""
    mesh = world.device_mesh(MeshShape.of(strategy))
    return mesh["dp_shard"] if strategy.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"]


def _split(layer: nn.Module, spec: ParameterSpec, tp_mesh: DeviceMesh, tp: TensorParallel) -> None:
    owner_name, _, name = spec.name.rpartition(".")
    owner = layer.get_submodule(owner_name)
    whole = getattr(owner, name)
    assert spec.tp_dim is not None  # noqa: S101 the caller picked split parameters
    divide(whole.shape[spec.tp_dim], tp.size, f"{spec.name} over tp")
    piece = whole.detach().chunk(tp.size, spec.tp_dim)[tp.index].contiguous()
    split = DTensor.from_local(piece, tp_mesh, [Shard(spec.tp_dim)], run_check=False)
    setattr(owner, name, nn.Parameter(split, requires_grad=whole.requires_grad))


def fsdp_unit(module: nn.Module) -> Any:
    """Return `module` as the FSDP unit it is."""
    assert isinstance(module, FSDPModule)  # noqa: S101 set up by shard_data_parallel
    return module
