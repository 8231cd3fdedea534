"""What the benchmarks on CPU ranks share: a profile of this machine, plans priced with it, trials on real ranks.

Ranks that share cores are not independent devices: with more ranks than cores a rank that waits
gives its core to another, so bubbles cost less than predicted. The default is one rank a core.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import meshwright
from meshwright.cli.trials import run_trials_here
from meshwright.cost.fit import fitted_cluster
from meshwright.cost.predict import predict
from meshwright.errors import UserError
from meshwright.files import read_spec
from meshwright.search.engine import Found
from meshwright.search.space import divisors, even_boundaries, find_space, strategies
from meshwright.spec import library
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Plan, StagePlan
from meshwright.spec.strategy import Strategy
from meshwright.spec.trial import Trial

BUDGET_SHARES = (1.0, 0.7, 0.5)
Named = dict[str, Plan]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job for CPU ranks of this machine, and its profile."""

    model: str
    batch: int
    seq_len: int
    num_ranks: int
    profile: Path

    def measure_profile(self) -> float:
        """Write the profile; return the seconds it took."""
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "meshwright", "profile", "--fresh", "--local", str(self.num_ranks),
             "-o", str(self.profile), "--model", self.model, "--global-batch", str(self.batch),
             "--seq-len", str(self.seq_len), "--dtype", "fp32"],
            check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return time.perf_counter() - started

    @cached_property
    def cluster(self) -> meshwright.ClusterSpec:
        return fitted_cluster(library.cluster(f"{self.num_ranks}xcpu"), read_spec(meshwright.Profile, self.profile))

    def plan(self, stages: list[list[Strategy]], micro_batches: int) -> Plan:
        """Return a plan written by hand, priced."""
        plan = Plan(
            model=library.model(self.model),
            cluster=self.cluster,
            job=JobSpec(global_batch_size=self.batch, seq_len=self.seq_len, param_dtype="fp32"),
            budget=meshwright.Budget(memory_bytes=self.cluster.device.memory_bytes),
            num_devices=self.num_ranks,
            global_batch_size=self.batch,
            num_micro_batches=micro_batches,
            stages=tuple(StagePlan.of(stage) for stage in stages),
        )
        return plan.model_copy(update={"predicted": predict(plan)})

    def chosen(self) -> Named:
        """Return what the search chooses at three budgets: shares of what its free choice needs."""
        free = self.best(None)
        assert free.predicted is not None
        need = free.predicted.peak_bytes
        return {
            f"chosen at {share:.0%}": free if share == 1.0 else self.best(int(need * share)) for share in BUDGET_SHARES
        }

    def best(self, memory: int | None) -> Plan:
        found = meshwright.plan(
            self.model,
            f"{self.num_ranks}xcpu",
            global_batch=self.batch,
            seq_len=self.seq_len,
            dtype="fp32",
            memory=memory,
            profile=self.profile,
        )
        assert isinstance(found, Found), found
        return found.plan

    def stratified(self) -> Named:
        """Return plans over all dimensions, alone, in pairs and mixed by layer."""
        blocks = library.model(self.model).num_blocks
        n, half = self.num_ranks, self.num_ranks // 2
        dp, zero2, zero3 = (
            Strategy(dp_replicate=n), Strategy(dp_shard=n, zero_stage=2), Strategy(dp_shard=n, zero_stage=3)
        )  # fmt: skip
        tp = Strategy(tp=n)
        inside = Strategy(dp_replicate=half) if half > 1 else Strategy()
        whole: dict[str, list[Strategy]] = {
            "dp": [dp] * (blocks + 2),
            "zero2": [zero2] * (blocks + 2),
            "zero3": [zero3] * (blocks + 2),
            "tp": [tp] * (blocks + 2),
            "dp recompute": [dp, *[again(dp)] * blocks, dp],
            "zero3 recompute": [zero3, *[again(zero3)] * blocks, zero3],
            "tp recompute": [tp, *[again(tp)] * blocks, tp],
            "zero2, zero3 mixed": [zero2, *[zero2] * (blocks // 2), *[zero3] * (blocks - blocks // 2), zero3],
            "tp, zero3 mixed": [tp, *[tp] * (blocks // 3), *[zero3] * (blocks - blocks // 3), zero3],
            "dp, dp recompute mixed": [dp, *[again(dp)] * (blocks // 2), *[dp] * (blocks - blocks // 2), dp],
        }
        plans: Named = {}
        for name, chosen in whole.items():
            for micro_batches in (1, 4) if "mixed" not in name else (2,):
                plans[f"{name}, m {micro_batches}"] = self.plan([chosen], micro_batches)
        for first in (blocks // 2 + 1, blocks // 2 + 3, blocks // 2 - 1):
            for micro_batches in (2, 4, 8):
                rest = blocks + 2 - first
                plans[f"pp {first}+{rest}, m {micro_batches}"] = self.plan(
                    [[inside] * first, [inside] * rest], micro_batches
                )
        recomputing = [[again(inside)] * (blocks // 2 + 1), [inside] * (blocks - blocks // 2 + 1)]
        plans["pp recompute, m 4"] = self.plan(recomputing, 4)
        return plans

    def uniform(self) -> Named:
        """Return every legal plan with one strategy for all blocks and even stages (the ends do not recompute)."""
        return {self.name(plan): plan for plan in self._uniform()}

    def _uniform(self) -> Iterator[Plan]:
        layers = len(library.model(self.model).layers)
        for num_stages in divisors(self.num_ranks):
            bounds = even_boundaries(layers, num_stages)
            for strategy in strategies(find_space("full"), self.num_ranks // num_stages):
                plain = strategy.model_copy(update={"recompute": "none"})
                chosen = [plain, *[strategy] * (layers - 2), plain]
                for micro_batches in divisors(self.batch):
                    if bounds is None or self.batch // micro_batches % strategy.dp:
                        continue
                    try:
                        stages = [chosen[low:high] for low, high in pairwise(bounds)]
                        yield self.plan(stages, micro_batches)
                    except UserError:
                        continue  # tp does not divide the heads, or the plan is illegal otherwise

    def name(self, plan: Plan) -> str:
        block = plan.strategies[1]
        return f"pp{plan.num_stages} {block.label} m{plan.num_micro_batches}"


def again(strategy: Strategy) -> Strategy:
    return strategy.model_copy(update={"recompute": "full"})


def trials_of(plans: Named, *, rounds: int, steps: int, with_memory: bool = True) -> dict[str, Trial]:
    """Run all plans on real ranks, taking turns."""
    found = run_trials_here(tuple(plans.values()), rounds=rounds, steps=steps, with_memory=with_memory)
    failed = [f"{name}: {one.failure}" for name, one in zip(plans, found.trials, strict=True) if one.failure]
    assert not failed, failed
    return dict(zip(plans, found.trials, strict=True))
