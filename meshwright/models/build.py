"""Build torch layers from their specs, and a whole model that runs on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.models.decoder import Block, Embedding, Head
from meshwright.spec.model import BlockLayer, EmbeddingLayer, LayerSpec, ModelSpec


def build_layer(spec: LayerSpec) -> nn.Module:
    """Return the module of one layer, on torch's current default device, its values not set."""
    if isinstance(spec, EmbeddingLayer):
        return Embedding(spec)
    _refuse_priced_only(spec)
    return Block(spec) if isinstance(spec, BlockLayer) else Head(spec)


def _refuse_priced_only(spec: LayerSpec) -> None:
    """Raise UserError for what the cost model prices and no module implements."""
    if isinstance(spec, BlockLayer) and spec.mlp.experts is not None:
        raise UserError(f"mlp.experts: {spec.mlp.experts.num_experts} experts can be priced, but not trained yet")
    if isinstance(spec, BlockLayer) and spec.attention.latent is not None:
        raise UserError("attention.latent: latent attention can be priced, but not trained yet")


class Transformer(nn.Module):
    """All layers of a model on one device: the reference that every plan must equal.

    Parameters are named `layers.<index>.<name in the layer>`. A tied head shares the embedding's
    weight.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(build_layer(layer) for layer in spec.layers)
        if spec.tied_embedding:
            tie(self.layers[0], self.layers[-1])

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the fp32 summed loss of `targets` [B, T] (-100 counts nothing) given `ids` [B, T]."""
        return self.layers[-1](self._hidden(ids), targets)

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits [B, T, vocabulary], padding cut off."""
        head = self.layers[-1]
        assert isinstance(head, Head)  # noqa: S101 the spec's last layer
        return head.logits(self._hidden(ids))[..., : self.spec.vocab_size]

    def _hidden(self, ids: Tensor) -> Tensor:
        x = ids
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return x


def build_model(spec: ModelSpec, device: torch.device | str = "meta") -> Transformer:
    """Return the model on `device`, values not set; on "meta" it takes no memory."""
    with torch.device(device):
        return Transformer(spec)


def tie(embedding: nn.Module, head: nn.Module) -> None:
    """Make `head` use the token weight of `embedding`."""
    assert isinstance(embedding, Embedding)  # noqa: S101 by construction
    assert isinstance(head, Head)  # noqa: S101 by construction
    head.output.weight = embedding.token.weight
