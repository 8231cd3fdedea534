"""The 2022 artefact of Galvatron (arXiv 2211.13878): its formulas around our solver, and its models under our rules.

Its formulas, in our words. Given by the notes on it: forward F, backward 2F; all-reduce of the gradients D beside
the backward pass, max + (a-1) min of the two; (pp+m-1)/(pp m) on computation; + D/2 for ZeRO-3; states 4P, times
1/dp + 0.025 for ZeRO-3; first-stage memory of embedding and head taken from every stage; a time factor of 1.1; the
numbers of micro-batches by hand. Not given there: of the plausible readings these are the ones that meet its
published figures (all eight cells of BERT and ViT, Swin at 8 GB and T5 at 12 GB to all digits; Swin at 16 and 20 GB
to 0.004 %). Swin at 12 GB and T5 at 16 and 20 GB stay open: which cut into stages was taken is not known.

* 4 all-reduces (6 in a decoder) of a sample's hidden states in fp32 count as computation of the pipeline;
* where at most two replicas share gradients beside tensor parallelism, half the backward pass hides D;
* the fixed overhead is spread over 24 layers, and paid by data-parallel ones only;
* a layer's bytes are whole megabytes, rounded up, and 1024 MB of the budget are kept back;
* going to a higher tensor-parallel degree t costs (t-1)/t of 2 MB a local sample, outside the factor of 1.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from meshwright.imports.galvatron_2022 import Artefact, ArtefactLayer
from meshwright.search.layers import solve
from meshwright.search.problem import StageChoice, StageProblem, price, stage_bytes
from meshwright.search.stages import solve_below
from meshwright.units import MiB

NUM_DEVICES = 8
FACTOR = 1.1
KEPT_BACK_BYTES = 1024 * MiB
_OVERHEAD_LAYERS = 24
_FP32 = 4
_RELAYOUT_BYTES = 2 * MiB

# (budget in GB, samples a second, batch, stages): its own search on 8 GPUs.
PUBLISHED: dict[str, tuple[tuple[int, float | None, int, int], ...]] = {
    "bert": ((8, 7.9447, 8, 2), (12, 11.7665, 16, 2), (16, 15.0575, 24, 2), (20, 17.4552, 40, 1)),
    "vit": ((8, 37.7308, 56, 1), (12, 53.3109, 72, 2), (16, 67.5424, 160, 1), (20, 75.4349, 152, 1)),
    "swin": ((8, 34.1053, 48, 1), (12, 44.7485, 64, 2), (16, 56.6005, 136, 1), (20, 63.7833, 144, 1)),
    "t5": ((8, None, 8, 8), (12, 7.2727, 8, 8), (16, 8.5583, 16, 2), (20, 10.9753, 16, 2)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one layer is spread over the devices of a stage."""

    pp: int
    tp: int
    dp: int
    side_by_side: bool
    zero3: bool

    def __str__(self) -> str:
        star = "*" if self.tp > 1 and self.dp > 1 and self.side_by_side else ""
        return f"{self.pp}-{self.tp}{star}-{self.dp}{'f' if self.zero3 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan: stages' boundaries, a way for each layer, samples a second."""

    samples_per_s: float
    batch: int
    pp: int
    boundaries: tuple[int, ...]
    ways: tuple[Way, ...]

    @property
    def text(self) -> str:
        """Return the ways of each stage, run-length encoded."""
        parts = [self.ways[low:high] for low, high in pairwise(self.boundaries)]
        if len(parts) > 1 and all(part == parts[0] for part in parts):
            return f"{len(parts)} x [{show_ways(parts[0])}]"
        return " | ".join(show_ways(part) for part in parts)


def show_ways(ways: tuple[Way, ...]) -> str:
    """Return ways, run-length encoded."""
    return " ".join(f"{len(list(run))}x{name}" for name, run in groupby(map(str, ways)))


def all_ways(pp: int) -> tuple[Way, ...]:
    """Return the 22 strategies' share of `pp` stages: 11, 7, 3, 1."""
    found: list[Way] = []
    tp = size = NUM_DEVICES // pp
    while tp:
        dp = size // tp
        for side_by_side in (True, False) if tp > 1 and dp > 1 else (True,):
            for zero3 in (False, True) if dp > 1 else (False,):
                found.append(Way(pp=pp, tp=tp, dp=dp, side_by_side=side_by_side, zero3=zero3))
        tp //= 2
    return tuple(found)


def micro_batches(model: str, way: Way, batch: int) -> float:
    """Return its numbers of micro-batches, functions of the local batch (not always whole)."""
    local = batch / way.dp
    if model == "bert":
        if way.pp == 1:
            return 1
        if (way.pp, way.tp) in ((2, 4), (4, 2)):
            return local / 4
        return local / 2 if local < 6 else local / 8 + 2
    if model == "vit":
        return 1 if local == 8 else 2
    if model == "t5":
        return 1 if local == 2 else 3 if way.pp == 8 else 2
    return 1 if local <= 8 else 2 if local < 32 else 3 if local <= 96 else 4


def seconds_per_byte(artefact: Artefact, way: Way, ranks: int, *, side_by_side: bool) -> float:
    """Return the seconds of a byte of bus traffic in such a group."""
    table = artefact.seconds_per_byte[way.pp]
    return table.get((ranks, side_by_side if way.tp > 1 and way.dp > 1 else None), table.get((ranks, None), 0.0))


def gradient_s(artefact: Artefact, layer: ArtefactLayer, way: Way) -> float:
    """Return D: the all-reduce of a layer's gradients in fp32."""
    moved = 2 * (way.dp - 1) / way.dp * layer.parameter_bytes / way.tp
    return moved * seconds_per_byte(artefact, way, way.dp, side_by_side=not way.side_by_side)


def tensor_parallel_s(artefact: Artefact, layer: ArtefactLayer, way: Way, samples: float) -> float:
    """Return the all-reduces of a layer's hidden states, forward and backward, of `samples` a rank."""
    count = 6 if layer.is_decoder else 4
    moved = 2 * (way.tp - 1) / way.tp * samples * layer.seq_len * layer.hidden_size * _FP32 * count
    return moved * seconds_per_byte(artefact, way, way.tp, side_by_side=way.side_by_side)


def beside_s(compute_s: float, talk_s: float, slowdown: float) -> float:
    """Return the seconds of both together: max + (a-1) min."""
    return max(compute_s, talk_s) + (slowdown - 1) * min(compute_s, talk_s)


def layer_s(model: str, artefact: Artefact, layer: ArtefactLayer, way: Way, batch: int) -> float:
    """Return a layer's share of a step (without the factor)."""
    samples = batch / way.dp
    forward_s = layer.forward_s * samples / way.tp
    backward_s = artefact.backward_factor * forward_s
    compute_s = forward_s + backward_s + tensor_parallel_s(artefact, layer, way, samples)
    talk_s = gradient_s(artefact, layer, way)
    m = micro_batches(model, way, batch)
    found = compute_s * (way.pp + m - 1) / (way.pp * m)
    if way.dp > 1:
        hiding_s = backward_s / 2 if way.tp > 1 and way.dp == 2 else backward_s
        found += beside_s(hiding_s, talk_s, artefact.overlap_slowdown) - hiding_s
        found += artefact.overhead_s / _OVERHEAD_LAYERS
    return found + (talk_s / 2 if way.zero3 else 0.0)


def layer_bytes(layer: ArtefactLayer, way: Way, samples: float) -> float:
    """Return states and activations of `samples` a rank, unrounded."""
    return states_bytes(layer, way) + layer.activation_bytes[way.tp] * samples


def states_bytes(layer: ArtefactLayer, way: Way) -> float:
    """Return parameters, gradients and two optimizer states in fp32."""
    return 4 * layer.parameter_bytes / way.tp * (1 / way.dp + 0.025 if way.zero3 else 1.0)


def whole(size_bytes: float) -> float:
    """Return bytes rounded up to megabytes."""
    return math.ceil(size_bytes / MiB - 1e-9) * MiB


def other_bytes(artefact: Artefact, pp: int, batch: int) -> float:
    """Return what embedding and head take of the first stage."""
    return whole(artefact.other_states_bytes + artefact.other_activation_bytes * batch * pp / NUM_DEVICES)


def all_layers(artefact: Artefact) -> tuple[ArtefactLayer, ...]:
    """Return the layers one by one."""
    return tuple(layer for layer in artefact.layers for _ in range(layer.count))


def solve_stage(
    model: str, artefact: Artefact, layers: tuple[ArtefactLayer, ...], pp: int, batch: int, budget_bytes: float
) -> tuple[float, tuple[Way, ...]] | None:
    """Return seconds (without the factor) and ways of one stage."""
    ways = all_ways(pp)
    rows = {layer.name: [layer_s(model, artefact, layer, way, batch) for way in ways] for layer in artefact.layers}
    sizes = {layer.name: [whole(layer_bytes(layer, way, batch / way.dp)) for way in ways] for layer in artefact.layers}
    switch = np.zeros((len(ways), len(ways)))
    for before, a in enumerate(ways):
        for after, b in enumerate(ways):
            if b.tp > a.tp:
                cost = seconds_per_byte(artefact, b, b.tp, side_by_side=b.side_by_side)
                switch[before, after] = (b.tp - 1) / b.tp * _RELAYOUT_BYTES * batch / b.dp * cost / FACTOR
    found = solve(
        layer_s=[rows[layer.name] for layer in layers],
        layer_bytes=[sizes[layer.name] for layer in layers],
        switch_s=switch,
        budget_bytes=budget_bytes,
    )
    return None if found is None else (found.time_s, tuple(ways[at] for at in found.strategies))


def solve_cell(model: str, artefact: Artefact, budget_gb: int, pp: int, batch: int) -> Answer | None:
    """Return the best plan at a batch and a number of stages.

    One type of layer: one stage is solved and copied. Several types: two stages, every cut (which one
    its own code took is not known), the second stage with the whole budget; more stages, equal layers.
    """
    layers, usable = all_layers(artefact), budget_gb * 1024 * MiB - KEPT_BACK_BYTES
    first = usable - other_bytes(artefact, pp, batch)
    size = len(layers) // pp
    even = tuple(range(0, len(layers) + 1, size))
    if len(artefact.layers) == 1:
        part = solve_stage(model, artefact, layers[:size], pp, batch, first)
        return None if part is None else _answer(batch, pp, even, [part] * pp)
    cuts = [(0, cut, len(layers)) for cut in range(1, len(layers))] if pp == 2 else [even]
    best: Answer | None = None
    for cut in cuts:
        parts = [
            solve_stage(model, artefact, layers[low:high], pp, batch, usable + KEPT_BACK_BYTES if low else first)
            for low, high in pairwise(cut)
        ]
        whole_parts = [part for part in parts if part is not None]
        if len(whole_parts) == pp:
            answer = _answer(batch, pp, cut, whole_parts)
            best = answer if best is None or answer.samples_per_s > best.samples_per_s else best
    return best


def _answer(batch: int, pp: int, boundaries: tuple[int, ...], parts: list[tuple[float, tuple[Way, ...]]]) -> Answer:
    seconds = FACTOR * sum(part[0] for part in parts)
    ways = tuple(way for part in parts for way in part[1])
    return Answer(samples_per_s=batch / seconds, batch=batch, pp=pp, boundaries=boundaries, ways=ways)


def sweep(model: str, artefact: Artefact, budget_gb: int) -> Answer | None:
    """Return the best plan over its range of batches and all numbers of stages (models of one type of layer)."""
    best: Answer | None = None
    for pp in (1, 2, 4, 8):
        for batch in artefact.batches:
            answer = solve_cell(model, artefact, budget_gb, pp, batch)
            if answer is None:
                break
            best = answer if best is None or answer.samples_per_s > best.samples_per_s else best
    return best


# The same models under our rules.


def our_problem(artefact: Artefact, budget_gb: int, pp: int, batch: int, m: int) -> StageProblem | None:
    """Return the cut into stages under our rules, from the same constants.

    One forward-one-backward with m micro-batches, each alive until its backward pass; gradients of replicas are
    summed once a step beside one backward pass; ZeRO-3 gathers for every pass and reduces after every backward
    pass; the sequence of layers is led by one that holds embedding and head, replicated and without time, as in
    the artefact. Borders cost what two ranks need (the constants have no sends); a change of layout what the larger
    of the degrees over the smaller needs. All times carry the factor of 1.1. A sample takes as long alone as
    among others (all that the constants say), so many small micro-batches look better than they are.
    """
    ways = tuple(way for way in all_ways(pp) if batch // m % way.dp == 0)
    if not ways or batch % m or not any(way.tp == 1 for way in ways):
        return None
    layers, micro = all_layers(artefact), batch // m
    table = _table(artefact, layers, ways, micro)
    ends = [0.0 if way.tp == 1 and not way.zero3 else math.inf for way in ways]
    states = [artefact.other_states_bytes + end for end in ends]
    acts = [artefact.other_activation_bytes * micro / way.dp for way in ways]
    hidden = [layer.seq_len * layer.hidden_size * _FP32 for layer in (layers[0], *layers)]
    switch = np.stack([_switch(artefact, ways, micro, size) for size in hidden])
    border_byte_s = artefact.seconds_per_byte[1].get((2, True), 0.0)
    border = FACTOR * np.array([[size * micro / way.dp * border_byte_s for way in ways] for size in hidden])
    layouts = sorted({(way.tp, way.side_by_side) for way in ways})
    return StageProblem(
        forward_s=np.array([ends, *table["forward"]]),
        backward_s=np.array([ends, *table["backward"]]),
        step_s=np.array([ends, *table["step"]]),
        states_bytes=np.array([states, *table["states"]]),
        act_bytes=np.array([acts, *table["acts"]]),
        transient_bytes=np.zeros((len(layers) + 1, len(ways))),
        switch_forward_s=switch,
        switch_backward_s=switch,
        border_forward_s=border,
        border_backward_s=border,
        layout=np.array([layouts.index((way.tp, way.side_by_side)) for way in ways]),
        in_flight=np.array([min(m, pp - stage) for stage in range(pp)]),
        budget_bytes=np.full(pp, float(budget_gb * 1024 * MiB - KEPT_BACK_BYTES)),
        stage_step_s=np.zeros(pp),
        num_micro_batches=m,
        schedule="1f1b",
    )


def _table(
    artefact: Artefact, layers: tuple[ArtefactLayer, ...], ways: tuple[Way, ...], micro: int
) -> dict[str, list[list[float]]]:
    names: tuple[str, ...] = ("forward", "backward", "step", "states", "acts")
    rows: dict[str, dict[str, list[float]]] = {}
    for layer in artefact.layers:
        entries = [_entry(artefact, layer, way, micro / way.dp) for way in ways]
        rows[layer.name] = {name: [entry[at] for entry in entries] for at, name in enumerate(names)}
    return {name: [rows[layer.name][name] for layer in layers] for name in names}


def _entry(artefact: Artefact, layer: ArtefactLayer, way: Way, samples: float) -> tuple[float, ...]:
    """Return forward, backward and once-a-step seconds, states and activation bytes."""
    forward_s = layer.forward_s * samples / way.tp
    backward_s = artefact.backward_factor * forward_s
    talk_s = tensor_parallel_s(artefact, layer, way, samples) / 2
    sync_s, slowdown = gradient_s(artefact, layer, way), artefact.overlap_slowdown
    step_s = artefact.overhead_s / _OVERHEAD_LAYERS if way.dp > 1 else 0.0
    if way.zero3:  # a gather is half an all-reduce, and so is a reduction to shards
        forward_all_s, backward_all_s = (
            beside_s(forward_s, sync_s / 2, slowdown),
            beside_s(backward_s, sync_s, slowdown),
        )
    else:
        forward_all_s, backward_all_s = forward_s, backward_s
        step_s += beside_s(backward_s, sync_s, slowdown) - backward_s
    times = (forward_all_s + talk_s, backward_all_s + talk_s, step_s)
    return *(FACTOR * seconds for seconds in times), states_bytes(layer, way), layer.activation_bytes[way.tp] * samples


def _switch(artefact: Artefact, ways: tuple[Way, ...], micro: int, sample_bytes: float) -> np.ndarray:
    found = np.zeros((len(ways), len(ways)))
    for before, a in enumerate(ways):
        for after, b in enumerate(ways):
            if (a.tp, a.side_by_side) != (b.tp, b.side_by_side):
                few, many = sorted((a.tp, b.tp))
                ranks = many // few if few != many else many
                cost = artefact.seconds_per_byte[1].get((ranks, True)) or artefact.seconds_per_byte[1][ranks, None]
                found[before, after] = FACTOR * (ranks - 1) / ranks * sample_bytes * micro / min(a.dp, b.dp) * cost
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OurAnswer:
    """A plan under our rules; `gap`: how much better one of as many stages and micro-batches may be, where known."""

    samples_per_s: float
    pp: int
    m: int
    gap: float | None
    boundaries: tuple[int, ...]
    ways: str


def under_ours(
    artefact: Artefact, budget_gb: int, batch: int, time_limit_s: float, stage_counts: tuple[int, ...] = (1, 2, 4, 8)
) -> OurAnswer | None:
    """Return the fastest plan for `batch` under our rules."""

    def best(problem: StageProblem, beat_s: float | None) -> StageChoice | None:
        return solve_below(problem, beat_s=beat_s, time_limit_s=time_limit_s)[0]

    return _fastest(artefact, budget_gb, batch, stage_counts, best)


def repriced(artefact: Artefact, budget_gb: int, answer: Answer) -> OurAnswer | None:
    """Return a plan of the artefact's formulas under our rules, with the best number of micro-batches that fits."""

    def fixed(problem: StageProblem, _: float | None) -> StageChoice | None:
        ways = tuple(way for way in all_ways(answer.pp) if answer.batch // problem.num_micro_batches % way.dp == 0)
        if not set(answer.ways) <= set(ways):
            return None
        first = next(at for at, way in enumerate(ways) if way.tp == 1 and not way.zero3)
        chosen = (first, *(ways.index(way) for way in answer.ways))
        bounds = (0, *(bound + 1 for bound in answer.boundaries[1:]))
        if any(used > problem.budget_bytes[0] for used in stage_bytes(problem, bounds, chosen)):
            return None
        return price(problem, bounds, chosen)

    return _fastest(artefact, budget_gb, answer.batch, (answer.pp,), fixed)


def _fastest(
    artefact: Artefact,
    budget_gb: int,
    batch: int,
    stage_counts: tuple[int, ...],
    choose: Callable[[StageProblem, float | None], StageChoice | None],
) -> OurAnswer | None:
    settings: list[tuple[float, StageProblem]] = []
    for pp in stage_counts:
        for m in (m for m in range(1, batch + 1) if batch % m == 0):
            problem = our_problem(artefact, budget_gb, pp, batch, m)
            if problem is not None:
                settings.append((_bound_s(problem), problem))
    best: OurAnswer | None = None
    for bound_s, problem in sorted(settings, key=lambda setting: setting[0]):
        beat_s = None if best is None else batch / best.samples_per_s
        choice = None if beat_s is not None and bound_s >= beat_s else choose(problem, beat_s)
        if choice is not None and (beat_s is None or choice.objective_s < beat_s):
            best = _our_answer(batch, problem, choice)
    return best


def _bound_s(problem: StageProblem) -> float:
    """Return a bound on the step: the most even cut of the least seconds of every layer."""
    least = float((problem.forward_s + problem.backward_s).min(axis=1).sum())
    return least / (1.0 - (1.0 - 1.0 / problem.num_micro_batches) ** problem.num_stages)


def _our_answer(batch: int, problem: StageProblem, choice: StageChoice) -> OurAnswer:
    pp, m = problem.num_stages, problem.num_micro_batches
    ways = tuple(way for way in all_ways(pp) if batch // m % way.dp == 0)
    text = " | ".join(
        show_ways(tuple(ways[at] for at in choice.strategies[max(1, low) : high]))
        for low, high in pairwise(choice.boundaries)
    )
    return OurAnswer(
        samples_per_s=batch / choice.objective_s,
        pp=pp,
        m=m,
        gap=choice.gap if choice.lower_bound_s else None,
        boundaries=tuple(max(0, bound - 1) for bound in choice.boundaries),
        ways=text,
    )
