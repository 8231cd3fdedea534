"""Tables of a plan and its prediction for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.spec.parameters import num_parameters
from meshwright.spec.plan import LayerRun, Plan, Prediction
from meshwright.units import several, show_bytes, show_count, show_percent, show_seconds


def plan_view(plan: Plan) -> RenderableType:
    """Return the plan as text: what it is for, the strategy of every layer, and what is predicted."""
    parts: list[RenderableType] = [Text(summary_line(plan)), strategy_table(plan)]
    if plan.predicted is not None:
        parts += [prediction_line(plan, plan.predicted), time_table(plan.predicted), memory_table(plan)]
        parts += [Text(f"not measured, fitted: {what}") for what in plan.predicted.not_measured]
    if plan.proof is not None:
        parts.append(Text(proof_line(plan)))
    return Group(*parts)


def summary_line(plan: Plan) -> str:
    """Return one line on the job that the plan is for."""
    return (
        f"{plan.model.name} ({show_count(num_parameters(plan.model))} parameters, {plan.model.num_blocks} blocks) on "
        f"{plan.cluster.name}: batch {sample_words(plan)} in {several(plan.num_micro_batches, 'micro-batch', 'es')} of "
        f"{plan.micro_batch_samples}, {plan.job.param_dtype}, {plan.schedule}, {several(plan.num_stages, 'stage')} of "
        f"{several(plan.stage_devices, 'device')}"
    )


def sample_words(plan: Plan) -> str:
    """Return a batch in words: samples of so many tokens, or images."""
    job, batch = plan.job, plan.global_batch_size
    if plan.model.fixed_seq_len:
        return f"{batch} images of {job.seq_len} tokens"
    if job.target_seq_len is not None:
        return f"{batch} x {job.seq_len} + {job.target_seq_len} tokens"
    return f"{batch} x {job.seq_len} tokens"


def throughput_words(plan: Plan, predicted: Prediction) -> str:
    """Return the throughput in what users of the model count; of images the tokens too."""
    tokens = f"{predicted.tokens_per_s:,.0f} tokens/s"
    return f"{predicted.samples_per_s:,.1f} images/s ({tokens})" if plan.model.fixed_seq_len else tokens


def throughput_unit(plans: Iterable[Plan | None]) -> str:
    """Return what the throughput of plans for one model is counted in."""
    return "images/s" if any(plan is not None and plan.model.fixed_seq_len for plan in plans) else "tokens/s"


def shown_per_s(plan: Plan) -> float:
    """Return the predicted tokens a second, of a model of images those."""
    assert plan.predicted is not None  # noqa: S101 callers show predicted plans
    return plan.predicted.samples_per_s if plan.model.fixed_seq_len else plan.predicted.tokens_per_s


def throughput_cell(plan: Plan, devices: int = 1) -> str:
    """Return the throughput as a number, of one of so many devices; few images a second with a decimal."""
    value = shown_per_s(plan) / devices
    return f"{value:,.1f}" if plan.model.fixed_seq_len and value < _MANY_IMAGES else f"{value:,.0f}"


def proof_line(plan: Plan) -> str:
    """Return what is claimed of the plan: nothing in the space is faster than the bound, under this cost model."""
    proof = plan.proof
    if proof is None:
        return "no claim of optimality"
    if proof.gap == 0:
        return f"optimal under this cost model in space {proof.space}"
    return (
        f"at most {100 * proof.gap:.3g} % from optimal under this cost model in space {proof.space} "
        f"(lower bound {show_seconds(proof.lower_bound_s)})"
    )


def prediction_line(plan: Plan, predicted: Prediction) -> Text:
    """Return the predicted step in one line."""
    mfu = f"mfu {100 * predicted.mfu:.1f} %, " if plan.cluster.device.backend == "cuda" else ""
    reserve = f" after {show_bytes(plan.budget.reserved_bytes)} reserved" if plan.budget.reserved_bytes else ""
    return Text(
        f"predicted: {show_seconds(predicted.step_s)} a step, {throughput_words(plan, predicted)}, "
        f"{mfu}peak {show_bytes(predicted.peak_bytes)} of "
        f"{show_bytes(plan.budget.usable_bytes)} usable{reserve}"
        + ("" if predicted.peak_bytes <= plan.budget.usable_bytes else ": DOES NOT FIT")
    )


def fit_lines(plan: Plan) -> list[str]:
    """Return for every stage what it needs at most of what may be used, and the largest terms of it."""
    usable = plan.budget.usable_bytes
    lines: list[str] = []
    for index, stage in enumerate(plan.predicted.stages if plan.predicted else ()):
        terms = {
            "states": stage.states.total_bytes,
            "activations": stage.in_flight * stage.activation_bytes,
            "transient": stage.transient.total_bytes,
        }
        of = ", ".join(f"{name} {show_bytes(size)}" for name, size in terms.items())
        left = usable - stage.peak_bytes
        verdict = f"fits, {show_bytes(left)} left" if left >= 0 else f"DOES NOT FIT, {show_bytes(-left)} short"
        lines.append(f"stage {index}: peak {show_bytes(stage.peak_bytes)} ({of}) of {show_bytes(usable)}: {verdict}")
    if plan.budget.reserved_bytes:
        lines.append(
            f"of {show_bytes(plan.budget.memory_bytes)}, {show_bytes(plan.budget.reserved_bytes)} are held back"
        )
    return lines


def strategy_table(plan: Plan) -> Table:
    """Return the layers of each stage with their strategies."""
    table = plain_table("stage", "ranks", "layers", "strategy")
    for index, stage in enumerate(plan.stages):
        first = index * plan.stage_devices
        ranks = f"{first}-{first + plan.stage_devices - 1}" if plan.stage_devices > 1 else str(first)
        layer = plan.boundaries[index]
        for run in stage.runs:
            table.add_row(str(index), ranks, _layer_names(plan, layer, run), run.strategy.label)
            layer += run.num_layers
    return table


def time_table(predicted: Prediction) -> Table:
    """Return the seconds of each stage by term: of one micro-batch, and once a step."""
    table = plain_table(
        "stage", "forward", "backward", "of it: compute", "recompute", "tp", "zero", "wait", "re-layout", "border",
        "once a step", "bubble",
    )  # fmt: skip
    table.caption = "forward to border: one micro-batch; once a step and bubble: the whole step"
    table.caption_justify = "left"
    for index, stage in enumerate(predicted.stages):
        forward, backward = stage.micro_batch.forward, stage.micro_batch.backward
        both = forward + backward
        terms = both.sorts_s.values()
        table.add_row(
            str(index),
            show_seconds(forward.total_s),
            show_seconds(backward.total_s),
            *(show_seconds(term) for term in terms),
            show_seconds(stage.step.total_s),
            f"{show_seconds(stage.bubble_s)} ({show_percent(stage.bubble_s / predicted.step_s).lstrip('+')})",
        )
    return table


def memory_table(plan: Plan) -> Table:
    """Return the bytes of each stage by term; `slack` is what the search's upper bound holds back."""
    table = plain_table(
        "stage",
        "master",
        "copy",
        "gradients",
        "optimizer",
        "activations",
        "transient",
        "peak",
        "slack of bound",
        "of budget",
    )
    for index, stage in enumerate(plan.predicted.stages if plan.predicted else ()):
        states = stage.states
        table.add_row(
            str(index),
            *(show_bytes(b) for b in (
                states.master_bytes, states.copy_bytes, states.gradient_bytes, states.optimizer_bytes,
            )),
            f"{stage.in_flight} x {show_bytes(stage.activation_bytes)}",
            show_bytes(stage.transient.total_bytes),
            show_bytes(stage.peak_bytes),
            show_bytes(stage.bound_bytes - stage.peak_bytes),
            f"{100 * stage.peak_bytes / plan.budget.usable_bytes:.0f} %",
        )  # fmt: skip
    return table


def comparison_table(rows: Iterable[tuple[str, Plan | None, str]]) -> Table:
    """Return plans side by side: (name, plan or None, remark)."""
    rows = list(rows)
    unit = throughput_unit(plan for _, plan, _ in rows)
    table = plain_table("plan", "step", unit, "peak", "layers by stage", "micro-batches", "strategies", "remark")
    for name, plan, remark in rows:
        if plan is None or plan.predicted is None:
            table.add_row(name, "-", "-", "-", "-", "-", "-", remark)
            continue
        table.add_row(
            name,
            show_seconds(plan.predicted.step_s),
            throughput_cell(plan),
            show_bytes(plan.predicted.peak_bytes),
            "+".join(str(stage.num_layers) for stage in plan.stages),
            str(plan.num_micro_batches),
            ", ".join(strategy.label for strategy in dict.fromkeys(plan.strategies)),
            remark,
        )
    return table


def why_it_loses(other: Plan, best: Plan) -> str:
    """Return how much slower `other` is a sample than `best`, and the term of time that costs it most."""
    if other.predicted is None or best.predicted is None:
        return ""
    slower = best.predicted.samples_per_s / other.predicted.samples_per_s - 1
    if slower <= 0:
        return f"{show_percent(slower)} time a sample"
    batches = best.global_batch_size / other.global_batch_size  # terms are compared for equal numbers of samples
    mine_s, best_s = _slowest_s(other), _slowest_s(best)
    worst, worst_s = max(((name, batches * mine_s[name] - best_s[name]) for name in SORTS), key=lambda item: item[1])
    return f"{show_percent(slower)} time a sample, mostly {SORTS[worst]} ({show_seconds(worst_s)} a step more)"


_MANY_IMAGES = 100  # a second: from here on no decimal is shown
SORTS = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "tp_s": "tensor-parallel communication",
    "zero_s": "ZeRO communication",
    "wait_s": "waiting for the slowest rank",
    "relayout_s": "re-layouts",
    "border_s": "stage borders",
    "once_a_step_s": "gradient synchronisation and optimizer",
    "bubble_s": "bubble",
}


def _slowest_s(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step that the slowest stage spends on each sort of work."""
    assert plan.predicted is not None  # noqa: S101 the caller has checked
    return max(plan.predicted.stages, key=lambda s: s.busy_s).step_sorts_s(plan.num_micro_batches)


def _layer_names(plan: Plan, first: int, run: LayerRun) -> str:
    """Return the layers of a run in words: embedding, blocks 3-7, merge, block 8, head; merges are no blocks."""
    last, merges = len(plan.model.layers) - 1, plan.model.merges
    number, names, blocks = first - sum(merge < first for merge in merges), list[str](), list[int]()
    for index in range(first, first + run.num_layers):
        is_block = 0 < index < last and index not in merges
        if is_block:
            blocks.append(number)
        if blocks and (not is_block or index == first + run.num_layers - 1):
            names.append(f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}")
            blocks = []
        if not is_block:
            names.append("embedding" if index == 0 else "head" if index == last else "merge")
        number += is_block or index == 0
    return ", ".join(names)


def plain_table(*columns: str) -> Table:
    """Return an empty table without lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
