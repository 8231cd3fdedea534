"""The layers of one pipeline stage on this rank, with the re-layouts between them."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.dropout import Place
from meshwright.runtime.groups import World
from meshwright.runtime.relayout import Relayout
from meshwright.spec.mesh import Layout, MeshShape


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
        samples = world.plan.micro_batch_samples
        meshes = {index: MeshShape.of(world.plan.strategies[index]) for index in layers}
        self.first_samples = {
            index: mesh.dp_index(world.local_rank) * (samples // mesh.dp) for index, mesh in meshes.items()
        }
        self.loss_layer = str(len(layouts) - 1)  # only on the last stage

    def forward(self, *tensors: Tensor, targets: Tensor | None = None, at: Place | None = None) -> tuple[Tensor, ...]:
        """Return what the last layer hands on; for the last stage a single tensor, the summed loss.

        `at` is the place of the micro-batch, for layers to drop hidden states; None drops nothing.
        """
        for name, layer in self.layers.items():
            relayout = self.relayouts.get(int(name))
            if relayout is not None:
                tensors = relayout(*tensors)
            here = {} if at is None else {"at": self._in_layer(at, int(name))}
            out = layer(*tensors, targets, **here) if name == self.loss_layer else layer(*tensors, **here)
            tensors = out if isinstance(out, tuple) else (out,)
        return tensors

    def _in_layer(self, at: Place, index: int) -> Place:
        return at._replace(layer=index, first_sample=at.first_sample + self.first_samples[index])
