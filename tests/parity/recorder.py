"""Record the collectives and sends that torch.distributed is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.cost.inventory import Call


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# name of the function -> kind, and which argument is the whole tensor
_COLLECTIVES = {
    "all_reduce": ("all_reduce", "tensor", 0),
    "all_gather_single": ("all_gather", "output_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter", "input", 1),
    "all_to_all_single": ("all_to_all", "output", 0),
}


@contextmanager
def recorded_calls() -> Iterator[Counter[Call]]:
    """Count every communication that this rank issues inside the block."""
    calls: Counter[Call] = Counter()
    originals = {name: getattr(dist, name) for name in (*_COLLECTIVES, "isend", "broadcast", "all_gather", "send")}

    def wrap(name: str) -> Callable[..., Any]:
        original = originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            if name == "isend":
                calls[Call("send", _bytes(args[0]), (dist.get_rank(), args[1]))] += 1
            elif name in _COLLECTIVES:
                op, keyword, position = _COLLECTIVES[name]
                tensors = [v for k, v in kwargs.items() if k.startswith(keyword)]
                whole = args[position] if len(args) > position else tensors[0]
                calls[Call(op, _bytes(whole), ranks)] += 1  # type: ignore[arg-type]
            else:
                raise AssertionError(f"{name} is not expected in a step")
            return original(*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
