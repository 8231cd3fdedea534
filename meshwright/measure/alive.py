"""Count the bytes that a layer keeps for its backward pass, and those alive for a moment while it runs.

Storages are counted from the operator that makes them to the moment when nobody holds them. What an
operator uses inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.models.tables import shared_tables
from meshwright.runtime.initialize import local_data

Out = Tensor | tuple[Tensor, ...]


def saved_bytes(forward: Callable[[], Out], leave_out: Sequence[Tensor]) -> int:
    """Return the bytes of distinct storages that autograd keeps of `forward`.

    Those of `leave_out` are not counted, nor the constant tables that all layers share.
    """
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        out = forward()
    for tensor in (*leave_out, *shared_tables()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


def made_by(out: Out) -> tuple[Tensor, ...]:
    """Return what of a layer's output has a gradient and was made by it, not handed on as it came."""
    return tuple(x for x in ((out,) if isinstance(out, Tensor) else out) if x.grad_fn is not None)


def transient_bytes(forward: Callable[[], Out], saved: int, parameters: Sequence[nn.Parameter]) -> int:
    """Return what is alive at most in a backward pass beside `saved` bytes and the parameters' gradients."""
    with _Alive({local_data(p).untyped_storage()._cdata for p in parameters}) as alive:
        out = made_by(forward())
        gradients = [torch.ones_like(x) for x in out]
        alive.start_peak()
        torch.autograd.backward(out, gradients)
    own = {local_data(p.grad).untyped_storage()._cdata for p in parameters if p.grad is not None}
    return max(0, alive.peak_bytes(without=own) - saved)


class _Alive(TorchDispatchMode):
    """Notes when storages appear and when they go."""

    def __init__(self, leave_out: set[int]) -> None:
        super().__init__()
        self._leave_out = leave_out
        self._events: list[tuple[int, int]] = []
        self._seen: dict[int, int] = {}
        self._first = 0

    def start_peak(self) -> None:
        """Let the peak count from here on; what is alive now is part of it."""
        self._first = len(self._events)

    def peak_bytes(self, *, without: set[int]) -> int:
        alive = peak = 0
        for number, (key, change) in enumerate(self._events):
            alive += 0 if key in without else change
            if number >= self._first:
                peak = max(peak, alive)
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen or key in self._leave_out or num_bytes == 0:
            return
        self._seen[key] = num_bytes
        self._events.append((key, num_bytes))
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._events.append((key, -self._seen.pop(key)))
