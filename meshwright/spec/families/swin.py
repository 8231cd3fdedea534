"""Swin: attention inside windows of an image's patches, in stages between which neighbours are merged.

Dropout fields, and among them drop_path_rate, are not read: dropout belongs to the job.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.families.config import Config
from meshwright.spec.families.layers import groups_of, patch_embedding
from meshwright.spec.model import (
    MOST_LAYERS,
    AnyLayer,
    BlockLayer,
    ClassifierLayer,
    MergeLayer,
    ModelSpec,
)
from meshwright.spec.parts import LARGEST_SIZE, AttentionSpec, WindowsSpec

_EPS = 1e-5  # the default of layer_norm_eps; norms of the embedding and of merging have it whatever the file says
_MLP_RATIO = 4.0  # the default of mlp_ratio
_ARCHITECTURES = {"SwinModel": "classes", "SwinForImageClassification": "classes"}


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a Swin `config` describes."""
    config.architecture(_ARCHITECTURES, "classes")
    config.refuse_unless("use_absolute_embeddings", [False], "learned positions")
    embedding = patch_embedding(config, config.count("embed_dim"), norm="layernorm")
    blocks = list(_stages(config, embedding.hidden_size, embedding.image_size // embedding.patch_size))
    last = blocks[-1]
    assert isinstance(last, BlockLayer)  # noqa: S101 no stage is empty
    head = ClassifierLayer(
        hidden_size=last.hidden_size,
        num_classes=config.num_classes(),
        pooling="mean",
        norm="layernorm",
        norm_eps=last.norm_eps,
        length=last.length,
    )
    return ModelSpec(
        name=name,
        family="swin",
        groups=groups_of([embedding, *blocks, head]),
        usual_seq_len=embedding.num_tokens,
    )


def _stages(config: Config, hidden: int, grid: int) -> Iterator[AnyLayer]:
    """Yield the blocks of all stages and the layers that merge patches between them."""
    for stage, (depth, heads, size) in enumerate(_shapes(config, grid)):
        if stage:
            yield MergeLayer(hidden_size=hidden, grid=2 * size)
            hidden *= 2
        shifted = config.count("window_size") // 2 if size > config.count("window_size") else 0
        for index in range(depth):
            yield _block(config, hidden, heads, size, shift=shifted if index % 2 else 0)


def _shapes(config: Config, grid: int) -> list[tuple[int, int, int]]:
    """Return (blocks, heads, side of the grid) of every stage."""
    depths, heads = config.counts("depths", most=MOST_LAYERS), config.counts("num_heads")
    if len(depths) != len(heads):
        raise config.error("num_heads", f"{len(heads)} entries, but depths has {len(depths)} stages")
    window, grids = config.count("window_size"), [grid]
    for stage in range(1, len(depths)):
        if grids[-1] % 2:
            raise config.error("depths", f"no stage can follow stage {stage}, whose grid has an odd side, {grids[-1]}")
        grids.append(grids[-1] // 2)
    for stage, size in enumerate(grids, start=1):
        if size % window:
            raise config.error("window_size", f"{window} does not divide the grid of stage {stage} ({size} x {size})")
    return list(zip(depths, heads, grids, strict=True))


def _block(config: Config, hidden: int, heads: int, grid: int, *, shift: int) -> BlockLayer:
    ratio = config.number("mlp_ratio", _MLP_RATIO)
    ffn_size = int(ratio * hidden)
    if not 1 <= ffn_size <= LARGEST_SIZE:
        raise config.error(
            "mlp_ratio", f"{ratio:g} makes {ffn_size:g} of {hidden}; from 1 to {LARGEST_SIZE} is allowed"
        )
    return BlockLayer(
        hidden_size=hidden,
        norm="layernorm",
        norm_eps=config.number("layer_norm_eps", _EPS),
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=config.divisible("hidden size", hidden, "num_heads", heads),
            bias=config.flag("qkv_bias", default=True),
            output_bias=True,
            causal=False,
            windows=WindowsSpec(size=config.count("window_size"), grid=grid, shift=shift),
        ),
        mlp=config.mlp(ffn_size, "hidden_act", default_act="gelu", gated=False, bias=True),
        length=grid**2,
    )
