"""Save and resume training, also under another plan and another number of ranks.

A checkpoint is a folder `step-<number>` of safetensors shards, written by torch.distributed.checkpoint,
and a `checkpoint.json`. Weights and optimizer states are stored under the model's own names with
their place in the whole tensor, so any plan reads what it needs; nothing is pickled. The folder is
written under another name and renamed when it is whole.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.errors import UserError
from meshwright.files import put_folder, read_data, read_spec, sha256, shorten, write_spec, write_text
from meshwright.models.weights import FullParameter
from meshwright.runtime.initialize import local_data, parameter_name
from meshwright.runtime.parallelize import Engine
from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.plan import Plan

_PREFIX, _PARTIAL, _REPLACED = "step-", ".partial", ".replaced"
_DESCRIPTION, _TENSORS_SUFFIX = "checkpoint.json", ".safetensors"
_MODEL, _CONFIG, _PLAN = "model.json", "config.json", "plan.json"
_KNOWN_SUFFIXES = (_TENSORS_SUFFIX, ".json")
_STATES = ("exp_avg", "exp_avg_sq")


class StoredFile(Spec):
    """A shard of a checkpoint and its size, by which a torn one is known."""

    name: str
    num_bytes: NonNegativeInt


class DataInfo(Spec):
    """What a global sample number means: equal values give equal samples.

    `tokens_sha256` is of the tokens and of the ids that the task adds, or of the labelled images or texts.
    """

    seed: NonNegativeInt
    seq_len: PositiveInt
    tokens_sha256: str
    held_out_fraction: NonNegativeFloat
    task: str = "causal"
    target_seq_len: NonNegativeInt = 0


class CheckpointInfo(Spec):
    """What a checkpoint is of, and where in the data it was taken.

    `num_samples` counts the samples trained on so far: the next step starts at that global sample,
    of the task and the data that `data` names.
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
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint below `folder` and return its path. Collective over all ranks.

    It appears whole or not at all. `config`: the config.json of the weights that training began from, kept for an
    export. Raises SaveError on every rank when any could not write.
    """
    path = folder / f"{_PREFIX}{step:08d}"
    partial = path.with_suffix(_PARTIAL)
    is_first = dist.get_rank() == 0

    def begin() -> None:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write() -> None:
        save(
            _state(engine, optimizer, for_saving=True),
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
        )
        if is_first:
            write_spec(engine.plan.model, partial / _MODEL)
            if config is not None:
                write_text(partial / _CONFIG, json.dumps(config, indent=2) + "\n")
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
            put_folder(partial, path, path.with_suffix(_REPLACED))

    failure = _agree(_failure_of(begin)) or _agree(_failure_of(write))
    if failure is not None:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"checkpoint of step {step} could not be written to {folder}: {failure}; {_last_good(folder)}")
    return path


def refuse_another_run(run_dir: Path, checkpoints: Path) -> None:
    """Raise UserError when a new run would begin where an earlier one has left checkpoints."""
    older = _newest_first(checkpoints)
    if older:
        raise UserError(
            f"run-dir: {run_dir} holds checkpoints of an earlier run ({older[0].name}); "
            f"go on from them with --resume {run_dir}, or choose another --run-dir"
        )


def clear_left_overs(folder: Path) -> None:
    """Remove what a save that was killed has left below `folder`.

    An older checkpoint that was about to be replaced gets its name back where the new one is not there.
    """
    for path in (path for suffix in (_PARTIAL, _REPLACED) for path in folder.glob(f"{_PREFIX}*{suffix}")):
        whole = path.with_suffix("")
        if path.suffix == _REPLACED and not whole.exists():
            path.rename(whole)
        else:
            shutil.rmtree(path, ignore_errors=True)


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
        which = (
            "a model other than the plan's"
            if info.model != model.name
            else "with other layers or sizes than the plan's"
        )
        raise UserError(f"{path}: is of {info.model}, {which} {model.name}")
    return info


def read_model(path: Path) -> ModelSpec:
    """Return the model that the checkpoint at `path` is of; one of an older version has it in its run's plan."""
    info, plan = read_info(path), path.resolve().parent.parent / _PLAN
    if (path / _MODEL).is_file():
        model = read_spec(ModelSpec, path / _MODEL)
    elif plan.is_file():
        model = read_spec(Plan, plan).model
    else:
        raise UserError(f"{path}: does not say its model (no {_MODEL}), and there is no {plan}; put its plan there")
    if sha256(model) != info.model_sha256:
        raise UserError(f"{path}: is of another {info.model} than {_MODEL} or {_PLAN} beside it says")
    return model


def read_config(path: Path) -> dict[str, Any] | None:
    """Return the config.json of what the training of the checkpoint at `path` began from, or None for a seed."""
    return read_data(path / _CONFIG) if (path / _CONFIG).is_file() else None


def whole_parameters(path: Path, model: ModelSpec) -> FullParameter:
    """Return the whole parameters of the checkpoint at `path` by name, each read when asked for. Needs no ranks."""
    reader = _Reader(str(path))
    shapes = {
        parameter_name(model, index, parameter): parameter.shape
        for index, layer in reversed(list(enumerate(model.layers)))
        for parameter in layer_parameters(layer)
    }

    def read(name: str) -> Tensor:
        key, value = f"model.{name}", torch.empty(shapes[name])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no ranks are there, which is meant
                load({key: value}, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise UserError(f"{path}: {name} cannot be read; is it whole? ({_cause(error)})") from None
        return value

    return read


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of all shards once, however often something is loaded."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata


def why_torn(path: Path) -> str | None:
    """Return what is wrong with the checkpoint at `path`, or None when it is whole.

    Everything but the numbers in the tensors is looked at, so that no rank starts for nothing.
    """
    try:
        info = read_info(path)
    except UserError as error:
        return str(error)
    if not info.files:
        return f"{_DESCRIPTION} names no files"
    for file in info.files:
        stored = path / file.name
        if stored.name != file.name or stored.suffix not in _KNOWN_SUFFIXES:
            return f"{shorten(file.name)} is no file of a checkpoint"
        if not stored.is_file():
            return f"{file.name} is missing"
        if stored.stat().st_size != file.num_bytes:
            return f"{file.name} has {stored.stat().st_size} bytes instead of {file.num_bytes}"
        if stored.suffix == _TENSORS_SUFFIX and not _has_sound_header(stored):
            return f"{file.name} is not a safetensors file"
    return None


def _has_sound_header(file: Path) -> bool:
    """Return whether a safetensors file has a header that accounts for all its bytes; nothing else is read."""
    try:
        with safe_open(str(file), framework="pt"):
            return True
    except (SafetensorError, OSError):
        return False


def find_checkpoint(path: Path, warn: Callable[[str], None]) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest whole one of a run folder.

    Torn ones are passed over and named to `warn` when there is an older one, else in the error.
    """
    try:
        if not path.is_dir():
            problem = "is a file; name the folder" if path.exists() else "no such folder; name a checkpoint or a run"
            raise UserError(f"{path}: {problem}")
        if path.suffix in (_PARTIAL, _REPLACED):
            raise UserError(f"{path}: is left over from a save that did not end; name {path.parent.parent} instead")
        if (path / _DESCRIPTION).is_file():
            if reason := why_torn(path):
                raise UserError(f"{path}: the checkpoint is torn: {reason}; resume from another one of {path.parent}")
            return path
        torn: list[str] = []
        for checkpoint in (found for folder in (path, path / "checkpoints") for found in _newest_first(folder)):
            reason = why_torn(checkpoint)
            if reason is None:
                for line in torn:
                    warn(f"{line}; looking for an older one")
                return checkpoint
            torn.append(f"{checkpoint} is torn ({reason})")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    newest = f": {torn[0]}" if torn else ""
    raise UserError(f"{path}: holds no whole checkpoint{newest}")


def _newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder; one that was being replaced counts while the new one is not there."""
    found = [
        path
        for path in folder.glob(f"{_PREFIX}*")
        if path.suffix != _PARTIAL and not (path.suffix == _REPLACED and path.with_suffix("").exists())
    ]
    return sorted(found, key=lambda path: path.name, reverse=True)


def _failure_of(part: Callable[[], None]) -> str | None:
    """Do `part` of a save; return why it failed."""
    try:
        part()
    except (OSError, UserError, CheckpointException) as error:
        return _cause(error)
    return None


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
