"""What a model is trained for: it follows from its first and last layers."""

from __future__ import annotations

from typing import Literal, get_args

from meshwright.errors import UserError
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    CustomLayer,
    HeadLayer,
    ModelSpec,
    PatchEmbeddingLayer,
)

TaskName = Literal["causal", "masked", "spans", "images", "labelled-text"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)
CLASSES: tuple[TaskName, ...] = ("images", "labelled-text")


def tasks_of(model: ModelSpec) -> tuple[TaskName, ...]:
    """Return the tasks that `model` can be trained for, the usual one first."""
    is_image = isinstance(model.embedding, PatchEmbeddingLayer)
    if isinstance(model.head, ClassifierLayer):
        if model.has_targets:
            return ()
        return ("images",) if is_image else ("labelled-text",)
    if is_image:
        return ()
    return ("spans",) if model.has_targets else _language_tasks(model, model.head)


def _language_tasks(model: ModelSpec, head: HeadLayer) -> tuple[TaskName, ...]:
    """Return the tasks of a stack with a language model's head. Tokens that see those after them cannot foretell them.

    Of blocks of the user's own it is not known what they see.
    """
    blocks = [group.layer for group in model.groups[1:-1]]
    if head.transform is not None or any(isinstance(x, BlockLayer) and not x.attention.causal for x in blocks):
        return ("masked",)
    return ("causal", "masked") if any(isinstance(x, CustomLayer) for x in blocks) else ("causal",)


def choose_task(model: ModelSpec, wanted: str | None = None) -> TaskName:
    """Return the task: the usual one of `model`, or the one that is `wanted`. UserError when it cannot be."""
    able = tasks_of(model)
    if not able:
        raise UserError(f"task: nothing is known to train {model.name} on; use a loop of your own")
    if wanted is None:
        return able[0]
    for task in able:
        if task == wanted:
            return task
    raise UserError(f"task: {model.name} cannot be trained on {wanted}; its layers allow {' or '.join(able)}")
