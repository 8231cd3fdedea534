"""meshwright recommend: how many devices fit a job, and what each size of cluster gives."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.common import JsonFlag, show_json, show_line, show_view
from meshwright.cli.options import MemoryOption, SeqLenOption, TargetSeqLenOption
from meshwright.cli.progress import shown_progress
from meshwright.errors import UserError
from meshwright.report.recommend import sizes_table
from meshwright.search.recommend import Size, sizes
from meshwright.spec import library

_LIMIT_S = 10.0
_MOST_DEVICES = 1 << 12


def recommend(
    model: Annotated[str, typer.Option(help="A library name, a config.json, its folder, or a model file.")],
    device: Annotated[str, typer.Option(help="A kind of device, such as h100-sxm.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Samples a step.")],
    seq_len: SeqLenOption = None,
    target_seq_len: TargetSeqLenOption = None,
    most_devices: Annotated[int, typer.Option(min=1, max=_MOST_DEVICES, help="The largest cluster to try.")] = 256,
    devices_per_node: Annotated[int, typer.Option(min=1, max=64, help="Devices of a node.")] = 8,
    memory: MemoryOption = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Price of a device for an hour.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds to search at most, for each size.")] = _LIMIT_S,
    json: JsonFlag = False,
) -> None:
    """Find the fewest devices that fit, and the throughput (and cost) of the best plan for each size of cluster."""
    if device.lower() not in library.device_names():
        raise UserError(f"device: {device!r} is not known; known: {', '.join(library.device_names())}")
    spec = library.model(model)
    with shown_progress() as tell:
        found = list(
            sizes(
                spec,
                device.lower(),
                global_batch=global_batch,
                seq_len=seq_len,
                target_seq_len=target_seq_len,
                most_devices=most_devices,
                devices_per_node=devices_per_node,
                memory=memory,
                time_limit_s=time_limit,
                progress=tell,
            )
        )
    fitting = [size for size in found if size.plan is not None]
    if json:
        show_json([_as_data(size, price_per_hour) for size in found])
    else:
        show_view(sizes_table([(s.cluster, s.plan, s.reason, _cost(s, price_per_hour)) for s in found]))
        if fitting:
            show_line(f"fewest devices that fit: {fitting[0].num_devices} ({fitting[0].cluster})")
        else:
            show_line(f"nothing fits on up to {most_devices} devices; see meshwright plan for what is short")
    if not fitting:
        raise typer.Exit(1)


def _cost(size: Size, price_per_hour: float | None) -> float | None:
    return None if price_per_hour is None or size.plan is None else size.cost(price_per_hour)


def _as_data(size: Size, price_per_hour: float | None) -> dict[str, object]:
    predicted = None if size.plan is None else size.plan.predicted
    return {
        "cluster": size.cluster,
        "num_devices": size.num_devices,
        "fits": size.plan is not None,
        "reason": size.reason,
        "step_s": None if predicted is None else predicted.step_s,
        "tokens_per_s": None if predicted is None else predicted.tokens_per_s,
        "mfu": None if predicted is None else predicted.mfu,
        "peak_bytes": None if predicted is None else predicted.peak_bytes,
        "cost_per_billion_tokens": _cost(size, price_per_hour),
    }
