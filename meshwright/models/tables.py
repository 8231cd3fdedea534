"""Constant tensors that all layers share: made once for each size, device and dtype, and kept while they are used.

They are no buffers of modules, so nothing is lost on meta devices, and no checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_MOST_SIZES = 32
_made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
Arguments = ParamSpec("Arguments")
Made = TypeVar("Made", Tensor, tuple[Tensor, ...])


def shared(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Return `make`, whose results are kept and given again for equal arguments; autograd does not see it."""

    @lru_cache(maxsize=_MOST_SIZES)
    @wraps(make)
    def kept(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        with torch.no_grad():
            made = make(*args, **kwargs)
        for tensor in made if isinstance(made, tuple) else (made,):
            _made[id(tensor)] = tensor
        return made

    return cast("Callable[Arguments, Made]", kept)


def shared_tables() -> list[Tensor]:
    """Return every table that exists; autograd may hold one, which costs nothing more."""
    return list(_made.values())
