"""What came of running a plan briefly on real ranks."""

from __future__ import annotations

from statistics import median
from typing import Literal

from pydantic import model_validator

from meshwright.spec.base import NonNegativeInt, PositiveFloat, Spec
from meshwright.spec.plan import Plan


class Trial(Spec):
    """A plan, the seconds of a step in every turn it had, and the peak bytes of every rank.

    `failure` says why it could not run to the end; then there may be no figures.
    """

    plan: Plan
    step_s: tuple[PositiveFloat, ...] = ()
    peak_bytes: tuple[NonNegativeInt, ...] = ()
    failure: str | None = None

    @property
    def has_run(self) -> bool:
        """Whether it ran to the end of every turn it had."""
        return bool(self.step_s) and self.failure is None

    @property
    def median_s(self) -> float:
        """Median seconds of a step; infinite when it did not run."""
        return median(self.step_s) if self.has_run else float("inf")


class Trials(Spec):
    """Trials of plans that take turns in one job; `running` is the one whose turn it is."""

    schema_version: Literal[1] = 1
    trials: tuple[Trial, ...]
    running: NonNegativeInt | None = None

    @staticmethod
    def of(plans: tuple[Plan, ...]) -> Trials:
        """Return trials of `plans`, none of which has had a turn."""
        return Trials(trials=tuple(Trial(plan=plan) for plan in plans))

    @model_validator(mode="after")
    def _check(self) -> Trials:
        if self.running is not None and self.running >= len(self.trials):
            raise ValueError(f"running ({self.running}) is not one of {len(self.trials)} trials")
        return self

    def with_trial(self, index: int, trial: Trial) -> Trials:
        """Return the trials with another in the place of number `index`, and none running."""
        trials = (*self.trials[:index], trial, *self.trials[index + 1 :])
        return self.model_copy(update={"trials": trials, "running": None})
