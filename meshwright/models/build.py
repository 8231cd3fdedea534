"""Build torch layers from their specs, and a whole model that runs on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.models.blocks import Block
from meshwright.models.dropout import Place
from meshwright.models.embedding import Embedding
from meshwright.models.heads import Classifier, Head
from meshwright.models.own import build_own
from meshwright.models.vision import Merge, PatchEmbedding
from meshwright.spec.legality import why_layer_only_priced
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    CustomLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerSpec,
    MergeLayer,
    ModelSpec,
    PatchEmbeddingLayer,
)


class OnlyPricedError(UserError):
    """There is no module for a layer, which every rank says alike."""

    on_every_rank = True


def build_layer(spec: LayerSpec) -> nn.Module:
    """Return the module of one layer, on torch's current default device, its values not set.

    Its forward takes what the layer before hands on (`spec.model.hands_on`), the first layer ids or images, the last
    one targets too, and `at`: where in a training it runs, for dropout.
    """
    if reason := why_layer_only_priced(spec):
        raise OnlyPricedError(f"{reason} can be planned and priced, but not trained yet")
    match spec:
        case EmbeddingLayer():
            return Embedding(spec)
        case PatchEmbeddingLayer():
            return PatchEmbedding(spec)
        case BlockLayer():
            return Block(spec)
        case CustomLayer():
            return build_own(spec)
        case MergeLayer():
            return Merge(spec)
        case HeadLayer():
            return Head(spec)
        case ClassifierLayer():
            return Classifier(spec)


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

    def forward(self, *inputs: Tensor, targets: Tensor | None = None, at: Place | None = None) -> Tensor:
        """Return the fp32 summed loss of `targets`, also the last of the positional tensors when not named.

        `inputs`: ids [B, S] (and, where the model has token types, those), an encoder's and a decoder's ids, or images
        [B, C, height, width]. `targets`: [B, T] of tokens or [B] of classes; -100 counts nothing. `at` (its layer is
        set here) drops hidden states.
        """
        if targets is None:
            *given, targets = inputs
            inputs = tuple(given)
        handed = self._handed(inputs, at)
        return self.layers[-1](*handed, targets, at=_in_layer(at, len(self.layers) - 1))

    def logits(self, *inputs: Tensor) -> Tensor:
        """Return the logits [B, T, vocabulary], padding cut off, or [B, classes]."""
        head = self.layers[-1]
        assert isinstance(head, Head | Classifier)  # noqa: S101 the spec's last layer
        logits = head.logits(*self._handed(inputs, None))
        return logits[..., : self.spec.vocab_size] if isinstance(head, Head) else logits

    def _handed(self, inputs: tuple[Tensor, ...], at: Place | None) -> tuple[Tensor, ...]:
        for index, layer in enumerate(list(self.layers)[:-1]):
            out = layer(*inputs, at=_in_layer(at, index))
            inputs = out if isinstance(out, tuple) else (out,)
        return inputs


def build_model(spec: ModelSpec, device: torch.device | str = "meta") -> Transformer:
    """Return the model on `device`, values not set; on "meta" it takes no memory."""
    with torch.device(device):
        return Transformer(spec)


def tie(embedding: nn.Module, head: nn.Module) -> None:
    """Make `head` use the token weight of `embedding`."""
    assert isinstance(embedding, Embedding)  # noqa: S101 by construction
    assert isinstance(head, Head)  # noqa: S101 by construction
    head.output.weight = embedding.token.weight


def _in_layer(at: Place | None, index: int) -> Place | None:
    return None if at is None else at._replace(layer=index)
