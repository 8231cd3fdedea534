"""One profile: the rates of the machine, and the layers that a search for a job will ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.measure.layers import measure_layer, measure_optimizer, wanted_layers
from meshwright.measure.rates import measure_rates
from meshwright.spec.base import Dtype
from meshwright.spec.model import ModelSpec
from meshwright.spec.profile import Profile


def measure_profile(
    device: torch.device,
    name: str,
    *,
    model: ModelSpec | None,
    batch: int,
    seq_len: int,
    dtype: Dtype,
    show: Callable[[str], None],
) -> Profile:
    """Return the profile of the running process group. Collective; every rank returns the same."""
    show("rates of matrix products, copies and collectives")
    profile = measure_rates(device, name)
    optimizer = measure_optimizer(device)
    wanted = [] if model is None else list(wanted_layers(model, dist.get_world_size(), batch))
    samples = []
    for number, (layer, tp, count) in enumerate(wanted):
        show(f"layer {number + 1} of {len(wanted)}: {layer.kind}, tp {tp}, {count} samples")
        samples.append(measure_layer(layer, tp, count, seq_len=seq_len, dtype=dtype, device=device))
    return profile.model_copy(update={"layers": tuple(samples), "optimizers": (optimizer,)})
