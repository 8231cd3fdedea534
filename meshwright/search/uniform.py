"""The best plan with one strategy for all blocks and even stages: found by arithmetic, the first to beat."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.simulate import simulate_many
from meshwright.search.labels import Floats
from meshwright.search.problem import StageChoice, StageProblem, freed_bytes, price
from meshwright.spec.strategy import Strategy


def best_uniform(
    problem: StageProblem, candidates: tuple[Strategy, ...], boundaries: tuple[int, ...]
) -> StageChoice | None:
    """Return it, or None when none fits; embedding and head use the strategy without recomputation."""
    at = {strategy: column for column, strategy in enumerate(candidates)}
    plain = np.array([at[s if s.recompute == "none" else _plain(s)] for s in candidates], np.intp)
    columns = np.arange(len(candidates))
    cuts = np.array(boundaries[:-1])

    def chosen(values: Floats) -> Floats:
        """Return [layer, column] of a table [layer, strategy]."""
        part = values.copy()
        part[0], part[-1] = values[0, plain], values[-1, plain]
        return part

    parts = [chosen(v) for v in (problem.forward_s, problem.backward_s, problem.step_s)]
    allowed = np.isfinite(parts[0]).all(axis=0)
    parts = [np.where(np.isfinite(part), part, 0.0) for part in parts]
    for part, switch in zip(parts, (problem.switch_forward_s, problem.switch_backward_s), strict=False):
        part[1:] += _switched(switch, plain, columns, len(part))
    stage_f, stage_b, stage_g = (np.add.reduceat(part, cuts, axis=0) for part in parts)
    senders = cuts[1:] - 1
    for stage, border in ((stage_f, problem.border_forward_s), (stage_b, problem.border_backward_s)):
        sent = _sent(border, senders, plain, columns)
        stage[:-1] += sent
        stage[1:] += sent
    stage_g += problem.stage_step_s[:, None]
    if problem.tied and problem.num_stages > 1 and problem.tied_step_s is not None:
        for end in (0, -1):
            stage_g[end] += problem.tied_step_s[plain]
    fits = allowed & (_bytes(problem, chosen, cuts, plain) <= problem.budget_bytes[:, None]).all(axis=0)
    fitting = np.flatnonzero(fits)
    if not len(fitting):
        return None
    forward, backward, once = (part[:, fitting].T for part in (stage_f, stage_b, stage_g))
    times = simulate_many(problem.schedule, forward, backward, once, problem.num_micro_batches)
    column = int(fitting[times.argmin()])
    ends = int(plain[column])
    return price(problem, boundaries, (ends, *[column] * (problem.num_layers - 2), ends))


def _plain(strategy: Strategy) -> Strategy:
    return strategy.model_copy(update={"recompute": "none"})


def _switched(switch: Floats, plain: NDArray[np.intp], columns: NDArray[np.intp], num_layers: int) -> Floats:
    """Return [layer from 1 on, column]: what is paid between neighbours (a block's layout may not be its end's)."""
    tables = np.broadcast_to(switch, (num_layers, *switch.shape[-2:]))
    rows = tables[1:, columns, columns].copy()
    rows[0] = tables[1, plain, columns if num_layers > 2 else plain]  # noqa: PLR2004 no block between the ends
    rows[-1] = tables[-1, columns if num_layers > 2 else plain, plain]  # noqa: PLR2004
    return rows


def _sent(border: Floats, senders: NDArray[np.intp], plain: NDArray[np.intp], columns: NDArray[np.intp]) -> Floats:
    """Return [border, column]: the send of each stage but the last; layer 0 sends in the layout of the ends."""
    rows: Floats = border[senders] if border.ndim > 1 else np.tile(border, (len(senders), 1))
    sent: Floats = np.where((senders == 0)[:, None], rows[:, plain], rows[:, columns])
    return sent


def _bytes(
    problem: StageProblem, chosen: Callable[[Floats], Floats], cuts: NDArray[np.intp], plain: NDArray[np.intp]
) -> Floats:
    """Return [stage, column] bytes."""
    states, act, transient, freed = (
        chosen(v) for v in (problem.states_bytes, problem.act_bytes, problem.transient_bytes, freed_bytes(problem))
    )
    held = problem.in_flight[:, None].astype(float)
    used: Floats = np.add.reduceat(states, cuts, axis=0) + held * np.add.reduceat(act, cuts, axis=0)
    up_to = np.cumsum(np.where(np.isfinite(freed), freed, 0.0), axis=0)
    ends = np.append(cuts[1:], len(freed)) - 1
    stage_of = np.searchsorted(ends, np.arange(len(freed)))
    used = used + np.maximum.reduceat(transient - (up_to[ends][stage_of] - up_to), cuts, axis=0)
    if problem.tied and problem.num_stages == 1 and problem.tied_extra_bytes is not None:
        used = used + problem.tied_extra_bytes[plain]
    return used
