"""When nothing fits: the plan whose most overfull stage is least over its budget.

Memory does not depend on neighbours, so a range of layers needs at least, exactly,

    min over tau of  sum_l min(states + in_flight * act over strategies with transient <= tau) + tau

and the cut with the least largest overflow follows by dynamic programming. Tied layers are tried strategy by strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.search.labels import Floats
from meshwright.search.problem import StageProblem, stage_bytes


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The least overfull plan: what each stage needs and by how much it is over its budget (negative: room left)."""

    boundaries: tuple[int, ...]
    strategies: tuple[int, ...]
    stage_bytes: tuple[float, ...]
    over_bytes: tuple[float, ...]

    @property
    def worst_stage(self) -> int:
        """Return the stage that is most over its budget."""
        return int(np.argmax(self.over_bytes))


@dataclass(frozen=True, kw_only=True)
class _Least:
    """sums[tau, layer]: least bytes of the layers before `layer` with transients up to `taus`."""

    taus: Floats
    sums: Floats  # [tau, layer + 1]
    choice: NDArray[np.intp]  # [tau, layer]


def shortfall(problem: StageProblem, *, partitions: tuple[tuple[int, ...], ...] | None = None) -> Shortfall | None:
    """Return the plan with the least largest overflow, or None when some layer has no strategy (or too few layers)."""
    if problem.num_layers < problem.num_stages:
        return None
    allowed = np.isfinite(problem.forward_s) & np.isfinite(problem.states_bytes) & np.isfinite(problem.transient_bytes)
    ties = np.flatnonzero(allowed[0] & allowed[-1]).tolist() if problem.tied else [-1]
    best: Shortfall | None = None
    for tied in ties:
        found = _least_overfull(problem, _restricted(allowed, tied), tied, partitions)
        if found is not None and (best is None or max(found.over_bytes) < max(best.over_bytes)):
            best = found
    return best


def _restricted(allowed: NDArray[np.bool_], tied: int) -> NDArray[np.bool_]:
    if tied < 0:
        return allowed
    here = allowed.copy()
    for layer in (0, -1):
        here[layer] &= np.arange(allowed.shape[1]) == tied
    return here


def _least_overfull(
    problem: StageProblem, allowed: NDArray[np.bool_], tied: int, partitions: tuple[tuple[int, ...], ...] | None
) -> Shortfall | None:
    if not allowed.any(axis=1).all():
        return None
    tables = [_least(problem, allowed, int(held)) for held in problem.in_flight]
    over = np.full((problem.num_stages, problem.num_layers + 1, problem.num_layers + 1), np.inf)
    for stage, table in enumerate(tables):
        for start in range(problem.num_layers):
            need = (table.sums[:, start + 1 :] - table.sums[:, start : start + 1] + table.taus[:, None]).min(axis=0)
            over[stage, start, start + 1 :] = need - problem.budget_bytes[stage]
    if partitions is None:
        cuts = best_cut(over)
    else:
        cuts = min(partitions, key=lambda cut: max(over[i, cut[i], cut[i + 1]] for i in range(problem.num_stages)))
    strategies: list[int] = []
    for table, start, end in zip(tables, cuts, cuts[1:], strict=False):
        at = int((table.sums[:, end] - table.sums[:, start] + table.taus).argmin())
        strategies.extend(int(s) for s in table.choice[at, start:end])
    used = stage_bytes(problem, cuts, tuple(strategies))
    return Shortfall(
        boundaries=cuts,
        strategies=tuple(strategies),
        stage_bytes=tuple(used),
        over_bytes=tuple(float(u - b) for u, b in zip(used, problem.budget_bytes, strict=True)),
    )


def _least(problem: StageProblem, allowed: NDArray[np.bool_], held: int) -> _Least:
    """Tabulate one in-flight count. Below the largest of the layers' least transients nothing is possible."""
    transient = np.where(allowed, problem.transient_bytes, np.inf)
    memory = np.where(allowed, problem.states_bytes, np.inf) + held * np.where(allowed, problem.act_bytes, 0.0)
    taus = np.unique(transient[np.isfinite(transient)])
    large = float(memory[allowed].sum() + taus[-1] + 1.0)  # worse than any plan: marks "not possible"
    within = np.where(transient[None] <= taus[:, None, None], memory[None], large)
    sums = np.concatenate([np.zeros((len(taus), 1)), np.cumsum(within.min(axis=2), axis=1)], axis=1)
    return _Least(taus=taus, sums=sums, choice=within.argmin(axis=2))


def best_cut(over: Floats) -> tuple[int, ...]:
    """Return the boundaries with the least largest overflow."""
    num_stages, size = over.shape[:2]
    worst = np.full((num_stages + 1, size), np.inf)
    worst[num_stages, size - 1] = -np.inf
    following = np.zeros((num_stages, size), np.intp)
    for stage in range(num_stages - 1, -1, -1):
        total = np.maximum(over[stage], worst[stage + 1][None, :])
        following[stage] = total.argmin(axis=1)
        worst[stage] = total.min(axis=1)
    cuts = [0]
    for stage in range(num_stages):
        cuts.append(int(following[stage, cuts[-1]]))
    return tuple(cuts)
