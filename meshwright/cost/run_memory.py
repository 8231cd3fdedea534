"""Bytes of one device in a uniform run, itemised: per pipeline stage and phase of a step, and by kind of peak.

A stage holds its states throughout (`run_memory_states`) and the activations of the micro-batches in flight
(`run_memory_layers`). With m micro-batches, p stages, v model chunks a stage and stage i (from 0):

    1F1B         min(p - i, m) micro-batches in flight (arXiv 2006.09503)
    interleaved  [2 (p - i - 1) + (v - 1) p + 1] / v of them, at most m (arXiv 2104.04473, section 2.2; Megatron-LM)
    GPipe        m (arXiv 1811.06965)

The peak of a phase is the largest of the moments in it; what is alive for a moment is a maximum, not a sum:

    forward   activations, 16-bit logits, gathered parameters
    backward  loss: the widest moment of it, with all activations; head: gradients of logits, of hidden states and of
              the head's weight; last block: computed again, with its gradients and the gathers of two layers; first
              block: the same, with the activations of its micro-batch gone and all gradients there
    step      states and the optimizer's temporaries

Where frameworks drop gradients between steps and nothing accumulates (m = 1), they come back layer by layer in
backward; a caching allocator has no use for the gap, so the reserved kinds count them throughout.

Kinds: allocated is what tensors take; reserved adds the allocator's slack (and the step's temporaries where its
segments do not grow, since large blocks then find no place among small ones); device adds the context and the
buffers of communicators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost.run_memory_layers import (
    head_bytes,
    head_gradient_bytes,
    input_bytes,
    kept_bytes,
    recomputed_bytes,
    ring_bytes,
    working_bytes,
)
from meshwright.cost.run_memory_states import (
    HeldTotals,
    gathered_bytes,
    held_totals,
    local_parameters,
    stage_parameters,
    step_bytes,
    stub_bytes,
    weight_gradient_bytes,
)
from meshwright.cost.run_stages import Stage, stages_of
from meshwright.spec.frameworks import Framework, framework
from meshwright.spec.memory import MemoryConstants, shipped_memory
from meshwright.spec.model import BlockLayer
from meshwright.spec.run import MemoryKind, RunSpec
from meshwright.spec.schedule import in_flight

Phase = Literal["initial", "forward", "backward", "step"]
_HALF = 2


class MomentBytes(NamedTuple):
    """What is alive at the fullest moment of one phase, by what it is for. All terms add up.

    `gradient_bytes` are not part of `state_bytes`, because some frameworks have none at first. `weight_gradient_bytes`:
    whole or stand-in gradients beside those that are held. `slack_bytes`: the allocator's; `device_bytes`: context and
    communicators.
    """

    phase: Phase
    moment: str
    state_bytes: float
    gradient_bytes: float = 0.0
    activation_bytes: float = 0.0
    logit_bytes: float = 0.0
    recompute_bytes: float = 0.0
    working_bytes: float = 0.0
    gather_bytes: float = 0.0
    weight_gradient_bytes: float = 0.0
    communication_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    workspace_bytes: float = 0.0
    slack_bytes: float = 0.0
    device_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return sum(self[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """One device of a stage: what it holds, what waits for backward passes, and its fullest moment in each phase."""

    held: HeldTotals
    activation_bytes: float
    num_in_flight: float
    phases: tuple[MomentBytes, ...]

    @property
    def peak(self) -> MomentBytes:
        return max(self.phases, key=lambda one: one.total_bytes)

    @property
    def total_bytes(self) -> float:
        return self.peak.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBytes:
    """The devices of a run by pipeline stage."""

    kind: MemoryKind
    stages: tuple[StageBytes, ...]

    @property
    def peak_stage(self) -> int:
        """Return the index of the fullest stage."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].total_bytes)

    @property
    def peak(self) -> MomentBytes:
        return self.stages[self.peak_stage].peak

    @property
    def peak_bytes(self) -> float:
        return self.peak.total_bytes


class _Block(NamedTuple):
    """One shape of block for a micro-batch: what it keeps, and what is alive while it runs backward."""

    kept_bytes: float
    recompute_bytes: float
    working_bytes: float
    gather_bytes: float
    weight_gradient_bytes: float
    ring_bytes: float


class _Run(NamedTuple):
    """What the stages of one run share."""

    run: RunSpec
    kind: MemoryKind
    constants: MemoryConstants
    defaults: Framework
    tokens: float
    blocks: dict[BlockLayer, _Block]
    communication_bytes: float
    device_bytes: float
    keeps_gradients: bool


class _Alive(NamedTuple):
    """What one stage has at any moment, for its moments to share; stages differ in what is in flight."""

    of: _Run
    stage: Stage
    held: HeldTotals
    stub_bytes: float
    step_bytes: float
    micro_batch_bytes: float
    num_in_flight: float = 0.0

    @property
    def activation_bytes(self) -> float:
        return self.num_in_flight * self.micro_batch_bytes

    @property
    def state_bytes(self) -> float:
        return self.held.total_bytes - self.held.gradient_bytes

    @property
    def gather_bytes(self) -> float:
        """Return the gathered parameters of the block that runs and of the next one, which is gathered ahead."""
        return 2 * max(self.of.blocks[block].gather_bytes for block, _ in self.stage.blocks)

    def gradient_bytes(self, share: float) -> float:
        """Return the gradients that are held when `share` of a first backward pass is over."""
        return self.held.gradient_bytes * (1.0 if self.of.keeps_gradients else share)


def run_memory(run: RunSpec, kind: MemoryKind = "allocated", constants: MemoryConstants | None = None) -> RunBytes:
    """Return the bytes of each stage's devices in one step of `run`, as `kind` counts them."""
    defaults = framework(run.framework)
    tokens = run.micro_batch_size * run.seq_len / run.cp
    stages = stages_of(run.model, run.pp)
    constants = constants or shipped_memory()
    device = constants.context_bytes + communicators(run) * constants.communicator_bytes
    shared = _Run(
        run=run,
        kind=kind,
        constants=constants,
        defaults=defaults,
        tokens=tokens,
        blocks={block: _block(run, block, tokens) for stage in set(stages) for block, _ in stage.blocks},
        communication_bytes=tokens * _communication(run, defaults),
        device_bytes=device if kind == "device" else 0.0,
        keeps_gradients=kind != "allocated" or defaults.keeps_gradients or run.num_micro_batches > 1,
    )
    alive = {stage: _alive(shared, stage) for stage in set(stages)}
    return RunBytes(
        kind=kind,
        stages=tuple(
            _stage_bytes(alive[stage]._replace(num_in_flight=micro_batches_in_flight(run, index)))
            for index, stage in enumerate(stages)
        ),
    )


def micro_batches_in_flight(run: RunSpec, index: int) -> float:
    """Return how many micro-batches' activations of the whole stage `index` wait at most."""
    num, virtual = run.num_micro_batches, run.virtual_stages
    if virtual == 1:
        return in_flight(run.schedule, run.pp, num, index)
    return min((2 * (run.pp - index - 1) + (virtual - 1) * run.pp + 1) / virtual, num)


def communicators(run: RunSpec) -> int:
    """Return the groups that a rank talks in: all ranks, and one for each way of splitting."""
    degrees = (run.tp, run.cp, run.pp, run.ep, run.dp * run.cp)
    return 1 + sum(degree > 1 for degree in degrees) if run.cluster.num_devices > 1 else 0


def _block(run: RunSpec, block: BlockLayer, tokens: float) -> _Block:
    return _Block(
        kept_bytes=tokens * kept_bytes(run, block),
        recompute_bytes=tokens * recomputed_bytes(run, block),
        working_bytes=tokens * working_bytes(run, block),
        gather_bytes=gathered_bytes(run, block),
        weight_gradient_bytes=weight_gradient_bytes(run, block),
        ring_bytes=tokens * ring_bytes(run, block),
    )


def _communication(run: RunSpec, defaults: Framework) -> float:
    """Return the bytes a token of what a pipeline receives (hidden states, gradients) and of what waits to be freed."""
    borders = 2 * input_bytes(run) if run.pp > 1 else 0.0
    waits = run.sequence_parallel and not run.software.async_tp
    return borders + (defaults.waiting_hiddens * _HALF * run.model.language_head.hidden_size if waits else 0.0)


def _alive(shared: _Run, stage: Stage) -> _Alive:
    return _Alive(
        of=shared,
        stage=stage,
        held=held_totals(shared.run, stage),
        stub_bytes=stub_bytes(shared.run, stage),
        step_bytes=step_bytes(shared.run, stage),
        micro_batch_bytes=sum(count * shared.blocks[block].kept_bytes for block, count in stage.blocks),
    )


def _stage_bytes(alive: _Alive) -> StageBytes:
    backward = max(_backward(alive), key=lambda one: one.total_bytes)
    return StageBytes(
        held=alive.held,
        activation_bytes=alive.activation_bytes,
        num_in_flight=alive.num_in_flight,
        phases=tuple(_of_kind(alive, moment) for moment in (_initial(alive), _forward(alive), backward, _step(alive))),
    )


def _of_kind(alive: _Alive, moment: MomentBytes) -> MomentBytes:
    """Return `moment` with the slack and the device's own bytes that its kind counts."""
    shared = alive.of
    if shared.kind == "allocated":
        return moment
    slack = (shared.constants.reserved_factor - 1) * moment.total_bytes
    if not shared.defaults.grows_segments and moment.phase != "step":
        slack += alive.step_bytes
    return moment._replace(slack_bytes=slack, device_bytes=shared.device_bytes)


def _initial(alive: _Alive) -> MomentBytes:
    return MomentBytes(
        phase="initial",
        moment="before the first micro-batch",
        state_bytes=alive.state_bytes,
        gradient_bytes=alive.gradient_bytes(0.0),
        workspace_bytes=alive.of.constants.workspace_bytes,
    )


def _forward(alive: _Alive) -> MomentBytes:
    shared, run = alive.of, alive.of.run
    last = shared.tokens if alive.stage.is_last else 0.0
    return MomentBytes(
        phase="forward",
        moment="after the last micro-batch in flight",
        state_bytes=alive.state_bytes,
        gradient_bytes=alive.gradient_bytes(0.0),
        activation_bytes=alive.activation_bytes + last * head_bytes(run),
        logit_bytes=last * _HALF * _logits(run),
        gather_bytes=alive.gather_bytes,
        weight_gradient_bytes=alive.stub_bytes,
        communication_bytes=shared.communication_bytes,
        workspace_bytes=shared.constants.workspace_bytes,
    )


def _backward(alive: _Alive) -> Iterator[MomentBytes]:
    blocks = alive.stage.blocks
    if alive.stage.is_last:
        yield _loss(alive)
        yield _head(alive)
    share = _share_of_head(alive) if alive.stage.is_last and not alive.of.keeps_gradients else 0.0
    for block in {blocks[0][0], blocks[-1][0]}:
        yield _in_block(alive, block, "last block", alive.activation_bytes, share)
    if not alive.of.keeps_gradients:
        behind = (alive.num_in_flight - 1) * alive.micro_batch_bytes
        first = blocks[0][0]
        yield _in_block(alive, first, "first block", behind + alive.of.blocks[first].kept_bytes, 1.0)


def _loss(alive: _Alive) -> MomentBytes:
    shared, run = alive.of, alive.of.run
    each = shared.defaults.logit_bytes[run.software.loss]
    each = _HALF + (each - _HALF) / run.software.loss_chunks
    return MomentBytes(
        phase="backward",
        moment="loss",
        state_bytes=alive.state_bytes,
        gradient_bytes=alive.gradient_bytes(0.0),
        activation_bytes=alive.activation_bytes + shared.tokens * head_bytes(run),
        logit_bytes=shared.tokens * _logits(run) * each,
        gather_bytes=gathered_bytes(run, run.model.language_head) + alive.gather_bytes / 2,
        weight_gradient_bytes=alive.stub_bytes,
        communication_bytes=shared.communication_bytes,
        workspace_bytes=shared.constants.workspace_bytes,
    )


def _head(alive: _Alive) -> MomentBytes:
    shared, run = alive.of, alive.of.run
    return MomentBytes(
        phase="backward",
        moment="head",
        state_bytes=alive.state_bytes,
        gradient_bytes=alive.gradient_bytes(0.0),
        activation_bytes=alive.activation_bytes + shared.tokens * head_bytes(run),
        logit_bytes=shared.tokens * _logits(run) * _HALF,
        working_bytes=shared.tokens * head_gradient_bytes(run),
        gather_bytes=gathered_bytes(run, run.model.language_head) + alive.gather_bytes / 2,
        weight_gradient_bytes=alive.stub_bytes + weight_gradient_bytes(run, run.model.language_head),
        communication_bytes=shared.communication_bytes,
        workspace_bytes=shared.constants.workspace_bytes,
    )


def _in_block(alive: _Alive, layer: BlockLayer, moment: str, activations: float, share: float) -> MomentBytes:
    """Return what is alive in the backward pass of one block, of `activations`, with that share of gradients there."""
    shared, block = alive.of, alive.of.blocks[layer]
    return MomentBytes(
        phase="backward",
        moment=moment,
        state_bytes=alive.state_bytes,
        gradient_bytes=alive.gradient_bytes(share),
        activation_bytes=activations,
        recompute_bytes=block.recompute_bytes,
        working_bytes=block.working_bytes,
        gather_bytes=alive.gather_bytes,
        weight_gradient_bytes=alive.stub_bytes + block.weight_gradient_bytes,
        communication_bytes=shared.communication_bytes + block.ring_bytes,
        workspace_bytes=shared.constants.workspace_bytes,
    )


def _step(alive: _Alive) -> MomentBytes:
    return MomentBytes(
        phase="step",
        moment="optimizer",
        state_bytes=alive.state_bytes,
        gradient_bytes=alive.held.gradient_bytes,
        weight_gradient_bytes=alive.stub_bytes,
        optimizer_bytes=alive.step_bytes,
        workspace_bytes=alive.of.constants.workspace_bytes,
    )


def _share_of_head(alive: _Alive) -> float:
    """Return the head's share of the stage's gradients."""
    run = alive.of.run
    all_of_stage = stage_parameters(run.model, alive.stage, run.tp, run.ep).total
    return min(1.0, local_parameters(run.model.language_head, run.tp, 1).total / all_of_stage)


def _logits(run: RunSpec) -> float:
    """Return the local logits of a token."""
    return run.model.language_head.padded_vocab_size / run.tp
