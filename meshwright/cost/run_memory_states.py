"""Bytes that one rank of a uniform run holds from step to step: parameters, gradients, optimizer states.

With p, g and o bytes a parameter and D shards: the optimizer's states are sharded from ZeRO-1 on, gradients from
ZeRO-2, parameters in ZeRO-3 (arXiv 1910.02054, section 5), n (p + g + o) of n local parameters at most. Where
parameters are fp32 masters (FSDP) they are sharded with the states, and a 16-bit copy of all stays below ZeRO-3. The
parameters of experts are spread over ep ranks and sharded over D / ep.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.run_stages import Stage
from meshwright.spec.frameworks import framework, held_of
from meshwright.spec.model import BlockLayer, LayerSpec, ModelSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.run import RunSpec

_ZERO_2, _ZERO_3 = 2, 3


class LocalParameters(NamedTuple):
    """Parameters of one rank before sharding: those that all data-parallel ranks share, and those of its experts."""

    shared: float = 0.0
    routed: float = 0.0

    def plus(self, other: LocalParameters, times: int = 1) -> LocalParameters:
        return LocalParameters(self.shared + times * other.shared, self.routed + times * other.routed)

    @property
    def total(self) -> float:
        return self.shared + self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTotals:
    """What a rank holds from step to step. `copy_bytes`: 16-bit parameters beside fp32 masters."""

    parameter_bytes: float
    copy_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    bucket_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.parameter_bytes + self.copy_bytes + self.gradient_bytes + self.optimizer_bytes + self.bucket_bytes


@lru_cache(maxsize=4096)
def local_parameters(layer: LayerSpec, tp: int, ep: int) -> LocalParameters:
    """Return the parameters of `layer` on one of tp x ep ranks."""
    shared = routed = 0.0
    for parameter in layer_parameters(layer):
        local = parameter.num_elements / (1 if parameter.tp_dim is None else tp)
        if parameter.is_of_experts:
            routed += local / ep
        else:
            shared += local
    return LocalParameters(shared, routed)


@lru_cache(maxsize=4096)
def stage_parameters(model: ModelSpec, stage: Stage, tp: int, ep: int) -> LocalParameters:
    """Return the parameters of `stage` on one rank; a tied weight is held once where embedding and head meet."""
    found = LocalParameters()
    for layer, count in stage.blocks:
        found = found.plus(local_parameters(layer, tp, ep), count)
    if stage.is_first:
        found = found.plus(local_parameters(model.token_embedding, tp, 1))
    if stage.is_last and not (model.tied_embedding and stage.is_first):
        found = found.plus(local_parameters(model.language_head, tp, 1))
    return found


def held_totals(run: RunSpec, stage: Stage) -> HeldTotals:
    """Return what a rank of `stage` holds."""
    defaults, held = framework(run.framework), held_of(run)
    local = stage_parameters(run.model, stage, run.tp, run.ep)
    own = own_parameters(run, local)
    zero = run.zero_stage
    masters = defaults.holds_masters
    needs_copy = masters and zero < _ZERO_3 and held.parameter_bytes > held.gather_bytes
    shards_parameters = zero == _ZERO_3 or (masters and zero > 0)
    return HeldTotals(
        parameter_bytes=held.parameter_bytes * (own if shards_parameters else local.total),
        copy_bytes=held.gather_bytes * local.total if needs_copy else 0.0,
        gradient_bytes=held.gradient_bytes * (own if zero >= _ZERO_2 else local.total),
        optimizer_bytes=held.optimizer_bytes * own,
        bucket_bytes=defaults.bucket_bytes if zero else 0,
    )


def own_parameters(run: RunSpec, local: LocalParameters) -> float:
    """Return the parameters that a rank updates."""
    return local.shared / run.num_shards + local.routed / max(1, run.num_shards // run.ep)


def step_bytes(run: RunSpec, stage: Stage) -> float:
    """Return the temporaries of the optimizer's step."""
    defaults = framework(run.framework)
    local = stage_parameters(run.model, stage, run.tp, run.ep)
    own = own_parameters(run, local)
    layers: list[LayerSpec] = [block for block, _ in stage.blocks]
    layers += [run.model.token_embedding] * stage.is_first + [run.model.language_head] * stage.is_last
    largest = max(_largest(layer, run.tp) for layer in layers)
    if run.zero_stage == _ZERO_3:
        largest /= run.num_shards
    whole = local.total if run.pp == 1 and run.num_shards > 1 else 0.0
    return (
        defaults.step_bytes * own + defaults.step_whole_bytes * whole + defaults.step_largest_bytes * min(largest, own)
    )


def stub_bytes(run: RunSpec, stage: Stage) -> float:
    """Return the stand-in gradients of the weights of one block that a framework keeps."""
    each = framework(run.framework).weight_stub_bytes
    return each * max((local_parameters(block, run.tp, run.ep).shared for block, _ in stage.blocks), default=0.0)


def gathered_bytes(run: RunSpec, layer: LayerSpec) -> float:
    """Return the whole parameters of `layer` in the dtype they are gathered in, where ZeRO-3 shards them."""
    if run.zero_stage < _ZERO_3 or run.num_shards == 1:
        return 0.0
    return held_of(run).gather_bytes * _unit_parameters(run, layer)


def weight_gradient_bytes(run: RunSpec, layer: LayerSpec) -> float:
    """Return the gradients of `layer` that are alive beside those held while it runs backward.

    Sharded gradients are made whole, in the dtype of computing, and cast to the dtype they are reduced in. Others are
    made weight by weight before they are added to what is there; the stand-ins of blocks are counted elsewhere.
    """
    held = held_of(run)
    if run.zero_stage >= _ZERO_2 and run.num_shards > 1:
        cast = held.reduce_bytes if held.reduce_bytes > held.gather_bytes else 0
        return (held.gather_bytes + cast) * _unit_parameters(run, layer)
    if framework(run.framework).weight_stub_bytes and isinstance(layer, BlockLayer):
        return 0.0
    return held.gather_bytes * _largest(layer, run.tp) if run.num_micro_batches > 1 else 0.0


def _unit_parameters(run: RunSpec, layer: LayerSpec) -> float:
    """Return the parameters that are gathered at once: those of a layer, or of its largest weight."""
    if framework(run.framework).gathers_weights:
        return _largest(layer, run.tp)
    return local_parameters(layer, run.tp, run.ep if isinstance(layer, BlockLayer) else 1).total


def _largest(layer: LayerSpec, tp: int) -> float:
    parameters = [p for p in layer_parameters(layer) if not p.is_of_experts]
    return max(p.num_elements / (1 if p.tp_dim is None else tp) for p in parameters)
