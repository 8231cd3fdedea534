"""Our parameters and the tensors of Hugging Face checkpoints: which is which, and how one is made of the other.

`checkpoint_tensors` lists, for a model, the tensors of a checkpoint as transformers 5 writes it; each says which of
our parameters it holds and converts both ways, so that a checkpoint can be read and written tensor by tensor.
`names_in_file` finds them under the other names that published files have: those of other versions and of modules,
without the base model's prefix, or duplicates that tied weights leave.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.errors import UserError
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
from meshwright.spec.parameters import ParameterSpec, layer_parameters

_MOST_SHOWN = 3
# What the heads of transformers' classes for other tasks are called.
_HEADS = ("classifier.", "cls.", "lm_head.", "qa_outputs.", "score.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """A tensor of a checkpoint. It holds our parameters `ours` side by side along their first dimension.

    `rows` of each of ours are in the checkpoint, which pads no vocabulary. `is_transposed`: inputs come first.
    `copies`: names under which it is written again.
    """

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    our_shapes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    is_transposed: bool = False
    copies: tuple[str, ...] = ()

    def to_ours(self, theirs: Tensor) -> tuple[Tensor, ...]:
        """Return our whole parameters, in the order of `ours`; rows of padding are zero. They may be views."""
        if tuple(theirs.shape) != self.shape:
            raise UserError(f"{self.name}: has shape {tuple(theirs.shape)}, but the model's is {self.shape}")
        whole = theirs.T if self.is_transposed else theirs.reshape(sum(self.rows), *self.our_shapes[0][1:])
        parts = whole.split(self.rows)
        return tuple(_padded(part, shape[0]) for part, shape in zip(parts, self.our_shapes, strict=True))

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the checkpoint's tensor, of our whole parameters in the order of `ours`."""
        parts = [whole[:rows] for whole, rows in zip(ours, self.rows, strict=True)]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        return (joined.T if self.is_transposed else joined.reshape(self.shape)).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Names of a family: of our modules (or parameters, where those differ) in a layer of each kind, theirs.

    `{}` stands for the number of the block in its stack, and in Swin for those of the stage and of the block in it.
    A key with a condition before it ("gated:", "untied:") goes before the plain one where that holds.
    `other_names`: patterns of what published files call a tensor, and what it is called here. `unused`: patterns of
    what files hold besides: constants, and heads of other tasks.
    """

    first: Mapping[str, str]
    block: Mapping[str, str]
    head: Mapping[str, str]
    classifier: Mapping[str, str] = field(default_factory=dict)
    decoder: Mapping[str, str] = field(default_factory=dict)
    merge: Mapping[str, str] = field(default_factory=dict)
    other_names: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    inputs_first: bool = False

    def of_layer(self, layer: LayerSpec) -> Mapping[str, str]:
        match layer:
            case EmbeddingLayer() | PatchEmbeddingLayer():
                return self.first
            case BlockLayer():
                return self.block if layer.cross_attention is None else self.decoder
            case CustomLayer():
                return {}
            case MergeLayer():
                return self.merge
            case HeadLayer():
                return self.head
            case ClassifierLayer():
                return self.classifier


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {ours: f"{prefix}.{theirs}" for ours, theirs in names.items()}


_LLAMA = _Family(
    first={"token": "model.embed_tokens"},
    block=_under(
        "model.layers.{}",
        {
            "norm1": "input_layernorm",
            **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
            "attention.out": "self_attn.o_proj",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "norm2": "post_attention_layernorm",
            **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
    head={"norm": "model.norm", "output": "lm_head"},
    other_names=((r"^(embed_tokens|layers|norm)\.", r"model.\1."),),
    unused=(r"rotary_emb\.inv_freq$",),
)
_GPT2 = _Family(
    first={"token": "transformer.wte", "position": "transformer.wpe"},
    block=_under(
        "transformer.h.{}",
        {
            "norm1": "ln_1",
            **{f"attention.{part}": "attn.c_attn" for part in "qkv"},
            "attention.out": "attn.c_proj",
            "norm2": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
    ),
    head={"norm": "transformer.ln_f", "output": "lm_head"},
    other_names=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    unused=(r"\.attn\.(bias|masked_bias)$",),
    inputs_first=True,
)
# Norms, attention and feed-forward part of an encoder's block as BERT named them.
_ENCODER = {
    "attention.out": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_QUERY_KEY_VALUE = (("q", "query"), ("k", "key"), ("v", "value"))
_BERT = _Family(
    first=_under(
        "bert.embeddings",
        {
            "token": "word_embeddings",
            "position": "position_embeddings",
            "token_type": "token_type_embeddings",
            "norm": "LayerNorm",
        },
    ),
    block=_under(
        "bert.encoder.layer.{}",
        {
            **_ENCODER,
            **{f"attention.{ours}": f"attention.self.{theirs}" for ours, theirs in _QUERY_KEY_VALUE},
            "norm1": "attention.output.LayerNorm",
            "norm2": "output.LayerNorm",
        },
    ),
    head=_under(
        "cls.predictions",
        {
            "transform": "transform.dense",
            "norm": "transform.LayerNorm",
            "output": "decoder",
            "output.bias": "bias",
            "untied:output.bias": "decoder.bias",
        },
    ),
    classifier={"pooler": "bert.pooler.dense", "output": "classifier"},
    other_names=(
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"^(embeddings|encoder|pooler)\.", r"bert.\1."),
        (r"^cls\.predictions\.decoder\.bias$", "cls.predictions.bias"),
        (r"^cls\.predictions\.bias$", "cls.predictions.decoder.bias"),
    ),
    unused=(r"position_ids$", r"^cls\.seq_relationship\.", r"^bert\.pooler\.", r"^cls\.predictions\."),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)
_T5_ATTENTION = {"q": "q", "k": "k", "v": "v", "out": "o", "relative": "relative_attention_bias"}


def _t5_mlp(layer: int) -> dict[str, str]:
    parts = {"mlp.up": "wi", "mlp.gate": "wi_0", "gated:mlp.up": "wi_1", "mlp.down": "wo"}
    return {"norm2": f"layer.{layer}.layer_norm", **_under(f"layer.{layer}.DenseReluDense", parts)}


_T5_SELF = {
    "norm1": "layer.0.layer_norm",
    **{f"attention.{ours}": f"layer.0.SelfAttention.{theirs}" for ours, theirs in _T5_ATTENTION.items()},
}
_T5 = _Family(
    first={"token": "shared"},
    block={
        **_under("encoder.block.{}", {**_T5_SELF, **_t5_mlp(1)}),
        "closing_norm": "encoder.final_layer_norm",
    },
    decoder=_under(
        "decoder.block.{}",
        {
            **_T5_SELF,
            "cross_norm": "layer.1.layer_norm",
            **{
                f"cross_attention.{ours}": f"layer.1.EncDecAttention.{theirs}" for ours, theirs in _T5_ATTENTION.items()
            },
            **_t5_mlp(2),
        },
    ),
    head={"norm": "decoder.final_layer_norm", "output": "lm_head"},
    other_names=((r"^(encoder|decoder)\.embed_tokens\.", "shared."),),
    unused=(r"EncDecAttention\.relative_attention_bias\.weight$",),
)
# How the modules of ViT and Swin are named since transformers 5, which still writes the older names.
_MODULES = (
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
_IMAGE_BLOCK = {**_ENCODER, "norm1": "layernorm_before", "norm2": "layernorm_after"}
_VIT = _Family(
    first=_under(
        "vit.embeddings",
        {
            "projection": "patch_embeddings.projection",
            "class_token": "cls_token",
            "position.weight": "position_embeddings",
        },
    ),
    block=_under(
        "vit.encoder.layer.{}",
        {
            **_IMAGE_BLOCK,
            **{f"attention.{ours}": f"attention.attention.{theirs}" for ours, theirs in _QUERY_KEY_VALUE},
        },
    ),
    head={},
    classifier={"norm": "vit.layernorm", "output": "classifier"},
    other_names=(
        (r"^(embeddings|encoder|layers|layernorm)\.", r"vit.\1."),
        (r"^vit\.layers\.", "vit.encoder.layer."),
        *((rf"\.attention\.{ours}_proj\.", f".attention.attention.{theirs}.") for ours, theirs in _QUERY_KEY_VALUE),
        *_MODULES,
    ),
    unused=(r"^vit\.pooler\.", r"^vit\.embeddings\.mask_token$"),
)
_SWIN = _Family(
    first=_under("swin.embeddings", {"projection": "patch_embeddings.projection", "norm": "norm"}),
    block=_under(
        "swin.encoder.layers.{}.blocks.{}",
        {
            **_IMAGE_BLOCK,
            **{f"attention.{ours}": f"attention.self.{theirs}" for ours, theirs in _QUERY_KEY_VALUE},
            "attention.relative.weight": "attention.self.relative_position_bias_table",
        },
    ),
    merge=_under("swin.encoder.layers.{}.downsample", {"norm": "norm", "reduction": "reduction"}),
    head={},
    classifier={"norm": "swin.layernorm", "output": "classifier"},
    other_names=(
        (r"^(embeddings|encoder|layernorm)\.", r"swin.\1."),
        *((rf"\.attention\.{ours}_proj\.", f".attention.self.{theirs}.") for ours, theirs in _QUERY_KEY_VALUE),
        (r"\.attention\.relative_position_bias\.", ".attention.self."),
        *_MODULES,
    ),
    unused=(r"relative_position_index$", r"^swin\.embeddings\.mask_token$"),
)
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "gpt2": _GPT2,
    "bert": _BERT,
    "t5": _T5,
    "vit": _VIT,
    "swin": _SWIN,
}


def checkpoint_tensors(model: ModelSpec) -> tuple[CheckpointTensor, ...]:
    """Return the tensors of a checkpoint of `model`, in the order of our layers. A tied weight is one of them."""
    family = _family(model)
    found: dict[str, list[tuple[LayerSpec, ParameterSpec, str]]] = {}
    for index, (layer, place) in enumerate(_places(model)):
        for parameter in layer_parameters(layer):
            if model.tied_embedding and isinstance(layer, HeadLayer) and parameter.name == "output.weight":
                continue
            name = _their_name(family, model, layer, parameter.name).format(*place)
            found.setdefault(name, []).append((layer, parameter, f"layers.{index}.{parameter.name}"))
    return tuple(_tensor(family, name, parts) for name, parts in found.items())


def names_in_file(model: ModelSpec, names: Iterable[str], *, new_head: bool = False, where: str = "") -> dict[str, str]:
    """Return what each of the `checkpoint_tensors` (by name) is called among the `names` of a file's tensors.

    Where a file has one twice, the name that transformers writes goes first. With `new_head` tensors of a head
    (`is_of_head`) may be missing, and those of another head be there. `where` begins an error line.
    """
    family = _family(model)
    tensors = {tensor.name: tensor for tensor in checkpoint_tensors(model)}
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        known = name if name in tensors else _known_as(name, family, model, tensors)
        if known is None:
            unknown.append(name)
        elif known and (known not in found or name == known):
            found[known] = name
    missing = [name for name in tensors if name not in found]
    in_head = [name for name in missing if is_of_head(name)]
    if new_head:
        missing = [name for name in missing if name not in in_head]
        unknown = [name for name in unknown if not name.startswith(_HEADS)]
    what = "is missing"
    if missing == in_head and not unknown:
        what += "; --new-head begins with a new head where the file has none"
    for problem, which in ((what, missing), ("is not a tensor of this model", unknown)):
        if which:
            more = f" and {len(which) - _MOST_SHOWN} more" if len(which) > _MOST_SHOWN else ""
            shown = f"{', '.join(sorted(which)[:_MOST_SHOWN])}{more}"
            raise UserError(f"{where or f'checkpoint of {model.name}'}: {shown}: {problem}")
    return found


def is_of_head(name: str) -> bool:
    """Return whether a checkpoint's tensor `name` belongs to a task and not to the body, which ends with a norm."""
    return name.startswith((*_HEADS, "bert.pooler."))


def _family(model: ModelSpec) -> _Family:
    family = _FAMILIES.get(model.family)
    if family is None:
        raise UserError(f"{model.name}: no checkpoint names are known of family {model.family!r}")
    return family


def _places(model: ModelSpec) -> Iterator[tuple[LayerSpec, tuple[int, ...]]]:
    """Yield every layer with its numbers: (block in its stack,), in Swin (stage, block in it); of a merge (stage,)."""
    stage = number = 0
    was_encoder = False
    for layer in model.layers:
        if isinstance(layer, BlockLayer):
            if was_encoder and layer.cross_attention is not None:
                number = 0
            was_encoder = layer.cross_attention is None
            yield layer, (stage, number) if model.family == "swin" else (number,)
            number += 1
        else:
            yield layer, (stage,)
            if isinstance(layer, MergeLayer):
                stage, number = stage + 1, 0


def _their_name(family: _Family, model: ModelSpec, layer: LayerSpec, name: str) -> str:
    """Return the pattern of the name of a layer's parameter `name`."""
    names, (module, _, leaf) = family.of_layer(layer), name.rpartition(".")
    conditions = ["untied:"] if isinstance(layer, HeadLayer) and not model.tied_embedding else []
    if isinstance(layer, BlockLayer) and layer.mlp.gated:
        conditions.append("gated:")
    for condition in (*conditions, ""):
        if (whole := names.get(condition + name)) is not None:
            return whole
        if (owner := names.get(condition + module)) is not None:
            return f"{owner}.{leaf}"
    raise UserError(f"{model.name}: {layer.kind}.{name} has no place in a checkpoint of family {model.family!r}")


def _tensor(family: _Family, name: str, parts: list[tuple[LayerSpec, ParameterSpec, str]]) -> CheckpointTensor:
    layer, first, _ = parts[0]
    shapes = tuple(parameter.shape for _, parameter, _ in parts)
    rows = tuple(_rows(layer, parameter) for _, parameter, _ in parts)
    is_transposed = family.inputs_first and isinstance(layer, BlockLayer) and first.is_product
    whole = (sum(rows), *first.shape[1:])
    return CheckpointTensor(
        name=name,
        shape=whole[::-1] if is_transposed else _their_shape(layer, first, whole),
        ours=tuple(ours for _, _, ours in parts),
        our_shapes=shapes,
        rows=rows,
        is_transposed=is_transposed,
        copies=(family.copies[name],) if name in family.copies else (),
    )


def _rows(layer: LayerSpec, parameter: ParameterSpec) -> int:
    if isinstance(layer, EmbeddingLayer) and parameter.name == "token.weight":
        return layer.vocab_size
    if isinstance(layer, HeadLayer) and parameter.name.startswith("output."):
        return layer.vocab_size
    return parameter.shape[0]


def _their_shape(layer: LayerSpec, parameter: ParameterSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in a checkpoint: there, patches are projected by a convolution, and positions have a batch."""
    if not isinstance(layer, PatchEmbeddingLayer):
        return shape
    match parameter.name:
        case "projection.weight":
            return (layer.hidden_size, layer.num_channels, layer.patch_size, layer.patch_size)
        case "class_token":
            return (1, 1, *shape)
        case "position.weight":
            return (1, *shape)
        case _:
            return shape


def _known_as(name: str, family: _Family, model: ModelSpec, wanted: Collection[str]) -> str | None:
    """Return what a file's tensor `name` is called here; "" for one that is not needed, None for an unknown one."""
    if model.tied_embedding and re.fullmatch(_tied_output(family), name):
        return f"{family.first['token']}.weight"
    for pattern, here in family.other_names:
        name = re.sub(pattern, here, name)
        if name in wanted:
            return name
    return "" if any(re.search(pattern, name) for pattern in family.unused) else None


def _tied_output(family: _Family) -> str:
    return re.escape(f"{family.head['output']}.weight")


def _padded(part: Tensor, num_rows: int) -> Tensor:
    if len(part) == num_rows:
        return part
    padded = part.new_zeros(num_rows, *part.shape[1:])
    padded[: len(part)] = part
    return padded
