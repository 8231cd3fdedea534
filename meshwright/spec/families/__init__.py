"""Model families: the `config.json` of a Hugging Face model as a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.files import explain, is_folder, read_data
from meshwright.spec.families import bert, gpt2, llama, mistral, mixtral, qwen3, swin, t5, vit
from meshwright.spec.families.config import Config
from meshwright.spec.model import ModelSpec

Reader = Callable[[Config, str], ModelSpec]

READERS: dict[str, Reader] = {
    "gpt2": gpt2.read,
    "llama": llama.read,
    "qwen2": qwen3.read_qwen2,
    "qwen3": qwen3.read_qwen3,
    "mistral": mistral.read,
    "mixtral": mixtral.read,
    "bert": bert.read,
    "t5": t5.read,
    "vit": vit.read,
    "swin": swin.read,
}
_CONFIG_NAME = "config.json"
_HOW_TO_ADD = (
    "to add one, write a reader in meshwright/spec/families and enter it in READERS "
    '(CONTRIBUTING.md, "Adding a model family")'
)


def model_from_config(config: Any, *, name: str, where: str) -> ModelSpec:
    """Return the model that the plain data of a `config.json` describes, called `name`.

    `where` names the file in error lines. Fields that do not change the shape or the mathematics
    of training (token ids, dropout, generation settings) are not read.
    """
    if not isinstance(config, dict):
        raise UserError(f"{where}: a config.json holds one object, not {type(config).__name__}")
    fields = cast("dict[str, Any]", config)
    model_type = fields.get("model_type")
    if model_type is None:
        raise UserError(f"{where}: model_type: required, but missing; supported: {', '.join(READERS)}")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        supported = ", ".join(READERS)
        raise UserError(f"{where}: model_type: {model_type!r} is not supported; supported: {supported}; {_HOW_TO_ADD}")
    readable = Config(fields, where)
    readable.refuse_unless("quantization_config", [], "quantised weights cannot be trained")
    try:
        return reader(readable, name)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error)}") from None


def model_from_file(path: str | Path) -> ModelSpec:
    """Return the model that `path`, a `config.json` or a folder that holds one, describes.

    The model is called what the folder is called, since the file's name says nothing.
    """
    path = Path(path)
    file = path / _CONFIG_NAME if is_folder(path) else path
    name = file.resolve().parent.name if file.name == _CONFIG_NAME else file.stem
    return model_from_config(read_data(file), name=name or "model", where=str(file))
