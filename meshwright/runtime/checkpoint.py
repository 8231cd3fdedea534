"""Save and resume training, also under another plan and another number of ranks.

A checkpoint is a folder `step-<number>` of safetensors shards, written by torch.distributed.checkpoint,
and a `checkpoint.json`. Weights and optimizer states are stored under the model's own names with
their place in the whole tensor, so any plan reads what it needs; nothing is pickled. The folder is
written under another name and renamed when it is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.errors import UserError
from meshwright.files import read_spec, sha256, write_spec
from meshwright.runtime.initialize import local_data
from meshwright.runtime.parallelize import Engine
from meshwright.spec.base import NonNegativeInt, Spec

_PREFIX, _PARTIAL = "step-", ".partial"
_DESCRIPTION = "checkpoint.json"
_STATES = ("exp_avg", "exp_avg_sq")


class CheckpointInfo(Spec):
    """What a checkpoint is of, and where in the data it was taken.

    `num_samples` counts the samples trained on so far: the next step starts at that global sample.
    """

    schema_version: Literal[1] = 1
    model_sha256: str
    model: str
    step: NonNegativeInt
    num_samples: NonNegativeInt
    data_seed: NonNegativeInt
    torch_version: str


def save_checkpoint(
    folder: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    num_samples: int,
    data_seed: int,
) -> Path:
    """Write a checkpoint below `folder` and return its path. Collective over all ranks."""
    path = folder / f"{_PREFIX}{step:08d}"
    partial = path.with_suffix(_PARTIAL)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(engine, optimizer, for_saving=True)
    save(state, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
    if dist.get_rank() == 0:
        info = CheckpointInfo(
            model_sha256=sha256(engine.plan.model),
            model=engine.plan.model.name,
            step=step,
            num_samples=num_samples,
            data_seed=data_seed,
            torch_version=str(torch.__version__),
        )
        write_spec(info, partial / _DESCRIPTION)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    dist.barrier()
    return path


def load_checkpoint(path: Path, engine: Engine, optimizer: torch.optim.Optimizer) -> CheckpointInfo:
    """Fill the engine's weights and the optimizer's states from `path`. Collective over all ranks."""
    info = read_info(path)
    if info.model_sha256 != sha256(engine.plan.model):
        raise UserError(f"{path}: is of {info.model}, a model other than the plan's {engine.plan.model.name}")
    state = _state(engine, optimizer, for_saving=False)
    try:
        load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise UserError(f"{path}: cannot be read; is it whole? ({_cause(error)})") from None
    for optimizer_state in optimizer.state.values():
        optimizer_state["step"].fill_(float(info.step))
    return info


def read_info(path: Path) -> CheckpointInfo:
    """Return the description of the checkpoint at `path`."""
    if not (path / _DESCRIPTION).is_file():
        raise UserError(f"{path}: is not a checkpoint (no {_DESCRIPTION} in it)")
    return read_spec(CheckpointInfo, path / _DESCRIPTION)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the whole checkpoint with the highest step below `folder`, or None."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if (path / _DESCRIPTION).is_file()]
    return max((path for path in found if path.suffix != _PARTIAL), default=None, key=lambda path: path.name)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the latest of a run folder."""
    if (path / _DESCRIPTION).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if found := latest_checkpoint(folder):
            return found
    raise UserError(f"{path}: holds no whole checkpoint")


def _state(engine: Engine, optimizer: torch.optim.Optimizer, *, for_saving: bool) -> dict[str, Tensor]:
    """Return this rank's tensors by their names in the checkpoint.

    A weight tied across stages is stored once, by the first stage; the last stage reads that.
    Ranks whose shard is empty (fewer rows than shards) take no part in that tensor.
    """
    state: dict[str, Tensor] = {}
    for held in engine.held:
        if local_data(held.tensor).numel() == 0 or (for_saving and held.is_second_copy):
            continue
        state[f"model.{held.name}"] = held.tensor.detach()
        for name in _STATES:
            state[f"optimizer.{held.name}.{name}"] = optimizer.state[held.tensor][name]
    return state


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
