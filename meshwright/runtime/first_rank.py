"""What only the first rank of a job does, or knows and tells the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def is_first_rank() -> bool:
    return dist.get_rank() == 0


def on_first_rank(call: Callable[[T], object]) -> Callable[[T], object]:
    """Return `call` on the first rank, and on the others what does nothing."""
    return call if is_first_rank() else lambda _: None


def from_first_rank(text: str | None) -> str | None:
    """Return what the first rank was given. Collective."""
    held = [text]
    dist.broadcast_object_list(held, src=0)
    return held[0]
