"""Initial weights that depend on the seed and the parameter's name alone, never on the plan.

Every rank draws the whole parameter from a generator seeded by (seed, name) and keeps its slice, so
one parameter at a time is whole on a rank and any plan starts from the same model.
"""

from __future__ import annotations

import hashlib
from math import sqrt

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.models.weights import FullParameter
from meshwright.spec.mesh import MeshShape
from meshwright.spec.model import BlockLayer, EmbeddingLayer, HeadLayer, LayerSpec, ModelSpec
from meshwright.spec.parameters import ParameterSpec, layer_parameters

STANDARD_DEVIATION = 0.02
_RESIDUAL_OUTPUTS = ("attention.out.weight", "cross_attention.out.weight", "mlp.down.weight")
TOKEN_WEIGHT = "layers.0.token.weight"


def parameter_name(model: ModelSpec, index: int, parameter: ParameterSpec) -> str:
    """Return the model-wide name of a layer's parameter; a tied head's weight has the embedding's."""
    if model.tied_embedding and index == len(model.layers) - 1 and parameter.name == "output.weight":
        return TOKEN_WEIGHT
    return f"layers.{index}.{parameter.name}"


def initial_parameter(model: ModelSpec, seed: int) -> FullParameter:
    """Return the function that draws the whole initial value of a named parameter.

    Normal with deviation 0.02 (residual outputs divided by sqrt(2 blocks), as GPT-2, and queries whose scores are
    not scaled by sqrt(head size), as T5), norms one, biases zero, rows of the padded vocabulary zero.
    """
    known = {
        parameter_name(model, index, parameter): (layer, parameter)
        for index, layer in reversed(list(enumerate(model.layers)))
        for parameter in layer_parameters(layer)
    }

    def draw(name: str) -> Tensor:
        layer, parameter = known[name]
        return _draw(layer, parameter, name, seed, model.num_blocks)

    return draw


def initialize(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Set the parameters of a whole model on one device, as any plan would."""
    draw = initial_parameter(spec, seed)
    with torch.no_grad():
        for index, layer in enumerate(spec.layers):
            for parameter in layer_parameters(layer):
                target = model.get_parameter(f"layers.{index}.{parameter.name}")
                target.copy_(draw(parameter_name(spec, index, parameter)))


def own_slice(full: Tensor, parameter: ParameterSpec, mesh: MeshShape, local_rank: int) -> Tensor:
    """Return the part of a whole parameter that stage rank `local_rank` holds: tp slice, then row shard."""
    if parameter.tp_dim is not None:
        full = full.chunk(mesh.tp, parameter.tp_dim)[mesh.tp_index(local_rank)]
    rows = -(-full.shape[0] // mesh.dp_shard)
    first = mesh.dp_index(local_rank) % mesh.dp_shard * rows
    return full[first : first + rows]


def local_data(parameter: Tensor) -> Tensor:
    """Return the tensor behind a parameter on this rank."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _draw(layer: LayerSpec, parameter: ParameterSpec, name: str, seed: int, num_blocks: int) -> Tensor:
    if len(parameter.shape) == 1 and parameter.name != "class_token":
        fill = 1.0 if parameter.name.endswith("weight") and "norm" in parameter.name else 0.0
        return torch.full(parameter.shape, fill)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    deviation = STANDARD_DEVIATION / _divisor(layer, parameter.name, num_blocks)
    values = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
    if isinstance(layer, EmbeddingLayer | HeadLayer) and parameter.name in ("token.weight", "output.weight"):
        values[layer.vocab_size :] = 0.0
    return values


def _divisor(layer: LayerSpec, name: str, num_blocks: int) -> float:
    if name in _RESIDUAL_OUTPUTS:
        return sqrt(2 * num_blocks)
    if isinstance(layer, BlockLayer):
        for part, attention in (("attention", layer.attention), ("cross_attention", layer.cross_attention)):
            if attention is not None and not attention.scaled and name == f"{part}.q.weight":
                return sqrt(attention.head_size)
    return 1.0
