"""Llama-2-7B on 8 GPUs under the cost formulas of Galvatron v3, with our solver; and its profile in our planner.

Formulas: shared notes on it, 4.4 to 4.7, which give its per-layer costs (PUBLISHED_LAYERS; every one is met
to its last digit). Its objective was the time with gradient sync plus a switch cost that its pipeline
formula does not have; here it is the time that counts in that formula. Not settled by the notes:

* embedding and head under sequence parallelism share states only over data-parallel ranks (read from 36 and 38 GB);
* what their sharding or gathering adds to a micro-batch: a few tenths of a millisecond, left out. It is why figures
  lie up to 0.07 % above the ones that are known to be the best under the same formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from meshwright.imports.galvatron import GalvatronProfile, Hardware
from meshwright.imports.galvatron_files import LayerMemory, OtherMemory
from meshwright.search.layers import solve
from meshwright.spec.model import BlockLayer
from meshwright.spec.profile import LayerSample, Profile
from meshwright.units import MiB

NUM_DEVICES, BATCH, SEQ_LEN, NUM_LAYERS, HIDDEN = 8, 64, 2048, 32, 4096
_HALF = 2  # bytes of bf16, and the share of fp32 sizes that travels
CONTEXT_BYTES = 1024 * MiB

# Budget in GB: samples a second that its search found, and the best known under its formulas.
PUBLISHED = {
    16: (10.8968, 11.0241),
    20: (12.6640, 12.7793),
    24: (12.6558, None),
    36: (15.2760, None),
    38: (15.3082, None),
    80: (18.1880, 18.5308),
}
# Strategy: (tp or sp degree, replicas, sp, ZeRO-3, recompute), then ms with sync and without, MB of states and saved.
PUBLISHED_LAYERS: tuple[tuple[tuple[int, int, bool, bool, bool], tuple[float, float, float, float]], ...] = (
    ((1, 8, False, False, False), (14.6304, 14.0760, 1077.1, 514.6)),
    ((1, 8, False, False, True), (19.3224, 18.7680, 1077.1, 32.0)),
    ((1, 8, False, True, False), (16.8384, 16.2840, 737.8, 514.6)),
    ((2, 4, False, False, False), (14.9955, 14.7603, 684.4, 546.6)),
    ((2, 4, True, False, False), (15.3456, 14.7912, 1077.1, 546.6)),
    ((4, 2, False, False, False), (15.9111, 15.8304, 488.1, 547.5)),
    ((4, 2, False, True, True), (21.8017, 21.7210, 439.8, 32.0)),
    ((8, 1, False, False, False), (17.9238, 17.9238, 389.1, 546.6)),
    ((8, 1, True, False, True), (23.0490, 23.0490, 3112.9, 32.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a layer is spread: `degree` of tensor or (`ulysses`) sequence parallelism, over `dp` replicas."""

    degree: int
    dp: int
    ulysses: bool = False
    zero3: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        marks = ("s" if self.ulysses else "") + ("f" if self.zero3 else "") + ("c" if self.recompute else "")
        return f"{self.degree}-{self.dp}{marks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A layer's share of a micro-batch with and without gradient sync, its states and what it saves."""

    with_sync_s: float
    without_s: float
    states_bytes: float
    saved_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan under its formulas."""

    samples_per_s: float
    pp: int
    m: int
    ways: tuple[str, ...]


class Tables:
    """Its profile as the functions that its formulas call."""

    def __init__(self, found: GalvatronProfile) -> None:
        assert found.hardware is not None
        self.hardware: Hardware = found.hardware
        self.layer: LayerMemory = next(t for t in found.layers if t.seq_len == SEQ_LEN)
        self.others: dict[str, OtherMemory] = {table.place: table for table in found.others}
        points = {kind: [t for t in found.times if t.layer_type == kind and t.batch] for kind in (0, None)}
        self._lines = {
            kind: np.polyfit([t.batch or 1 for t in some], [(t.batch or 1) * t.seconds_per_sample for t in some], 1)
            for kind, some in points.items()
        }

    def forward_s(self, samples: float) -> float:
        """Return a layer's forward seconds, on the line through all batches."""
        return float(np.polyval(self._lines[0], samples))

    def other_s(self, samples: float) -> float:
        """Return embedding's and head's forward seconds, likewise."""
        return float(np.polyval(self._lines[None], samples))

    @cache  # noqa: B019 one object a run
    def collective_s(self, op: str, ranks: int, size_bytes: float) -> float:
        """Return a measured time, or a straight line through all sizes."""
        if ranks == 1:
            return 0.0
        points = {size: s for (name, n, size), s in self.hardware.collective_s.items() if (name, n) == (op, ranks)}
        if size_bytes in points:
            return points[int(size_bytes)]
        return float(np.polyval(np.polyfit(list(points), list(points.values()), 1), size_bytes))


def states_share(shards: int, m: int, *, zero3: bool) -> float:
    """Return the share of 4P that a rank holds (gradients reduced beside computation; ZeRO-2 unless ZeRO-3)."""
    if shards == 1:
        return 1.0
    e = 1 / shards + 0.003
    if m == 1:
        return e if zero3 else 7 / 8 * e + 1 / 8
    return 7 / 8 * e + 1 / 8 if zero3 else 6 / 8 * e + 2 / 8


def layer_cost(tables: Tables, way: Way, pp: int, m: int) -> Cost:
    """Return the price of one layer."""
    hardware, slowdown = tables.hardware, tables.hardware.overlap_slowdown or 1.0
    samples = BATCH // m // way.dp
    forward_s = tables.forward_s(samples / way.degree)
    backward_s = (3 if way.recompute else 2) * forward_s
    shards = way.dp * (way.degree if way.ulysses else 1) if way.dp > 1 else 1
    parameter_bytes = tables.layer.parameter_bytes / (1 if way.ulysses else way.degree)
    sync_s = 0.0
    if shards > 1:
        near = way.degree == 1 or way.ulysses
        moved = 2 * (shards - 1) / shards * parameter_bytes / _HALF
        sync_s = moved / hardware.all_reduce_bytes_per_s[shards, near]
    message = samples * SEQ_LEN * HIDDEN * _HALF
    talk_s = (
        4 * tables.collective_s("all2all", way.degree, message)
        if way.ulysses
        else 6 * tables.collective_s("allreduce", way.degree, message) / 2
    ) * (1.5 if way.recompute else 1.0)
    send_s = pp * 2 * message / hardware.p2p_bytes_per_s[pp] / NUM_LAYERS if pp > 1 else 0.0
    always_s = forward_s + talk_s + send_s + (sync_s / 2 if way.zero3 else 0.0)
    saved = tables.layer.activation_bytes[way.degree]
    if way.recompute:
        saved = (tables.layer.recompute_bytes or 0.0) / way.degree
    return Cost(
        with_sync_s=always_s + max(backward_s, sync_s) + (slowdown - 1) * min(backward_s, sync_s),
        without_s=always_s + backward_s,
        states_bytes=4 * parameter_bytes * states_share(shards, m, zero3=way.zero3),
        saved_bytes=saved * samples,
    )


def all_ways(pp: int, most: int) -> Iterator[Way]:
    """Yield the strategies below `pp` stages with degrees up to `most`."""
    size = NUM_DEVICES // pp
    for degree in (d for d in (1, 2, 4, 8) if d <= min(size, most)):
        for ulysses in (False, True) if degree > 1 else (False,):
            for zero3 in (False, True) if size > degree else (False,):
                for recompute in (False, True):
                    yield Way(degree=degree, dp=size // degree, ulysses=ulysses, zero3=zero3, recompute=recompute)


def pipeline_s(without_s: list[float], with_s: list[float], m: int) -> float:
    """Return its time of a step from its stages' times (notes, 4.6): middle stages count once only."""
    pp, first, last = len(without_s), without_s[0], without_s[-1]
    total = max(
        sum(without_s) + (m - 1) * last,
        max(min(pp - 1, m - 1) * first, sum(without_s[1:])) + first * max(0, m + 1 - pp),
    )
    return total + max(0.0, *(with_s[at] - sum(without_s[: at + 1]) for at in range(pp)))


def ends_bytes(tables: Tables, place: str, degree: int, pp: int, m: int, *, ulysses: bool, zero3: bool) -> float:
    """Return what embedding and head take of a stage."""
    table, dp = tables.others[place], NUM_DEVICES // pp // degree
    shards = dp * (degree if ulysses else 1) if dp > 1 else 1
    states = table.states_bytes[1 if ulysses else degree] * states_share(shards, m, zero3=zero3)
    in_flight = pp if place == "first" else 1
    return states + table.activation_bytes[degree] * (BATCH // m // dp) * in_flight


def usable_bytes(budget_gb: int) -> float:
    """Return the budget that it plans with: a fifth less above 20 GB, and the context."""
    return budget_gb * 1024 * MiB * (0.8 if budget_gb > 20 else 1.0) - CONTEXT_BYTES


def search(tables: Tables, budget_gb: int) -> Answer | None:
    """Return the best plan over stages (even), micro-batches, largest degrees and ways of embedding and head."""
    best: Answer | None = None
    for pp, m, most in sorted(_settings(), key=lambda setting: _bound_s(tables, *setting)):
        if best is not None and BATCH / _bound_s(tables, pp, m, most) <= best.samples_per_s:
            continue
        for gather_s, ends in _ends(tables, pp, m):
            found = _solve(tables, pp, m, most, usable_bytes(budget_gb), ends, gather_s)
            if found is not None and (best is None or found.samples_per_s > best.samples_per_s):
                best = found
    return best


def _settings() -> Iterator[tuple[int, int, int]]:
    for pp in (1, 2, 4, 8):
        for m in (1, 2, 4, 8, 16, 32, 64):
            for most in (1, 2, 4, 8):
                if m >= pp and most <= NUM_DEVICES // pp and any(w.dp <= BATCH // m for w in all_ways(pp, most)):
                    yield pp, m, most


def _bound_s(tables: Tables, pp: int, m: int, most: int) -> float:
    """Return the time of the fastest layers everywhere, whatever they need."""
    ways = [way for way in all_ways(pp, most) if way.dp <= BATCH // m]
    stage_s = NUM_LAYERS // pp * min(layer_cost(tables, way, pp, m).without_s for way in ways)
    return pipeline_s([stage_s] * pp, [0.0] * pp, m)


def _ends(tables: Tables, pp: int, m: int) -> Iterator[tuple[float, tuple[float, ...]]]:
    """Yield (seconds of gathers at an end, bytes by stage) for every way of embedding and head that may be best."""
    found: list[tuple[float, tuple[float, ...]]] = []
    for degree in (d for d in (1, 2, 4, 8) if d <= NUM_DEVICES // pp):
        dp = NUM_DEVICES // pp // degree
        if dp > BATCH // m:
            continue
        for ulysses in (False, True) if degree > 1 else (False,):
            message = BATCH // m // dp * SEQ_LEN * HIDDEN * _HALF
            gather_s = 0.0 if ulysses else tables.collective_s("allreduce", degree, message) / 2
            places = ["alone"] if pp == 1 else ["first", *["middle"] * (pp - 2), "last"]
            sizes = tuple(
                0.0 if place == "middle" else ends_bytes(tables, place, degree, pp, m, ulysses=ulysses, zero3=True)
                for place in places
            )
            found.append((gather_s, sizes))
    for one in found:
        if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in found):
            yield one


def _solve(
    tables: Tables, pp: int, m: int, most: int, budget_bytes: float, ends: tuple[float, ...], gather_s: float
) -> Answer | None:
    ways = [way for way in all_ways(pp, most) if way.dp <= BATCH // m]
    costs = [layer_cost(tables, way, pp, m) for way in ways]
    count = NUM_LAYERS // pp
    buffer_bytes = BATCH // m // (NUM_DEVICES // pp // most) * SEQ_LEN * HIDDEN * 4 / _HALF
    ends_s = 3 * tables.other_s(BATCH / m / (NUM_DEVICES / pp))
    without_s: list[float] = []
    with_s: list[float] = []
    texts: list[str] = []
    for stage, taken in enumerate(ends):
        in_flight = pp - stage if pp > 1 else 1
        sizes = [math.ceil((c.states_bytes + c.saved_bytes * in_flight) / MiB) * MiB for c in costs]
        choice = solve(
            layer_s=[[cost.without_s for cost in costs]] * count,
            layer_bytes=[sizes] * count,
            switch_s=np.zeros((len(ways), len(ways))),
            budget_bytes=budget_bytes - taken - buffer_bytes,
        )
        if choice is None:
            return None
        at_end = 0.0 if 0 < stage < pp - 1 else (ends_s + 2 * gather_s if pp == 1 else ends_s / 2 + gather_s)
        without_s.append(choice.time_s + at_end)
        with_s.append(sum(costs[at].with_sync_s for at in choice.strategies))
        runs = Counter(str(ways[at]) for at in choice.strategies)
        texts.append(" ".join(f"{number}x{name}" for name, number in runs.items()))
    return Answer(samples_per_s=BATCH / pipeline_s(without_s, with_s, m), pp=pp, m=m, ways=tuple(texts))


def split_as_theirs(profile: Profile, tables: Tables) -> Profile:
    """Return the profile with layers split over 2, 4 and 8 ranks as its formulas have them.

    A rank of t takes the time of a t-th of the samples and keeps what the table says for degree t. Neither was
    measured on a split layer without sequence parallelism: this is for comparison on equal terms only.
    """
    block = next(s.layer for s in profile.layers if isinstance(s.layer, BlockLayer))
    made: list[LayerSample] = []
    for degree, saved in tables.layer.activation_bytes.items():
        for batch in (1, 2, 4, 8, 16, 32, 64) if degree > 1 else ():
            forward_s = tables.forward_s(batch / degree)
            made.append(
                LayerSample(
                    layer=block, tp=degree, samples_per_rank=batch, seq_len=SEQ_LEN, dtype="bf16", busy_ranks=1,
                    forward_s=forward_s, backward_s=2 * forward_s, saved_bytes=round(batch * saved),
                )
            )  # fmt: skip
    return profile.model_copy(update={"layers": (*profile.layers, *made)})
