"""Where the seconds of a step went on this rank: running forward and backward, waiting for neighbours, the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Part = Literal["forward", "backward", "waiting", "sync", "optimizer"]
PARTS: tuple[Part, ...] = ("forward", "backward", "waiting", "sync", "optimizer")


class Stopwatch:
    """Adds up the seconds of each part of a step.

    `forward` and `backward` hold a stage's own passes with the collectives inside them, `waiting`
    what passes until a neighbour's tensors are here (bubble and border), `sync` what is summed once
    a step. On a GPU these are times of the host, which runs ahead of the device: they say little.
    """

    def __init__(self, device: torch.device) -> None:
        self.means_something = device.type == "cpu"
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - started

    def take(self) -> list[float]:
        """Return the seconds of each part since the last call, in the order of PARTS."""
        taken = [self._seconds[part] for part in PARTS]
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return taken
