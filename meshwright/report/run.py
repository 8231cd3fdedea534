"""Tables of a uniform run of any framework: seconds and bytes by term and stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from meshwright.report.text import plain_table
from meshwright.spec.parameters import num_parameters
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_count, show_percent, show_seconds

Terms = Mapping[str, float]


def run_line(run: RunSpec) -> str:
    """Return one line on what is run."""
    degrees = {"tp": run.tp, "cp": run.cp, "pp": run.pp, "ep": run.ep, "dp": run.dp}
    shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name == "dp"]
    if run.sequence_parallel:
        shown.append("sequence parallel")
    if run.virtual_stages > 1:
        shown.append(f"{run.virtual_stages} virtual stages a device")
    if run.zero_stage:
        shown.append(f"ZeRO-{run.zero_stage} over {run.num_shards}")
    if run.recompute != "none":
        shown.append(f"recompute {run.recompute}")
    return (
        f"{run.model.name} ({show_count(num_parameters(run.model))} parameters, {run.model.num_blocks} blocks) on "
        f"{run.cluster.name} under {run.framework}: {', '.join(shown)}; batch {run.global_batch_size} x {run.seq_len} "
        f"tokens in {run.num_micro_batches} micro-batches of {run.micro_batch_size} a replica"
    )


def software_line(run: RunSpec) -> str:
    """Return the software that is assumed: what decides speed and memory beside the degrees."""
    software = run.software
    parts = [f"attention {software.attention}", f"loss {software.loss}", f"operators {software.operators}"]
    if software.loss_chunks > 1:
        parts[1] += f" in {software.loss_chunks} chunks"
    if software.fp8 != "none":
        parts.append(f"fp8 {software.fp8}")
    parts += [name.replace("_", " ") for name in ("async_tp", "overlaps_gradients", "overlaps_parameters")
              if getattr(software, name)]  # fmt: skip
    return f"assumed software: {', '.join(parts)}"


def stage_seconds_table(stages: Sequence[Terms]) -> Table:
    """Return the seconds of one micro-batch by stage and term; equal stages share a row, empty terms are left out."""
    names = [name for name in stages[0] if any(stage[name] for stage in stages)]
    table = plain_table("stage", *(_shown(name) for name in names), "one micro-batch")
    first = 0
    for index, stage in enumerate(stages):
        if index + 1 < len(stages) and stages[index + 1] == stage:
            continue
        values = [show_seconds(stage[name]) for name in names]
        where = str(index) if index == first else f"{first}-{index}"
        table.add_row(where, *values, show_seconds(sum(stage.values())))
        first = index + 1
    return table


def step_seconds_table(terms: Terms) -> Table:
    """Return the seconds of a step by what takes them."""
    whole_s = sum(terms.values())
    table = plain_table("of a step", "seconds", "share")
    for name, seconds in terms.items():
        if seconds:
            table.add_row(_shown(name), show_seconds(seconds), show_percent(seconds / whole_s).lstrip("+"))
    return table


def moments_table(moments: Sequence[tuple[int, str, str, Terms]]) -> Table:
    """Return the bytes of the fullest moment of a phase, (stage, phase, moment, terms)."""
    names = [name for name in moments[0][3] if any(terms[name] for *_, terms in moments)]
    table = plain_table("stage", "phase: fullest moment", *(_shown(name) for name in names), "sum")
    for stage, phase, moment, terms in moments:
        values = [show_bytes(terms[name]) if terms[name] else "-" for name in names]
        table.add_row(str(stage), f"{phase}: {moment}", *values, show_bytes(sum(terms.values())))
    return table


def _shown(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
