"""Live process groups and device meshes for a plan: one registry, filled in the same order on every rank.

A group that only some ranks use must still be created by all ranks in the same order, or the job
hangs; so the groups of every stage are listed from the plan first, and then made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import UserError
from meshwright.models.tensor_parallel import SINGLE, TensorParallel
from meshwright.spec.mesh import Axis, Layout, MeshShape, transfer
from meshwright.spec.plan import Plan

Ranks = tuple[int, ...]
Purpose = Literal["collective", "forward", "backward"]
_AXES: tuple[Axis, ...] = ("tp", "dp", "dp_shard", "dp_replicate")


def new_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the group of `ranks`, None on the others. Collective: all ranks make all groups in the same order.

    It gives up as late as the whole job's group does; torch's own default is half an hour.
    """
    group = dist.new_group(list(ranks), timeout=_timeout())
    return group if isinstance(group, dist.ProcessGroup) else None


def group_alone() -> dist.ProcessGroup:
    """Return a group of this rank by itself."""
    group = dist.new_group([dist.get_rank()], timeout=_timeout(), use_local_synchronization=True)
    return cast("dist.ProcessGroup", group)


def _timeout() -> timedelta:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return cast("timedelta", cast("Any", dist.group.WORLD)._get_backend(device).options._timeout)


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place in a plan, and the groups it communicates in."""

    plan: Plan
    rank: int
    device: torch.device
    groups: dict[tuple[Ranks, Purpose], dist.ProcessGroup] = field(default_factory=dict)
    meshes: dict[MeshShape, DeviceMesh] = field(default_factory=dict)

    @staticmethod
    def create(plan: Plan, device: torch.device) -> World:
        """Join the groups of `plan`. Collective over all ranks; raises UserError when their number is wrong."""
        if dist.get_world_size() != plan.num_devices:
            raise UserError(
                f"num_devices: the plan is for {plan.num_devices} ranks, but {dist.get_world_size()} were started"
            )
        world = World(plan=plan, rank=dist.get_rank(), device=device)
        for ranks, purpose in dict.fromkeys(_needed_groups(plan)):
            group = new_group(ranks)
            if group is not None:
                world.groups[ranks, purpose] = group
        alone = (world.rank,)
        world.groups[alone, "collective"] = group_alone()
        return world

    @property
    def stage(self) -> int:
        return self.rank // self.plan.stage_devices

    @property
    def local_rank(self) -> int:
        """This rank's number inside its stage."""
        return self.rank % self.plan.stage_devices

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.plan.num_stages - 1

    @property
    def column(self) -> Ranks:
        """The ranks at this rank's place in every stage: who it sends hidden states to and receives from."""
        return _column(self.plan, self.local_rank)

    def stage_group(self, local_ranks: Ranks) -> dist.ProcessGroup:
        """Return the group of these ranks of this rank's stage; this rank must be one of them."""
        return self.groups[_shift(local_ranks, self.stage, self.plan), "collective"]

    def axis_group(self, mesh: MeshShape, axis: Axis) -> dist.ProcessGroup:
        """Return this rank's group along `axis` of `mesh`."""
        return self.stage_group(tuple(sorted(mesh.group(axis, self.local_rank))))

    def tensor_parallel(self, mesh: MeshShape) -> TensorParallel:
        if mesh.tp == 1:
            return SINGLE
        return TensorParallel(size=mesh.tp, index=mesh.tp_index(self.local_rank), group=self.axis_group(mesh, "tp"))

    def device_mesh(self, mesh: MeshShape) -> DeviceMesh:
        """Return torch's mesh of this rank's stage with the axes dp_replicate, dp_shard and tp of `mesh`."""
        if mesh not in self.meshes:
            names = tuple(name for name, _ in mesh.axes)
            sizes = tuple(size for _, size in mesh.axes)
            first = self.stage * self.plan.stage_devices
            ranks = torch.arange(first, first + mesh.num_ranks).view(sizes)
            groups = [self.axis_group(mesh, name) for name in names]  # type: ignore[arg-type]
            self.meshes[mesh] = DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)
        return self.meshes[mesh]


def _needed_groups(plan: Plan) -> Iterator[tuple[Ranks, Purpose]]:
    """Yield every group of two or more ranks that the plan's step uses, in an order all ranks share."""
    for stage in range(plan.num_stages):
        for strategy in dict.fromkeys(plan.stages[stage].strategies):
            mesh = MeshShape.of(strategy)
            for axis in _AXES:
                for ranks in mesh.groups(axis):
                    if len(ranks) > 1:
                        yield _shift(tuple(sorted(ranks)), stage, plan), "collective"
        for ranks in _transfer_groups(plan, stage):
            yield _shift(ranks, stage, plan), "collective"
    if plan.num_stages > 1:
        for local_rank in range(plan.stage_devices):
            column = _column(plan, local_rank)
            yield column, "forward"
            yield column, "backward"
            if plan.model.tied_embedding:
                yield (column[0], column[-1]), "collective"


def _transfer_groups(plan: Plan, stage: int) -> Iterator[Ranks]:
    layouts = [Layout.of(strategy) for strategy in plan.strategies]
    for position in range(max(1, plan.boundaries[stage]), plan.boundaries[stage + 1]):
        for one, other in ((layouts[position - 1], layouts[position]), (layouts[position], layouts[position - 1])):
            yield from transfer(one, other).groups


def _column(plan: Plan, local_rank: int) -> Ranks:
    return tuple(stage * plan.stage_devices + local_rank for stage in range(plan.num_stages))


def _shift(local_ranks: Ranks, stage: int, plan: Plan) -> Ranks:
    return tuple(stage * plan.stage_devices + rank for rank in local_ranks)
