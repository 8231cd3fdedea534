"""A StageProblem from plain arrays: what is left out costs nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from meshwright.search.labels import Floats
from meshwright.search.problem import StageProblem

Maybe = ArrayLike | None


def problem_of_arrays(
    *,
    forward_s: Floats,
    backward_s: Maybe,
    step_s: Maybe,
    memory: tuple[ArrayLike, ArrayLike, Maybe, Maybe],
    switches: tuple[Maybe, Maybe],
    borders: tuple[Maybe, Maybe],
    stages: tuple[ArrayLike, ArrayLike],
    layout: Maybe,
    num_micro_batches: int,
) -> StageProblem:
    """Return the problem of `stages.solve`, which says what the arrays are; the schedule is for the caller to set."""
    count = forward_s.shape[1]
    nothing = np.where(np.isfinite(forward_s), 0.0, np.inf)
    states, activations, transients, freed = memory
    in_flight = np.atleast_1d(np.array(stages[0], np.intp))

    def rows(values: Maybe) -> Floats:
        return nothing if values is None else np.array(values, float)

    sends, enters = zip(*(_send_and_enter(border, count) for border in borders), strict=True)
    return StageProblem(
        forward_s=forward_s,
        backward_s=rows(backward_s),
        step_s=rows(step_s),
        states_bytes=rows(states),
        act_bytes=rows(activations),
        transient_bytes=rows(transients),
        freed_bytes=None if freed is None else np.array(freed, float),
        switch_forward_s=_pairs(switches[0], count),
        switch_backward_s=_pairs(switches[1], count),
        enter_forward_s=enters[0],
        enter_backward_s=enters[1],
        border_forward_s=sends[0],
        border_backward_s=sends[1],
        layout=np.array(range(count) if layout is None else layout, np.intp),
        in_flight=in_flight,
        budget_bytes=np.zeros(len(in_flight)) + np.array(stages[1], float),
        stage_step_s=np.zeros(len(in_flight)),
        num_micro_batches=num_micro_batches,
        schedule="1f1b",
    )


def _pairs(values: Maybe, count: int) -> Floats:
    """Return [(layer,) strategy, strategy]."""
    if values is None:
        return np.zeros((count, count))
    array = np.array(values, float)
    return np.zeros((count, count)) + array if array.ndim < 2 else array  # noqa: PLR2004 one number for all


def _send_and_enter(values: Maybe, count: int) -> tuple[Floats, Floats]:
    """Return a border as a send, which both neighbours pay, and as a switch, which the receiver pays; one is zero."""
    array = np.zeros(()) if values is None else np.array(values, float)
    if array.ndim > 1 and array.shape[-2:] == (count, count):
        return np.zeros(count), array
    return (np.zeros(count) + array if array.ndim == 0 else array), np.zeros((count, count))
