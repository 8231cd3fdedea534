"""The costs of all layers under all strategies of a stage as arrays: what the solvers see of a model.

Built from the same functions that `cost.predict` adds up, so a chosen plan re-prices to its objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.layer import (
    backward_passes,
    bound_bytes,
    held_parameters,
    layer_cost,
    made_gradient_bytes,
    tied_extra_bytes,
    tied_sync_s,
    tied_transient_bytes,
)
from meshwright.cost.predict import report_sync_s
from meshwright.cost.reshard import border_s, relayout_s
from meshwright.search.problem import StageProblem
from meshwright.search.space import is_considered
from meshwright.search.wanted import Wanted
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.legality import why_illegal
from meshwright.spec.mesh import Layout
from meshwright.spec.model import AnyBlock, LayerSpec, ModelSpec, hands_on
from meshwright.spec.schedule import ScheduleName, in_flight
from meshwright.spec.strategy import Strategy
from meshwright.spec.tensors import TensorSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed while layers and boundaries are chosen. `micro_batch_samples` is over all ranks of a stage."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    budget_bytes: int
    num_stages: int
    num_micro_batches: int
    micro_batch_samples: int
    schedule: ScheduleName
    wanted: Wanted | None = None  # of all blocks

    @property
    def stage_devices(self) -> int:
        return self.cluster.num_devices // self.num_stages


def build_problem(setting: Setting, candidates: tuple[Strategy, ...]) -> StageProblem:
    """Return the arrays of `setting` for these strategies; entries that are illegal or pointless are infinite."""
    rows = {group.layer: _layer_row(setting, group.layer, candidates) for group in setting.model.groups}
    forward_s, backward_s, step_s, states, activations, transients, freed = (
        np.stack([rows[layer][term] for layer in setting.model.layers]) for term in range(7)
    )
    layouts = [Layout.of(strategy) for strategy in candidates]
    distinct = list(dict.fromkeys(layouts))
    layout = np.array([distinct.index(one) for one in layouts], np.intp)
    switch_s, border = _layout_costs(setting, distinct, _neighbours(forward_s, layout, len(distinct)))
    num_stages, micro_batches = setting.num_stages, setting.num_micro_batches
    everywhere = report_sync_s(setting.cluster.num_devices, setting.cluster)
    return StageProblem(
        forward_s=forward_s,
        backward_s=backward_s,
        step_s=step_s,
        states_bytes=states,
        act_bytes=activations,
        transient_bytes=transients,
        freed_bytes=None if backward_passes(setting.schedule, micro_batches) == "growing" else freed,
        switch_forward_s=switch_s[..., layout[:, None], layout[None, :]],
        switch_backward_s=np.swapaxes(switch_s, -1, -2)[..., layout[:, None], layout[None, :]],
        border_forward_s=border[..., layout],
        border_backward_s=border[..., layout],
        layout=layout,
        in_flight=np.array(
            [in_flight(setting.schedule, num_stages, micro_batches, stage) for stage in range(num_stages)], np.intp
        ),
        budget_bytes=np.full(num_stages, float(setting.budget_bytes)),
        stage_step_s=np.full(num_stages, everywhere),
        num_micro_batches=micro_batches,
        schedule=setting.schedule,
        tied=setting.model.tied_embedding,
        tied_step_s=np.array([_tied_step_s(setting, strategy) for strategy in candidates]),
        tied_extra_bytes=np.array([_tied_extra_bytes(setting, strategy) for strategy in candidates], float),
    )


def _tied_step_s(setting: Setting, strategy: Strategy) -> float:
    """Return the seconds a step to sum a tied weight's two gradients; 0 where the ends cannot use `strategy` at all."""
    model = setting.model
    if why_illegal(model.head, strategy, setting.micro_batch_samples) is not None:
        return 0.0
    return tied_sync_s(model, strategy, setting.num_stages, setting.job, setting.cluster)


def _tied_extra_bytes(setting: Setting, strategy: Strategy) -> int:
    """Return what a weight tied on one stage adds; 0 where the ends cannot use `strategy` at all."""
    if why_illegal(setting.model.head, strategy, setting.micro_batch_samples) is not None:
        return 0
    passes = backward_passes(setting.schedule, setting.num_micro_batches)
    return tied_extra_bytes(setting.model, strategy, setting.num_stages, passes, setting.job)


def _layer_row(setting: Setting, layer: LayerSpec, candidates: tuple[Strategy, ...]) -> Floats:
    """Return [term, strategy]: seconds of forward and backward passes and once a step; bytes as in `BoundBytes`."""
    row = np.full((7, len(candidates)), np.inf)
    parameters = held_parameters(setting.model, layer, setting.num_stages)
    keeps_logits = setting.schedule == "gpipe"
    passes = backward_passes(setting.schedule, setting.num_micro_batches)
    for column, strategy in enumerate(candidates):
        if not is_considered(layer, strategy, schedule_keeps_logits=keeps_logits, tied=setting.model.tied_embedding):
            continue
        if setting.wanted is not None and isinstance(layer, AnyBlock) and not setting.wanted.allows(strategy):
            continue
        if why_illegal(layer, strategy, setting.micro_batch_samples) is not None:
            continue
        cost = layer_cost(layer, parameters, strategy, setting.micro_batch_samples, setting.job, setting.cluster)
        used = bound_bytes(
            cost, passes, made_gradient_bytes(setting.model, layer, cost, strategy, setting.job, setting.num_stages)
        )
        row[:, column] = (
            cost.micro_batch.forward.total_s,
            cost.micro_batch.backward.total_s,
            cost.step.total_s,
            used.states,
            used.activations,
            used.transient + tied_transient_bytes(setting.model, layer, strategy, setting.num_stages, setting.job),
            used.freed,
        )
    return row


def _neighbours(forward_s: Floats, layout: NDArray[np.intp], num_layouts: int) -> NDArray[np.bool_]:
    """Return [from, to] whether two neighbouring layers can have these layouts: others need no price."""
    usable = np.zeros((len(forward_s), num_layouts), bool)
    for at in range(num_layouts):
        usable[:, at] = np.isfinite(forward_s[:, layout == at]).any(axis=1)
    pairs = np.zeros((num_layouts, num_layouts), bool)
    for before, here in np.unique(np.stack([usable[:-1], usable[1:]], axis=1), axis=0):
        pairs |= before[:, None] & here[None, :]
    return pairs


def _layout_costs(setting: Setting, layouts: list[Layout], neighbours: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return re-layout seconds [(layer,) from, to], there and back, and send seconds [(layer,) layout].

    Without the layer axis when every layer hands on the same tensors.
    """
    handed = [hands_on(layer) for layer in setting.model.layers]
    kinds = list(dict.fromkeys(tensors for tensors in handed if tensors))
    switches = {tensors: _switches(setting, layouts, neighbours | neighbours.T, tensors) for tensors in kinds}
    borders = {tensors: _borders(setting, layouts, tensors) for tensors in kinds}
    if len(kinds) == 1:
        return switches[kinds[0]], borders[kinds[0]]
    nothing: Floats = np.zeros((len(layouts), len(layouts)))
    no_row: Floats = nothing[0]
    into = [nothing, *(switches.get(tensors, nothing) for tensors in handed[:-1])]
    out = [borders.get(tensors, no_row) for tensors in handed]
    return np.stack(into), np.stack(out)


def _switches(
    setting: Setting, layouts: list[Layout], wanted: NDArray[np.bool_], tensors: tuple[TensorSpec, ...]
) -> Floats:
    seconds = np.zeros(wanted.shape)
    pairs: list[list[int]] = np.argwhere(wanted).tolist()
    for source, target in pairs:
        seconds[source, target] = relayout_s(
            tensors, layouts[source], layouts[target], setting.micro_batch_samples, setting.job, setting.cluster
        )
    return seconds


def _borders(setting: Setting, layouts: list[Layout], tensors: tuple[TensorSpec, ...]) -> Floats:
    samples, num_stages = setting.micro_batch_samples, setting.num_stages
    return np.array(
        [
            border_s(tensors, layout, samples, num_stages, setting.job, setting.cluster)
            if samples % layout.dp == 0
            else 0.0
            for layout in layouts
        ]
    )
