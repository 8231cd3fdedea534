"""What several families share: the embedding of square images, and layers as groups."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from meshwright.spec.base import LONGEST_SEQ
from meshwright.spec.families.config import Config
from meshwright.spec.model import AnyLayer, LayerGroup, PatchEmbeddingLayer
from meshwright.spec.parts import LARGEST_SIZE, Norm

_COLOURS = 3  # the default of num_channels


def patch_embedding(
    config: Config, hidden_size: int, *, class_token: bool = False, positions: bool = False, norm: Norm | None = None
) -> PatchEmbeddingLayer:
    """Return the layer that embeds the images of `config`, which are square and a whole number of patches wide."""
    image, patch = config.side("image_size"), config.side("patch_size")
    grid = config.divisible("image_size", image, "patch_size", patch)
    if grid**2 >= LONGEST_SEQ:
        raise config.error("image_size", f"{grid} x {grid} patches are more than the {LONGEST_SEQ} that can be planned")
    channels = config.count("num_channels", _COLOURS)
    if channels * patch**2 > LARGEST_SIZE:
        raise config.error("patch_size", f"a patch has {channels * patch**2} colours; at most {LARGEST_SIZE}")
    return PatchEmbeddingLayer(
        hidden_size=hidden_size,
        image_size=image,
        patch_size=patch,
        num_channels=channels,
        class_token=class_token,
        positions=positions,
        norm=norm,
    )


def groups_of(layers: Iterable[AnyLayer]) -> tuple[LayerGroup, ...]:
    """Return `layers` with equal neighbours counted together."""
    runs = ((layer, sum(1 for _ in run)) for layer, run in groupby(layers))
    return tuple(LayerGroup(num_layers=count, layer=layer) for layer, count in runs)
