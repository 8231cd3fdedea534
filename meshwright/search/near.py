"""Good plans without a proof, by a fixed amount of work: for settings that lose, to hold against the best.

No labels and no clock: a stage's layers are the fastest plan that is begun as one least weighted sum has it and ended
as another (relaxation.py), which mostly is the optimum or next to it. So the same question has the same answer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import FAR, Ints
from meshwright.search.peaks import Peaks
from meshwright.search.relaxation import (
    LayerProblem,
    crossed_plan,
    peaks_of,
    plan_sums,
    prefix_sums,
    relax,
    seen,
    suffix_sums,
)


def good_fitting(problem: LayerProblem, transients: Ints, freed: Ints) -> NDArray[np.intp] | None:
    """Return a fast choice whose peak is within the budget, or None where none is found (as `solve_fitting`)."""
    allowed = problem.time < FAR
    if not allowed.any(axis=1).all():
        return None
    if freed.any():
        peaks = peaks_of(problem, transients, freed)
        return _crossed(seen(problem, peaks, np.eye(len(allowed))[-1]), peaks)
    tops = {int(transients.min(axis=1).max()), int(transients[allowed].max())}
    found = [plan for top in sorted(tops) if (plan := _below(problem, transients, top)) is not None]
    return min(found, key=lambda plan: plan_sums(problem, plan), default=None)


def _below(problem: LayerProblem, transients: Ints, top: int) -> NDArray[np.intp] | None:
    """Return a fast choice with transients up to `top` that fits beside so much."""
    allowed = (problem.time < FAR) & (transients <= top)
    time, memory = (np.where(allowed, part, FAR) for part in (problem.time, problem.memory))
    return _crossed(replace(problem, time=time, memory=memory, budget=problem.budget - top), None)


def _crossed(problem: LayerProblem, peaks: Peaks | None) -> NDArray[np.intp] | None:
    relaxed = relax(problem)
    if relaxed is None:
        return None
    whole = replace(problem, peaks=peaks)
    before, after = (sums(whole, relaxed.before.multipliers, traced=True) for sums in (prefix_sums, suffix_sums))
    return crossed_plan(whole, before, after)
