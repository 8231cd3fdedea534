"""The plan: every decision the runtime needs, and what was promised for it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Literal

from pydantic import model_validator

from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec, divide
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import BatchSize, Budget, JobSpec
from meshwright.spec.legality import why_illegal
from meshwright.spec.model import ModelSpec
from meshwright.spec.sample import why_wrong_lengths
from meshwright.spec.schedule import ScheduleName
from meshwright.spec.strategy import Strategy
from meshwright.spec.terms import MicroBatchSeconds, StateBytes, StepSeconds, TransientBytes


def needs_copy(strategy: Strategy, job: JobSpec) -> bool:
    """Return whether a layer's parameters exist twice: as master weights, and gathered in the compute dtype.

    Not so for a layer that no other rank shares (dp 1) and that computes in the master dtype: it is
    an ordinary module.
    """
    return strategy.dp > 1 or job.param_dtype != job.master_dtype


class LayerRun(Spec):
    """`num_layers` consecutive layers of a stage that share one strategy."""

    num_layers: PositiveInt
    strategy: Strategy


class StagePlan(Spec):
    """The layers of one stage, in order."""

    runs: tuple[LayerRun, ...]

    @model_validator(mode="after")
    def _check(self) -> StagePlan:
        if not self.runs:
            raise ValueError("runs: a stage needs at least one layer")
        return self

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategy of each layer of the stage."""
        return tuple(run.strategy for run in self.runs for _ in range(run.num_layers))

    @property
    def num_layers(self) -> int:
        return sum(run.num_layers for run in self.runs)

    @staticmethod
    def of(strategies: Iterable[Strategy]) -> StagePlan:
        """Return a stage with these strategies, neighbours that agree joined into runs."""
        runs = tuple(LayerRun(num_layers=len(list(same)), strategy=strategy) for strategy, same in groupby(strategies))
        return StagePlan(runs=runs)


class StagePrediction(Spec):
    """The predicted cost of one rank of a stage, by term.

    `peak_bytes` is positional (design: states + activations in flight + what is alive while each
    layer runs backward); `bound_bytes` is the upper bound to which the search keeps: nearly always the peak itself.
    """

    micro_batch: MicroBatchSeconds
    step: StepSeconds
    states: StateBytes
    activation_bytes: NonNegativeInt
    in_flight: PositiveInt
    transient: TransientBytes
    peak_bytes: NonNegativeInt
    bound_bytes: NonNegativeInt
    busy_s: NonNegativeFloat
    bubble_s: NonNegativeFloat

    def step_sorts_s(self, num_micro_batches: int) -> dict[str, float]:
        """Return the seconds of a whole step by sort of work, once-a-step work and bubble last."""
        both = self.micro_batch.forward + self.micro_batch.backward
        each = {name: num_micro_batches * seconds for name, seconds in both.sorts_s.items()}
        return {**each, "once_a_step_s": self.step.total_s, "bubble_s": self.bubble_s}


class Prediction(Spec):
    """What the cost model promises for a plan. `step_s` is the event simulation of the schedule.

    `not_measured` says what was fitted from other samples of a profile, where there is one.
    """

    step_s: PositiveFloat
    samples_per_s: PositiveFloat
    tokens_per_s: PositiveFloat
    mfu: NonNegativeFloat
    stages: tuple[StagePrediction, ...]
    not_measured: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)


class Proof(Spec):
    """What the search claims: no plan of the printed space is faster than `lower_bound_s` by this model.

    Times are for the plan's own batch size; with a range of batch sizes they are per sample times
    the plan's batch.
    """

    space: str
    lower_bound_s: PositiveFloat
    gap: NonNegativeFloat


class Plan(Spec):
    """One decision, complete enough to price it again and to train with it.

    A micro-batch is global_batch_size / num_micro_batches samples over all ranks of a stage.
    Written by hand, `predicted`, `proof` and `inputs_sha256` are null.
    """

    schema_version: Literal[1] = 1
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    budget: Budget
    num_devices: PositiveInt
    global_batch_size: BatchSize
    num_micro_batches: PositiveInt
    schedule: ScheduleName = "1f1b"
    stages: tuple[StagePlan, ...]
    predicted: Prediction | None = None
    proof: Proof | None = None
    inputs_sha256: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Plan:
        if not self.stages:
            raise ValueError("stages: a plan needs at least one stage")
        self._check_devices()
        self._check_layers()
        self._check_tied()
        if reason := why_wrong_lengths(self.model, self.job.seq_len, self.job.target_seq_len):
            raise ValueError(f"job.{reason}")
        return self

    def _check_devices(self) -> None:
        if self.num_devices > self.cluster.num_devices:
            raise ValueError(f"num_devices ({self.num_devices}) is above the cluster's {self.cluster.num_devices}")
        if self.num_devices % len(self.stages):
            raise ValueError(f"num_devices ({self.num_devices}) is not divisible by {len(self.stages)} stages")
        asked = self.job.global_batch_size
        if isinstance(asked, int) and asked != self.global_batch_size:
            raise ValueError(f"global_batch_size ({self.global_batch_size}) is not the job's ({asked})")
        if self.global_batch_size % self.num_micro_batches:
            raise ValueError(
                f"num_micro_batches ({self.num_micro_batches}) does not divide "
                f"global_batch_size ({self.global_batch_size})"
            )

    def _check_layers(self) -> None:
        planned = sum(stage.num_layers for stage in self.stages)
        if planned != len(self.model.layers):
            raise ValueError(f"stages: {planned} layers planned, but {self.model.name} has {len(self.model.layers)}")
        layers = iter(self.model.layers)
        for i, stage in enumerate(self.stages):
            for j, run in enumerate(stage.runs):
                where = f"stages[{i}].runs[{j}].strategy"
                if run.strategy.num_devices != self.stage_devices:
                    raise ValueError(
                        f"{where}: {run.strategy.label} covers {run.strategy.num_devices} devices, "
                        f"but a stage has {self.stage_devices}"
                    )
                for layer in [next(layers) for _ in range(run.num_layers)]:
                    if reason := why_illegal(layer, run.strategy, self.micro_batch_samples):
                        raise ValueError(f"{where}: {reason}")

    def _check_tied(self) -> None:
        first, last = self.stages[0].strategies[0], self.stages[-1].strategies[-1]
        if self.model.tied_embedding and first != last:
            raise ValueError(
                f"stages: embedding ({first.label}) and head ({last.label}) share one weight and need the same strategy"
            )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def stage_devices(self) -> int:
        """Ranks of each stage."""
        return divide(self.num_devices, len(self.stages), "num_devices over stages")

    @property
    def micro_batch_samples(self) -> int:
        """Samples of a micro-batch over all ranks of a stage."""
        return divide(self.global_batch_size, self.num_micro_batches, "global_batch_size over micro-batches")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The index of each stage's first layer, and the number of layers at the end."""
        bounds = [0]
        for stage in self.stages:
            bounds.append(bounds[-1] + stage.num_layers)
        return tuple(bounds)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategy of each layer of the model."""
        return tuple(strategy for stage in self.stages for strategy in stage.strategies)

    def sharded_units(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return which layers of `stage` are gathered and reduced together.

        Each layer is a unit of its own; embedding and head that share a weight on one stage are one.
        """
        indices = range(self.boundaries[stage], self.boundaries[stage + 1])
        if self.model.tied_embedding and self.num_stages == 1:
            return ((indices[0], indices[-1]), *((index,) for index in indices[1:-1]))
        return tuple((index,) for index in indices)

    @property
    def is_uniform(self) -> bool:
        """Whether every layer has the same strategy."""
        return len(set(self.strategies)) == 1
