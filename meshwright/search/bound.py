"""A lower bound of the simulated step by recursion over the stages, last to first; for 1F1B and GPipe.

Stage i starts with k forwards (1F1B: min(m, P - i); GPipe: m). Any path in the graph of actions bounds the step; with
f, b, c = f + b of stage i and primes of stage i + 1 (shared notes, section 2, extended to the last stage of GPipe):

    A  = max(k f, f + A') + b         start of the first forward .. end of the first backward
    E  = max(k b, E' + b) + f         start of the last forward .. end of the last backward
    own = (A - b) + (m - k) c + (E - f)                 if m > k
    own = max((A - b) + m b, m f + (E - f))             if m = k
    L  = max(L' + c, own)             start of the first forward .. end of the last backward
    Lg = max(Lg' + f, L + g)          .. end of the once-a-step work of this stage or a later one

All lines grow with f, b, c, g, so lower bounds of those (even of each alone, c >= f + b) give a bound. Every line is
written with c where f + b occurs. Some sums may be known more sharply than from c and g alone: option values hold
h1 <= (m - k + 1) c + g, h2 <= m c + g and h0 <= c + g.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import Ints

F, B, C, G, H1, H2, H0 = range(7)  # columns of option values


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """How a stage takes part in the schedule."""

    num_micro_batches: int
    num_ahead: tuple[int, ...]  # [stage] forwards before the first backward
    phased: bool  # GPipe: all forwards, then all backwards


def slopes(pipe: Pipe, stage: int) -> tuple[int, int, int]:
    """Return the weights of c in the columns H1, H2, H0."""
    m, k = pipe.num_micro_batches, pipe.num_ahead[stage]
    return m - k + 1, m, 1


def first_labels(pipe: Pipe, stage: int, values: Ints) -> Ints:
    """Return labels (A, E, L, Lg, D) of the last stage for option values [n, 7]."""
    k, m = pipe.num_ahead[stage], pipe.num_micro_batches
    f, b, c, g = values[:, F], values[:, B], values[:, C], values[:, G]
    whole = m * c
    down = c * pipe.phased
    return np.stack([(k - 1) * f + c, (k - 1) * b + c, whole, np.maximum(whole + g, values[:, H2]), down], axis=1)


def next_labels(pipe: Pipe, stage: int, values: Ints, later: Ints) -> Ints:
    """Return labels (A, E, L, Lg, D) from option values [n, 7] of `stage` and labels [n, 5] of the stage after it."""
    k, m = pipe.num_ahead[stage], pipe.num_micro_batches
    f, b, c, g = values[:, F], values[:, B], values[:, C], values[:, G]
    a_later, e_later, l_later, lg_later, down = later.T
    a = c + np.maximum((k - 1) * f, a_later)
    e = c + np.maximum((k - 1) * b, e_later)
    sharp = values[:, H2]
    if m > k:
        detours = np.maximum((k - 1) * f, a_later) + np.maximum((k - 1) * b, e_later)
        own = (m - k + 1) * c + np.maximum(detours, (k - 1) * c)
        sharp = np.maximum(sharp, values[:, H1] + a_later + e_later)
    else:
        own = c + np.maximum(np.maximum((m - 1) * b + a_later, (m - 1) * f + e_later), (m - 1) * c)
    if pipe.phased:
        own = np.maximum(own, m * c + down)
    whole = np.maximum(l_later + c, own)
    sharp = np.maximum(sharp, values[:, H0] + l_later)
    ended = np.maximum(np.maximum(lg_later + f, whole + g), sharp)
    return np.stack([a, e, whole, ended, (down + c) * pipe.phased], axis=1)


def exact_values(pipe: Pipe, stage: int, forward: Ints, backward: Ints, step: Ints) -> Ints:
    """Return option values [n, 7] of known stage times."""
    c = forward + backward
    return np.stack([forward, backward, c, step, *(weight * c + step for weight in slopes(pipe, stage))], axis=1)


def bound_of(pipe: Pipe, forward: Ints, backward: Ints, step: Ints) -> NDArray[np.int64]:
    """Return the bound of each candidate from [candidate, stage] times."""
    last = forward.shape[1] - 1
    columns = (forward[:, last], backward[:, last], step[:, last])
    labels = first_labels(pipe, last, exact_values(pipe, last, *columns))
    for stage in range(last - 1, -1, -1):
        columns = (forward[:, stage], backward[:, stage], step[:, stage])
        labels = next_labels(pipe, stage, exact_values(pipe, stage, *columns), labels)
    return labels[:, 3]
