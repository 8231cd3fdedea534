"""The four sorts of cost of one layer, kept apart to the end so that an answer can explain itself.

per micro-batch (additive): MicroBatchSeconds, activation bytes; once a step: StepSeconds,
StateBytes; transient (a maximum over layers): TransientBytes; across layers or stages (re-layout,
borders, tied copies): fields of the above, filled in where neighbours are known. All are of one
rank and add up.
"""

from __future__ import annotations

from typing import Self

from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, Spec


class Terms(Spec):
    """Named terms that add field by field."""

    def __add__(self, other: Self) -> Self:
        return self.model_construct(
            **{name: getattr(self, name) + getattr(other, name) for name in type(self).model_fields}
        )


class PhaseSeconds(Terms):
    """One pass of one micro-batch. `hidden_s` ran under compute and is not part of the total.

    `copy_s`: out of and into the flat buffers in which parameters are gathered and gradients reduced.
    `wait_s`: ranks that talk to each other wait for the slowest of the moment (known from a profile only).
    """

    compute_s: NonNegativeFloat = 0.0
    recompute_s: NonNegativeFloat = 0.0
    tp_s: NonNegativeFloat = 0.0
    zero_s: NonNegativeFloat = 0.0
    copy_s: NonNegativeFloat = 0.0
    wait_s: NonNegativeFloat = 0.0
    relayout_s: NonNegativeFloat = 0.0
    border_s: NonNegativeFloat = 0.0
    hidden_s: NonNegativeFloat = 0.0

    @property
    def total_s(self) -> float:
        return (
            self.compute_s
            + self.recompute_s
            + self.tp_s
            + self.zero_s
            + self.copy_s
            + self.wait_s
            + self.relayout_s
            + self.border_s
        )

    @property
    def sorts_s(self) -> dict[str, float]:
        """The seconds by sort of work, adding up to the total; copies belong to ZeRO."""
        return {
            "compute_s": self.compute_s,
            "recompute_s": self.recompute_s,
            "tp_s": self.tp_s,
            "zero_s": self.zero_s + self.copy_s,
            "wait_s": self.wait_s,
            "relayout_s": self.relayout_s,
            "border_s": self.border_s,
        }


class MicroBatchSeconds(Terms):
    forward: PhaseSeconds = PhaseSeconds()
    backward: PhaseSeconds = PhaseSeconds()

    @property
    def total_s(self) -> float:
        return self.forward.total_s + self.backward.total_s


class StepSeconds(Terms):
    """Once a step and stage, after its last backward. `hidden_s` is not part of the total."""

    gradient_sync_s: NonNegativeFloat = 0.0
    copy_s: NonNegativeFloat = 0.0
    parameter_gather_s: NonNegativeFloat = 0.0
    tied_sync_s: NonNegativeFloat = 0.0
    optimizer_s: NonNegativeFloat = 0.0
    other_s: NonNegativeFloat = 0.0
    hidden_s: NonNegativeFloat = 0.0

    @property
    def total_s(self) -> float:
        return (
            self.gradient_sync_s
            + self.copy_s
            + self.parameter_gather_s
            + self.tied_sync_s
            + self.optimizer_s
            + self.other_s
        )


class StateBytes(Terms):
    """What a rank holds from step to step, padding included.

    `master_bytes`: the rank's shard of the fp32 parameters. `copy_bytes`: the whole parameters in
    the compute dtype, where the strategy keeps them between micro-batches.
    """

    master_bytes: NonNegativeInt = 0
    copy_bytes: NonNegativeInt = 0
    gradient_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0

    @property
    def total_bytes(self) -> int:
        return self.master_bytes + self.copy_bytes + self.gradient_bytes + self.optimizer_bytes


class TransientBytes(Terms):
    """What is alive beside states and saved activations while one layer runs.

    Within a layer the terms add up; over layers the largest total counts. `accumulate_bytes`: a new
    gradient beside that of the micro-batches before; the first backward pass of a step has none.
    """

    gather_bytes: NonNegativeInt = 0
    reduce_bytes: NonNegativeInt = 0
    recompute_bytes: NonNegativeInt = 0
    working_bytes: NonNegativeInt = 0
    accumulate_bytes: NonNegativeInt = 0

    @property
    def total_bytes(self) -> int:
        return self.first_pass_bytes + self.accumulate_bytes

    @property
    def first_pass_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.recompute_bytes + self.working_bytes
