"""Save and resume training, also under another plan and another number of ranks.

A checkpoint is a folder `step-<number>` of safetensors shards, written by torch.distributed.checkpoint,
and a `checkpoint.json`. Weights and optimizer states are stored under the model's own names with
their place in the whole tensor, so any plan reads what it needs; nothing is pickled. The folder is
written under another name and renamed when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
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
from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from meshwright.spec.model import ModelSpec

_PREFIX, _PARTIAL, _REPLACED = "step-", ".partial", ".replaced"
_DESCRIPTION = "checkpoint.json"
_STATES = ("exp_avg", "exp_avg_sq")


class StoredFile(Spec):
    """A shard of a checkpoint and its size, by which a torn one is known."""

    name: str
    num_bytes: NonNegativeInt


class DataInfo(Spec):
    """What a global sample number means: equal values give equal samples."""

    seed: NonNegativeInt
    seq_len: PositiveInt
    tokens_sha256: str
    held_out_fraction: NonNegativeFloat


class CheckpointInfo(Spec):
    """What a checkpoint is of, and where in the data it was taken.

    `num_samples` counts the samples trained on so far: the next step starts at that global sample,
    which is a window of `seq_len` tokens of the data named by `tokens_sha256` and `held_out_fraction`.
    """

    schema_version: Literal[1] = 1
    model_sha256: str
    model: str
    step: NonNegativeInt
    num_samples: NonNegativeInt
    data: DataInfo
    torch_version: str
    files: tuple[StoredFile, ...]


class SaveError(UserError):
    """A checkpoint could not be written; what was there before is untouched."""

    exit_code = 1
    on_every_rank = True


def save_checkpoint(
    folder: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    num_samples: int,
    data: DataInfo,
) -> Path:
    """Write a checkpoint below `folder` and return its path. Collective over all ranks.

    It appears whole or not at all. Raises SaveError on every rank when any could not write.
    """
    path = folder / f"{_PREFIX}{step:08d}"
    partial = path.with_suffix(_PARTIAL)
    try:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _agree(None)
        state = _state(engine, optimizer, for_saving=True)
        save(state, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
        if dist.get_rank() == 0:
            info = CheckpointInfo(
                model_sha256=sha256(engine.plan.model),
                model=engine.plan.model.name,
                step=step,
                num_samples=num_samples,
                data=data,
                torch_version=str(torch.__version__),
                files=tuple(
                    StoredFile(name=file.name, num_bytes=file.stat().st_size) for file in sorted(partial.iterdir())
                ),
            )
            write_spec(info, partial / _DESCRIPTION)
            _put_in_place(partial, path)
        failure = None
    except (OSError, UserError, CheckpointException) as error:
        failure = _cause(error)
    failure = _agree(failure)
    if failure is not None:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"checkpoint of step {step} could not be written to {folder}: {failure}; {_last_good(folder)}")
    return path


def load_checkpoint(path: Path, engine: Engine, optimizer: torch.optim.Optimizer) -> CheckpointInfo:
    """Fill the engine's weights and the optimizer's states from `path`. Collective over all ranks."""
    info = check_model(path, engine.plan.model)
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


def check_model(path: Path, model: ModelSpec) -> CheckpointInfo:
    """Return the description of the checkpoint at `path`, or raise UserError when it is not of `model`."""
    info = read_info(path)
    if info.model_sha256 != sha256(model):
        raise UserError(f"{path}: is of {info.model}, a model other than the plan's {model.name}")
    return info


def why_torn(path: Path) -> str | None:
    """Return what is missing from the checkpoint at `path`, or None when it is whole."""
    try:
        info = read_info(path)
    except UserError as error:
        return str(error)
    for file in info.files:
        stored = path / file.name
        if not stored.is_file():
            return f"{file.name} is missing"
        if stored.stat().st_size != file.num_bytes:
            return f"{file.name} has {stored.stat().st_size} bytes instead of {file.num_bytes}"
    return None


def find_checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest whole one of a run folder.

    Torn ones are passed over and named to `warn`.
    """
    if (path / _DESCRIPTION).is_file():
        if reason := why_torn(path):
            raise UserError(f"{path}: the checkpoint is torn: {reason}; resume from another one of {path.parent}")
        return path
    for folder in (path, path / "checkpoints"):
        for checkpoint in _newest_first(folder):
            reason = why_torn(checkpoint)
            if reason is None:
                return checkpoint
            warn(f"{checkpoint} is torn ({reason}); looking for an older one")
    raise UserError(f"{path}: holds no whole checkpoint")


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.suffix not in (_PARTIAL, _REPLACED)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def _put_in_place(partial: Path, path: Path) -> None:
    """Rename `partial` to `path`; an older checkpoint of the same name goes only after that."""
    replaced = path.with_suffix(_REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _agree(failure: str | None) -> str | None:
    """Return the failure of the lowest rank that has one; every rank waits for all others here."""
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next((text for text in failures if text is not None), None)


def _last_good(folder: Path) -> str:
    whole = next((path for path in _newest_first(folder) if why_torn(path) is None), None)
    return "there is no older one" if whole is None else f"the last whole one is {whole}"


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
    """Return the innermost reason of an error, in one line."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        error = next((cause for cause in causes if isinstance(cause, BaseException)), error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200]
