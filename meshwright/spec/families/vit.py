"""ViT: pre-norm blocks over the patches of an image and a class token, which is classified.

Dropout fields are not read: dropout belongs to the job.
"""

from __future__ import annotations

from meshwright.spec.families.config import Config
from meshwright.spec.families.layers import groups_of, patch_embedding
from meshwright.spec.model import MOST_LAYERS, BlockLayer, ClassifierLayer, ModelSpec
from meshwright.spec.parts import AttentionSpec

_EPS = 1e-12  # the default of layer_norm_eps
_ARCHITECTURES = {"ViTModel": "classes", "ViTForImageClassification": "classes"}


def read(config: Config, name: str) -> ModelSpec:
    """Return the model that a ViT `config` describes."""
    config.architecture(_ARCHITECTURES, "classes")
    hidden = config.count("hidden_size")
    embedding = patch_embedding(config, hidden, class_token=True, positions=True)
    block = _block(config, hidden, embedding.num_tokens)
    head = ClassifierLayer(
        hidden_size=hidden,
        num_classes=config.num_classes(),
        pooling="first",
        norm="layernorm",
        norm_eps=block.norm_eps,
        length=embedding.num_tokens,
    )
    num_blocks = config.count("num_hidden_layers", most=MOST_LAYERS)
    return ModelSpec(
        name=name,
        family="vit",
        groups=groups_of([embedding, *[block] * num_blocks, head]),
        usual_seq_len=embedding.num_tokens,
    )


def _block(config: Config, hidden: int, num_tokens: int) -> BlockLayer:
    heads = config.count("num_attention_heads")
    head_size = config.divisible("hidden_size", hidden, "num_attention_heads", heads)
    config.refuse_unless("head_dim", [head_size], "heads of another size than hidden_size / num_attention_heads")
    return BlockLayer(
        hidden_size=hidden,
        norm="layernorm",
        norm_eps=config.number("layer_norm_eps", _EPS),
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=head_size,
            bias=config.flag("qkv_bias", default=True),
            output_bias=True,
            causal=False,
        ),
        mlp=config.mlp(config.count("intermediate_size"), "hidden_act", default_act="gelu", gated=False, bias=True),
        length=num_tokens,
    )
