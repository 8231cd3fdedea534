"""Blocks of the user's own: the module that a CustomLayer names, checked against what it says (docs/own-model.md)."""

from __future__ import annotations

import importlib

from torch import nn

from meshwright.errors import UserError
from meshwright.spec.model import CustomLayer


def build_own(spec: CustomLayer) -> nn.Module:
    """Return the module that the builder of `spec` makes. Raises UserError when it cannot, or makes another one."""
    module_name, _, name = spec.builder.partition(":")
    try:
        builder = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"builder: {spec.builder} cannot be imported ({error}); put its folder on PYTHONPATH, or install it"
        ) from None
    if not callable(builder):
        raise UserError(f"builder: {spec.builder} must be a function, not {type(builder).__name__}")
    try:
        module = builder(spec)
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(str(error).split())
        raise UserError(f"builder: {spec.builder} failed ({type(error).__name__}: {reason})") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"builder: {spec.builder} must return a torch.nn.Module, not {type(module).__name__}")
    given = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    said = {parameter.name: parameter.shape for parameter in spec.parameters}
    if wrong := sorted(given.items() ^ said.items()):
        where, shape = wrong[0]
        holder, other = ("the module", "the description") if (where, shape) in given.items() else _OTHER_WAY
        raise UserError(f"builder: {where} of shape {list(shape)} is in {holder} of {spec.builder}, not in {other}")
    return module


_OTHER_WAY = ("the description", "the module")
