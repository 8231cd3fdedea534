"""Training that begins from the weights of a Hugging Face folder, and checkpoints of ours as such folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.models.weights import (
    OpenWeights,
    SavedDtype,
    fingerprint,
    open_weights,
    refuse_foreign,
    save_weights,
)
from meshwright.runtime.checkpoint import find_checkpoint, read_config, read_info, read_model, whole_parameters
from meshwright.runtime.initialize import initial_parameter
from meshwright.spec.difference import first_difference
from meshwright.spec.families import model_from_file
from meshwright.spec.families.write import config_like
from meshwright.spec.model import ModelSpec


class BeginError(UserError):
    """The folder to begin from does not fit, which every rank says alike."""

    on_every_rank = True


def begin_from(folder: str | Path, model: ModelSpec, *, seed: int, new_head: bool) -> OpenWeights:
    """Return the weights of `model` in a Hugging Face `folder`; raise UserError when it is of another model.

    With `new_head` the last layer may be another, and what the folder lacks of it is drawn from `seed`.
    """
    theirs = model_from_file(Path(folder) / "config.json")
    difference = first_difference(model, theirs, heads_count=not new_head)
    if difference is not None:
        is_head = not new_head and first_difference(model, theirs, heads_count=False) is None
        hint = "--new-head begins with a new head" if is_head else f"plan with --model {folder}"
        raise UserError(f"init-from: {folder} is of another model than the plan, which has {difference}; {hint}")
    return open_weights(folder, model, new_head=initial_parameter(model, seed) if new_head else None)


def begin_from_together(folder: str | Path, model: ModelSpec, *, seed: int, new_head: bool) -> OpenWeights:
    """Return `begin_from` on every rank, or raise the failure of the lowest rank that has one on all of them."""
    weights, mine = None, ("", "")
    try:
        weights = begin_from(folder, model, seed=seed, new_head=new_head)
        mine = ("", fingerprint(folder))
    except UserError as error:
        mine = (str(error), "")
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    failures = [failure for failure, _ in everyone if failure]
    others = [str(rank) for rank, one in enumerate(everyone) if one != everyone[0]]
    if failures or weights is None:
        raise BeginError(failures[0])
    if others:
        raise BeginError(f"init-from: ranks {', '.join(others)} read other files than rank 0; put the same everywhere")
    return weights


def export_checkpoint(path: Path, folder: Path, dtype: SavedDtype, warn: Callable[[str], None]) -> tuple[Path, ...]:
    """Write the weights of a checkpoint of ours (or of a run's newest) as a Hugging Face folder; return its files.

    Needs no ranks: one tensor is read and written at a time.
    """
    refuse_foreign(folder)
    checkpoint = find_checkpoint(path, warn)
    model = read_model(checkpoint)
    return save_weights(
        folder,
        model,
        whole_parameters(checkpoint, model),
        config=config_like(read_config(checkpoint), model),
        dtype=dtype,
        about={"model": model.name, "step": read_info(checkpoint).step, "dtype": dtype},
    )
