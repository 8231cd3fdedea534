"""The classes that a classifier foretells while a model is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from meshwright.models.heads import Classifier
from meshwright.runtime.stage import Stage


@contextmanager
def watched_classes(stage: Stage) -> Iterator[list[Tensor]]:
    """Yield a list that takes, for each forward pass of a classifier in `stage`, the likeliest class of each sample.

    It stays empty on stages without one.
    """
    seen: list[Tensor] = []
    head = dict(stage.layers.items()).get(stage.loss_layer)
    if not isinstance(head, Classifier):
        yield seen
        return

    def note(_module: nn.Module, _inputs: object, logits: Tensor) -> None:
        seen.append(logits.detach().argmax(-1))

    # The layer itself returns its loss; its last projection returns the logits, sharded or recomputed or not.
    hook = head.output.register_forward_hook(note)
    try:
        yield seen
    finally:
        hook.remove()
