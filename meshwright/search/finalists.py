"""The plans worth a trial on real ranks: the best, and good ones that differ from it in what the model might misprice.

They are the best plans of other settings (stages, micro-batches, batch size) and of other spaces
(only data-parallel, only sharded, only tensor-parallel, ...). A trial decides between them where the
cost model errs.
"""

from __future__ import annotations

import time
from dataclasses import replace

from meshwright.errors import UserError
from meshwright.search.engine import Found, Infeasible, Progress, Request, refined, search
from meshwright.search.space import SPACES
from meshwright.spec.plan import Plan

_CONTRASTS = ("uniform", "3d", "dp+tp", "dp+pp", "ddp", "zero3", "tp", "pp")
_LEAST_TIME_S = 0.5


def finalists(request: Request, count: int, progress: Progress | None = None) -> tuple[Plan, ...] | Infeasible:
    """Return up to `count` different plans, the best one first and then by predicted seconds a sample."""
    if count < 1:
        raise UserError(f"top: must be at least 1, not {count}")
    deadline = time.perf_counter() + request.time_limit_s
    outcome = search(request, progress)
    if isinstance(outcome, Infeasible):
        return outcome
    moment = replace(request, time_limit_s=_LEAST_TIME_S)
    found = [outcome.plan, *(refined(moment, plan) for plan in outcome.runners_up[: count - 1])]
    for name in _CONTRASTS if count > 1 and request.space.name not in _CONTRASTS else ():
        left_s = max(_LEAST_TIME_S, deadline - time.perf_counter())
        try:
            other = search(replace(request, space=SPACES[name], time_limit_s=left_s))
        except UserError:
            continue  # the space has no plan with the number of stages that was asked for
        if isinstance(other, Found):
            found += [other.plan, *other.runners_up]
    different: dict[object, Plan] = {}
    for plan in found:
        different.setdefault((plan.stages, plan.num_micro_batches, plan.global_batch_size), plan)
    best, *others = different.values()
    return (best, *sorted(others, key=_per_sample_s)[: count - 1])


def _per_sample_s(plan: Plan) -> float:
    assert plan.predicted is not None  # noqa: S101 the search predicts its plans
    return plan.predicted.step_s / plan.global_batch_size
