"""The problem of cutting layers into pipeline stages, as arrays; its price; and the same in integers.

Stage i holds layers b_i..b_{i+1}-1 under strategies s_l. With sums over its layers:

    F_i = sum forward + sum switch_forward (neighbours inside) + received switch and border + sent border
    B_i = the same with backward;   g_i = sum step + stage_step[i] (+ tied_step on first and last when tied, P > 1)
    M_i = sum states + in_flight[i] * sum act + max over l of (transient_l - sum over j > l of freed_j)
          (+ tied_extra when tied, P = 1) <= budget[i]

A border's hand-on tensor travels in the layout of the sender's last layer; both neighbours pay the send, the receiver
pays the switch (or `enter`, where that is given). Step time: cost/simulate.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.simulate import simulate
from meshwright.search.labels import FAR, Floats, Ints, decimal_scale, to_ints
from meshwright.search.peaks import highest
from meshwright.spec.schedule import ScheduleName

_PAIRS = 2  # dimensions of a table of switches without a layer axis


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """L layers, S strategies, P stages. Entries of a [layer, strategy] array that are not allowed are inf."""

    forward_s: Floats  # [L, S] per micro-batch
    backward_s: Floats  # [L, S] per micro-batch
    step_s: Floats  # [L, S] once a step
    states_bytes: Floats  # [L, S]
    act_bytes: Floats  # [L, S] per micro-batch in flight
    transient_bytes: Floats  # [L, S] the stage pays the largest, less what later layers have freed by then
    switch_forward_s: Floats  # [S, S] or [L, S, S]: between layer l-1 under a and layer l under b
    switch_backward_s: Floats  # like switch_forward_s
    border_forward_s: Floats  # [S] or [L, S]: sending what layer l hands on, in the layout of its strategy
    border_backward_s: Floats  # like border_forward_s
    layout: NDArray[np.intp]  # [S] switch and border costs depend on nothing else of a strategy
    in_flight: NDArray[np.intp]  # [P] micro-batches held by a stage
    budget_bytes: Floats  # [P]
    stage_step_s: Floats  # [P] once a step, whatever the strategies
    num_micro_batches: int
    schedule: ScheduleName
    enter_forward_s: Floats | None = None  # like switch_forward_s, across a border (None: the switch)
    enter_backward_s: Floats | None = None
    freed_bytes: Floats | None = None  # [L, S] gone when earlier layers need theirs, < 0: come meanwhile (None: 0)
    tied: bool = False  # first and last layer share their strategy
    tied_step_s: Floats | None = None  # [S] when P > 1: on the first and on the last stage
    tied_extra_bytes: Floats | None = None  # [S] when P = 1: what the shared weight adds, whatever layer runs

    @property
    def num_layers(self) -> int:
        """Return L."""
        return len(self.forward_s)

    @property
    def num_stages(self) -> int:
        """Return P."""
        return len(self.in_flight)


@dataclass(frozen=True, kw_only=True)
class StageChoice:
    """A plan of the problem and what it costs; `lower_bound_s` holds for every plan (equal: proved optimal)."""

    boundaries: tuple[int, ...]  # [P + 1]
    strategies: tuple[int, ...]  # [L]
    objective_s: float
    lower_bound_s: float
    stage_forward_s: tuple[float, ...]
    stage_backward_s: tuple[float, ...]
    stage_step_s: tuple[float, ...]
    stage_bytes: tuple[float, ...]

    @property
    def stage_s(self) -> tuple[float, ...]:
        """Return what each stage spends on a micro-batch, forward and backward."""
        return tuple(f + b for f, b in zip(self.stage_forward_s, self.stage_backward_s, strict=True))

    @property
    def gap(self) -> float:
        """Return how much better any plan could be, as a fraction of the objective."""
        return 1.0 - self.lower_bound_s / self.objective_s if self.objective_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A StageProblem in integers: times x time_scale, bytes x byte_scale, layouts numbered from 0."""

    source: StageProblem
    time_scale: float
    byte_scale: float
    forward: Ints  # [L, S], FAR where not allowed; so are the next ones
    backward: Ints
    step: Ints
    memory: tuple[Ints, ...]  # [stage][L, S] states + in_flight * activations
    transient: Ints
    freed: Ints  # 0 where not allowed
    budget: tuple[int, ...]  # [stage]
    stage_step: tuple[int, ...]
    tied_step: Ints  # [S] 0 unless tied and P > 1
    tied_extra: Ints  # [S] 0 unless tied and P = 1
    layout: NDArray[np.intp]  # [S] numbered 0..num_layouts-1
    switch: Ints  # [2 (forward, backward), L, layout, layout]
    enter: Ints  # the same, across a border
    border: Ints  # [2, L, layout] sending from layer l
    layer_class: tuple[int, ...]  # [L] equal numbers: equal rows, switches and borders

    @property
    def frees(self) -> bool:
        """Return whether layers free something before earlier ones run backward."""
        return bool(self.freed.any())

    @property
    def num_layouts(self) -> int:
        """Return the number of layouts."""
        return self.switch.shape[2]


def price(problem: StageProblem, boundaries: tuple[int, ...], strategies: tuple[int, ...]) -> StageChoice:
    """Return the plan with its simulated step time; the lower bound is left at 0. Nothing is checked."""
    num_stages, chosen = problem.num_stages, np.array(strategies)
    rows = np.arange(problem.num_layers)
    forward, backward, step = (
        array[rows, chosen].astype(float) for array in (problem.forward_s, problem.backward_s, problem.step_s)
    )
    enter_forward_s, enter_backward_s = entered(problem)
    for layer in rows[1:]:
        is_first = layer in boundaries
        moved = chosen[layer - 1], chosen[layer]
        forward[layer] += _at(enter_forward_s if is_first else problem.switch_forward_s, layer, 3)[moved]
        backward[layer] += _at(enter_backward_s if is_first else problem.switch_backward_s, layer, 3)[moved]
    spans = [slice(low, high) for low, high in pairwise(boundaries)]
    stage_f, stage_b, stage_g = (np.array([part[span].sum() for span in spans]) for part in (forward, backward, step))
    for stage in range(1, num_stages):
        sender = boundaries[stage] - 1
        stage_f[stage - 1 : stage + 1] += _at(problem.border_forward_s, sender, 2)[chosen[sender]]
        stage_b[stage - 1 : stage + 1] += _at(problem.border_backward_s, sender, 2)[chosen[sender]]
    stage_g += problem.stage_step_s
    if problem.tied and num_stages > 1 and problem.tied_step_s is not None:
        stage_g[0] += problem.tied_step_s[chosen[0]]
        stage_g[-1] += problem.tied_step_s[chosen[0]]
    return StageChoice(
        boundaries=boundaries,
        strategies=strategies,
        objective_s=simulate(problem.schedule, stage_f, stage_b, stage_g, problem.num_micro_batches),
        lower_bound_s=0.0,
        stage_forward_s=tuple(stage_f.tolist()),
        stage_backward_s=tuple(stage_b.tolist()),
        stage_step_s=tuple(stage_g.tolist()),
        stage_bytes=tuple(stage_bytes(problem, boundaries, strategies)),
    )


def entered(problem: StageProblem) -> tuple[Floats, Floats]:
    """Return the switches across a border, forward and backward."""
    forward_s, backward_s = problem.enter_forward_s, problem.enter_backward_s
    return (
        problem.switch_forward_s if forward_s is None else forward_s,
        problem.switch_backward_s if backward_s is None else backward_s,
    )


def stage_bytes(problem: StageProblem, boundaries: tuple[int, ...], strategies: tuple[int, ...]) -> list[float]:
    """Return the bytes of every stage."""
    rows, chosen = np.arange(problem.num_layers), np.array(strategies)
    states, act, transient, freed = (
        array[rows, chosen]
        for array in (problem.states_bytes, problem.act_bytes, problem.transient_bytes, freed_bytes(problem))
    )
    used: list[float] = []
    for stage, (low, high) in enumerate(pairwise(boundaries)):
        held = states[low:high].sum() + problem.in_flight[stage] * act[low:high].sum()
        used.append(float(held + highest(transient[low:high], freed[low:high])))
    if problem.tied and problem.num_stages == 1 and problem.tied_extra_bytes is not None:
        used[0] += float(problem.tied_extra_bytes[chosen[0]])
    return used


def freed_bytes(problem: StageProblem) -> Floats:
    """Return [L, S] what layers free."""
    return np.zeros_like(problem.act_bytes) if problem.freed_bytes is None else problem.freed_bytes


def to_exact(problem: StageProblem) -> Exact:
    """Scale to integers, number the layouts, find equal layers; reject costs that are not functions of the layout."""
    allowed = np.ones(problem.forward_s.shape, bool)
    arrays = (
        problem.forward_s,
        problem.backward_s,
        problem.step_s,
        problem.states_bytes,
        problem.act_bytes,
        problem.transient_bytes,
        freed_bytes(problem),
    )
    for array in arrays:
        if array.shape != problem.forward_s.shape:
            raise ValueError(f"stages: shapes {array.shape} and {problem.forward_s.shape}; all [layer, strategy]")
        allowed &= np.isfinite(array)
    forward, backward, step, states, act, transient, freed = (np.where(allowed, array, np.inf) for array in arrays)
    layout, switches, enters, borders = _by_layout(problem)
    tied_step = _or_zero(problem.tied_step_s, problem, problem.tied and problem.num_stages > 1)
    extra = _or_zero(problem.tied_extra_bytes, problem, problem.tied and problem.num_stages == 1)
    per_micro = sum(_sum_of_largest(part) for part in (forward, backward, *switches, *enters)) + 2 * sum(
        _sum_of_largest(part) for part in borders
    )
    once = _sum_of_largest(step) + float(np.abs(problem.stage_step_s).sum()) + 2 * float(tied_step.max())
    largest = 2 * (problem.num_micro_batches + problem.num_stages) * per_micro + 2 * once
    digit = problem.num_layers if problem.num_stages == 1 else 1  # layers.py counts changes in a lowest digit
    time_scale = decimal_scale(digit * largest, 15)
    stored = _sum_of_largest(states) + _sum_of_largest(act) * int(problem.in_flight.max())
    stored += _sum_of_largest(transient) + _sum_of_largest(freed)
    finite_budget = np.minimum(problem.budget_bytes, stored + 1)
    byte_scale = decimal_scale(2 * (stored + float(np.abs(finite_budget).max()) + float(np.abs(extra).max())), 9)
    states_int, act_int = to_ints(states, byte_scale), to_ints(act, byte_scale)
    far = ~allowed
    exact = Exact(
        source=problem,
        time_scale=time_scale,
        byte_scale=byte_scale,
        forward=to_ints(forward, time_scale),
        backward=to_ints(backward, time_scale),
        step=to_ints(step, time_scale),
        memory=tuple(
            np.where(far, FAR, np.where(far, 0, states_int) + int(held) * np.where(far, 0, act_int))
            for held in problem.in_flight
        ),
        transient=to_ints(transient, byte_scale),
        freed=np.where(far, 0, to_ints(freed, byte_scale)),
        budget=tuple(int(b) for b in to_ints(finite_budget, byte_scale)),
        stage_step=tuple(int(g) for g in to_ints(problem.stage_step_s, time_scale)),
        tied_step=to_ints(tied_step, time_scale),
        tied_extra=to_ints(extra, byte_scale),
        layout=layout,
        switch=np.stack([to_ints(part, time_scale) for part in switches]),
        enter=np.stack([to_ints(part, time_scale) for part in enters]),
        border=np.stack([to_ints(part, time_scale) for part in borders]),
        layer_class=(),
    )
    return _with_classes(exact)


def _at(values: Floats, layer: int, full_ndim: int) -> Floats:
    """Return the entry of `layer` where there is one a layer."""
    entry: Floats = values[layer] if values.ndim == full_ndim else values
    return entry


def _or_zero(values: Floats | None, problem: StageProblem, used: bool) -> Floats:
    zeros = np.zeros(problem.forward_s.shape[1])
    return zeros if values is None or not used else zeros + values


def _sum_of_largest(values: Floats) -> float:
    return float(np.where(np.isfinite(values), np.abs(values), 0).reshape(len(values), -1).max(axis=1).sum())


def _by_layout(problem: StageProblem) -> tuple[NDArray[np.intp], list[Floats], list[Floats], list[Floats]]:
    """Return layout numbers, switches inside and across borders [L, layout, layout], sends [L, layout]; all finite."""
    _, first, layout = np.unique(problem.layout, return_index=True, return_inverse=True)
    count, layout = problem.num_layers, layout.reshape(-1)
    switches: list[Floats] = []
    borders: list[Floats] = []
    for values in (problem.switch_forward_s, problem.switch_backward_s, *entered(problem)):
        given = [np.zeros_like(values[0]), *values[1:]] if values.ndim > _PAIRS else [values]
        tables = [_of_layouts(table, first, layout) for table in given]
        small = np.stack(tables * (count if len(tables) == 1 else 1))
        small[0] = 0.0
        switches.append(small)
    for values in (problem.border_forward_s, problem.border_backward_s):
        full = np.broadcast_to(values, (count, values.shape[-1]))
        small = full[:, first]
        if not np.isfinite(full).all() or (small[:, layout] != full).any():
            raise ValueError("stages: border costs must be finite and depend on the layout only")
        borders.append(small)
    return layout, switches[:2], switches[2:], borders


def _of_layouts(table: Floats, first: NDArray[np.intp], layout: NDArray[np.intp]) -> Floats:
    """Return [layout, layout] from [strategy, strategy]."""
    small: Floats = table[np.ix_(first, first)]
    if not np.isfinite(table).all() or (small[np.ix_(layout, layout)] != table).any():
        raise ValueError("stages: switch costs must be finite and depend on the layouts only")
    return small


def _with_classes(exact: Exact) -> Exact:
    """Number the layers so that equal numbers have equal rows. Layer 0 has no switch into it and stays alone."""
    seen: dict[tuple[bytes, ...], int] = {}
    classes: list[int] = []
    for layer in range(exact.source.num_layers):
        rows = (exact.forward, exact.backward, exact.step, exact.transient, exact.freed, *exact.memory)
        key = tuple(row[layer].tobytes() for row in rows)
        key += (exact.switch[:, layer].tobytes(), exact.enter[:, layer].tobytes(), exact.border[:, layer].tobytes())
        key += (str(layer == 0).encode(),)
        classes.append(seen.setdefault(key, len(seen)))
    return replace(exact, layer_class=tuple(classes))
