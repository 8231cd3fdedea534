"""Build torch layers from their specs, and a whole model that runs on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.models.decoder import Block, Embedding, Head
from meshwright.spec.model import BlockLayer, EmbeddingLayer, HeadLayer, LayerSpec, ModelSpec


def build_layer(spec: LayerSpec) -> nn.Module:
    """Return the module of one layer, on torch's current default device, its values not set."""
    if reason := why_only_priced(spec):
        raise UserError(f"{reason} can be planned and priced, but not trained yet")
    match spec:
        case EmbeddingLayer():
            return Embedding(spec)
        case BlockLayer():
            return Block(spec)
        case HeadLayer():
            return Head(spec)
        case _:
            raise AssertionError(spec.kind)


def why_only_priced(spec: LayerSpec) -> str | None:
    """Return what of `spec` the cost model prices and no module implements, or None."""
    match spec:
        case EmbeddingLayer():
            is_there = {"token_types": spec.token_types, "norm": spec.norm, "targets": spec.targets}
        case BlockLayer():
            is_there = {
                "mlp.experts": spec.mlp.experts,
                "attention.latent": spec.attention.latent,
                "attention.sliding_window": spec.attention.sliding_window,
                "attention.relative": spec.attention.relative,
                "attention.windows": spec.attention.windows,
                "attention.causal false": not spec.attention.causal,
                "cross_attention": spec.cross_attention,
                "post_norm": spec.post_norm,
                "mlp.activation relu": spec.mlp.activation == "relu",
            }
        case HeadLayer():
            is_there = {"transform": spec.transform, "bias": spec.bias, "logit_scale": spec.logit_scale != 1.0}
        case _:
            return spec.kind
    found = [name for name, value in is_there.items() if value]
    return f"{spec.kind} with {found[0]}" if found else None


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
