"""The layers of one pipeline stage on this rank, with the re-layouts between them."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.runtime.groups import World
from meshwright.runtime.relayout import Relayout
from meshwright.spec.mesh import Layout


class Stage(nn.Module):
    """Layers `first` .. of the model, keyed by their index in the model so that names are the same under every plan.

    A re-layout stands before a layer whose layout differs from its predecessor's, also at the start of a
    stage: the sender of a border keeps its layout, the receiver changes it.
    """

    def __init__(self, layers: dict[int, nn.Module], world: World) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        layouts = [Layout.of(strategy) for strategy in world.plan.strategies]
        self.relayouts = {
            index: Relayout(layouts[index - 1], layouts[index], world)
            for index in layers
            if index > 0 and layouts[index - 1] != layouts[index]
        }
        self.loss_layer = str(len(layouts) - 1)  # only on the last stage

    def forward(self, *tensors: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what the last layer hands on; for the last stage a single tensor, the summed loss."""
        for name, layer in self.layers.items():
            relayout = self.relayouts.get(int(name))
            if relayout is not None:
                tensors = relayout(*tensors)
            out = layer(*tensors, targets) if name == self.loss_layer else layer(*tensors)
            tensors = out if isinstance(out, tuple) else (out,)
        return tensors
