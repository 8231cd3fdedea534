"""The last layers: a language model's head and a classifier, which compute the summed loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.blocks import activate
from meshwright.models.dropout import Place
from meshwright.models.loss import cross_entropy_sum
from meshwright.models.norms import make_norm
from meshwright.models.tensor_parallel import SINGLE, Linear, TensorParallel, copy_to_ranks
from meshwright.spec.model import ClassifierLayer, HeadLayer


class Head(nn.Module):
    """The last norm and the projection to the vocabulary, which is split over tensor-parallel ranks."""

    def __init__(self, spec: HeadLayer) -> None:
        super().__init__()
        self.spec = spec
        self.tp: TensorParallel = SINGLE
        self.transform = Linear(spec.hidden_size, spec.hidden_size, bias=True) if spec.transform else None
        self.norm = make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.output = Linear(spec.hidden_size, spec.padded_vocab_size, bias=spec.bias)

    def forward(self, x: Tensor, targets: Tensor, *, at: Place | None = None) -> Tensor:
        """Return the fp32 sum of the cross-entropy of `targets` [B, T], of which -100 counts nothing."""
        logits = self.logits(x)
        return cross_entropy_sum(logits.flatten(0, 1), targets.flatten(), self.spec.vocab_size, self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the logits [B, T, padded vocabulary / tp] of `x` [B, T, H]."""
        if self.transform is not None and self.spec.transform is not None:
            x = activate(self.transform(x), self.spec.transform)
        x = self.norm(x)
        if self.spec.logit_scale != 1.0:
            x = x * self.spec.logit_scale
        return self.output(copy_to_ranks(x, self.tp))


class Classifier(nn.Module):
    """The last norm, one vector a sample, and the projection to classes. Every tensor-parallel rank does all of it."""

    def __init__(self, spec: ClassifierLayer) -> None:
        super().__init__()
        self.spec = spec
        self.norm = None if spec.norm is None else make_norm(spec.norm, spec.hidden_size, spec.norm_eps)
        self.pooler = Linear(spec.hidden_size, spec.hidden_size, bias=True) if spec.pooler else None
        self.output = Linear(spec.hidden_size, spec.num_classes, bias=True)

    def forward(self, x: Tensor, targets: Tensor, *, at: Place | None = None) -> Tensor:
        """Return the fp32 sum of the cross-entropy of `targets` [B], of which -100 counts nothing."""
        return cross_entropy_sum(self.logits(x), targets, self.spec.num_classes, SINGLE)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, classes] of `x` [B, T, H]."""
        if self.norm is not None:
            x = self.norm(x)
        # A copy of the first tokens: a view would keep all of them for backward.
        pooled = x[:, 0].clone() if self.spec.pooling == "first" else x.mean(1)
        if self.pooler is not None:
            pooled = torch.tanh(self.pooler(pooled))
        return self.output(pooled)
