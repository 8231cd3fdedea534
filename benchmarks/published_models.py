"""The model of a published record as a ModelSpec: sizes from its fields, shape of a layer from its `arch` text.

What the fields leave open and a family decides is noted in `assumed`; what they leave open and nothing
decides is a `MissingField`, and the record is skipped with that reason.

Families: gpt (layer norms, biases, learned positions, gelu), MPT (gpt without biases), bert (as gpt),
llama (rms norms, rotary, gated silu, no biases); mixtures of experts are llama blocks with experts.
Latent attention has DeepSeek's public head sizes (arXiv 2405.04434 and 2412.19437: 128 unrotated and 64 rotated
dimensions of queries and keys, values of 128).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.spec.model import (
    BlockLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerGroup,
    ModelSpec,
)
from meshwright.spec.parts import AttentionSpec, ExpertsSpec, LatentSpec, MlpSpec

MEGATRON_VOCAB_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by, times tp
_LATENT_NOPE, _LATENT_ROPE, _LATENT_VALUE = 128, 64, 128
_EPS = 1e-5
# The tokenizer that a family comes with, where a record does not say: GPT-2's, BERT's uncased, Llama 2's.
_VOCABULARIES = {"gpt": 50257, "bert": 30522, "llama": 32000}


class MissingField(Exception):
    """A field without which a record cannot be priced; the text names it."""


@dataclass(frozen=True)
class Family:
    """What the `arch` text (and `model.extra`) of a record says about the shape of a layer."""

    name: str  # gpt, bert or llama
    bias: bool
    gated: bool
    rotary: bool
    rms_norm: bool


def model_of(record: Mapping[str, Any], *, vocab_multiple: int, assumed: list[str]) -> ModelSpec:
    """Return the model of `record`, its vocabulary padded to a multiple of `vocab_multiple`."""
    sizes = record["model"]
    family = family_of(record, assumed)
    hidden, num_layers = need(sizes, "model", "hidden"), need(sizes, "model", "layers")
    vocab = vocabulary_of(sizes, family, assumed)
    padded = -(-vocab // vocab_multiple) * vocab_multiple
    norm = "rmsnorm" if family.rms_norm else "layernorm"
    positions = 0 if family.rotary else need(sizes, "model", "seq")
    tied = sizes.get("tied_embeddings")
    if tied is None:
        # Galvatron builds separate modules for embedding and head; the states that it prints hold both.
        is_apart = "galvatron" in str(record["source"].get("repo")).lower()
        tied = family.name != "llama" and not sizes.get("n_experts") and not is_apart
        assumed.append(f"{'tied' if tied else 'untied'} embeddings")
    embedding = EmbeddingLayer(hidden_size=hidden, vocab_size=vocab, padded_vocab_size=padded, max_positions=positions)
    head = HeadLayer(hidden_size=hidden, vocab_size=vocab, padded_vocab_size=padded, norm=norm, norm_eps=_EPS)
    return ModelSpec(
        name=str(sizes.get("name") or "unnamed"),
        family=family.name,
        groups=(
            LayerGroup(num_layers=1, layer=embedding),
            *_block_groups(sizes, family, num_layers, assumed),
            LayerGroup(num_layers=1, layer=head),
        ),
        tied_embedding=tied,
    )


def family_of(record: Mapping[str, Any], assumed: list[str]) -> Family:
    """Return the family that `model.arch` and `model.extra` name."""
    sizes = record["model"]
    arch, extra = str(sizes.get("arch") or "").lower(), extras(sizes)
    if not arch:
        raise MissingField("model.arch")
    text = " ".join((arch, *(f"{key}={value}" for key, value in extra.items()))).lower()
    gated = bool(re.search(r"swiglu=true|geglu|gated", text))
    rope = bool(re.search(r"embedding-type=rope|rotary|neox", text))
    if arch.startswith("bert"):
        return Family("bert", bias=True, gated=False, rotary=False, rms_norm=False)
    if re.match(r"(gpt(?!.?oss)|opt|bloom)", arch):
        bias = "no bias" not in text
        return Family("gpt", bias=bias, gated=gated, rotary=rope, rms_norm="rmsnorm" in text)
    if "moe" in arch and extra.keys() & {"swiglu", "normalization", "position-embedding-type"}:
        return Family("llama", bias=False, gated=gated, rotary=rope, rms_norm="rmsnorm" in text)
    if re.match(r"llama|moe|qwen|mistral|mixtral|deepseek|internlm|gemma|phi|gpt.?oss", arch):
        if not arch.startswith("llama"):
            assumed.append(f"arch {arch!r} as llama blocks")
        return Family("llama", bias=False, gated=True, rotary=True, rms_norm=True)
    raise MissingField(f"model.arch ({arch} is not a decoder that can be described)")


def vocabulary_of(sizes: Mapping[str, Any], family: Family, assumed: list[str]) -> int:
    """Return the vocabulary, unpadded unless the source prints it padded."""
    vocab = sizes.get("vocab")
    if vocab is None:
        vocab = _VOCABULARIES[family.name]
        assumed.append(f"vocabulary {vocab}")
    return int(vocab)


def extras(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `model.extra` when it is a mapping."""
    extra = sizes.get("extra")
    return extra if isinstance(extra, Mapping) else {}


def need(fields: Mapping[str, Any], where: str, name: str) -> int:
    """Return the whole number `name` of `fields`, or raise MissingField."""
    value = fields.get(name)
    if value is None:
        raise MissingField(f"{where}.{name}")
    return int(value)


def _block_groups(
    sizes: Mapping[str, Any], family: Family, num_layers: int, assumed: list[str]
) -> tuple[LayerGroup, ...]:
    attention = _attention(sizes, family)
    hidden = need(sizes, "model", "hidden")
    ffn = sizes.get("ffn")
    if ffn is None and family.name != "llama":
        ffn = 4 * hidden
        assumed.append("ffn 4h")
    norm = "rmsnorm" if family.rms_norm else "layernorm"

    def group(count: int, ffn_size: int, experts: ExpertsSpec | None) -> LayerGroup:
        mlp = MlpSpec(
            ffn_size=ffn_size,
            gated=family.gated,
            activation="silu" if family.gated and family.name == "llama" else "gelu",
            bias=family.bias,
            experts=experts,
        )
        block = BlockLayer(hidden_size=hidden, norm=norm, norm_eps=_EPS, attention=attention, mlp=mlp)
        return LayerGroup(num_layers=count, layer=block)

    if not sizes.get("n_experts"):
        return (group(num_layers, int(ffn) if ffn else need(sizes, "model", "ffn"), None),)
    num_dense = _dense_layers(sizes)
    expert_ffn = int(sizes.get("moe_ffn") or need(sizes, "model", "ffn"))
    sparse = group(num_layers - num_dense, expert_ffn, _experts(sizes, expert_ffn, assumed))
    return (group(num_dense, need(sizes, "model", "ffn"), None), sparse) if num_dense else (sparse,)


def _experts(sizes: Mapping[str, Any], expert_ffn: int, assumed: list[str]) -> ExpertsSpec:
    extra = extras(sizes)
    shared = extra.get("shared_expert_ffn", extra.get("moe-shared-expert-intermediate-size"))
    if shared is None:
        has_shared = "shared" in str(sizes.get("arch"))
        shared = expert_ffn if has_shared else 0
        assumed.append(f"{'a shared expert like the routed ones' if has_shared else 'no shared expert'}")
    return ExpertsSpec(
        num_experts=need(sizes, "model", "n_experts"),
        top_k=need(sizes, "model", "topk"),
        shared_ffn_size=int(shared),
    )


def _dense_layers(sizes: Mapping[str, Any]) -> int:
    """Return how many blocks at the front have no experts: `dense_layers`, or Megatron's "([0]*3+[1]*11)"."""
    extra = extras(sizes)
    if "dense_layers" in extra:
        return int(extra["dense_layers"])
    found = re.search(r"\[0\]\*(\d+)", str(extra.get("moe-layer-freq", "")))
    return int(found.group(1)) if found else 0


def _attention(sizes: Mapping[str, Any], family: Family) -> AttentionSpec:
    extra = extras(sizes)
    heads = need(sizes, "model", "heads")
    kv_rank = extra.get("kv_lora_rank", extra.get("kv-lora-rank"))
    if kv_rank is not None:
        latent = LatentSpec(
            query_rank=int(extra.get("q_lora_rank", extra.get("q-lora-rank", 0)) or 0),
            kv_rank=int(kv_rank),
            rope_size=_LATENT_ROPE,
            value_size=_LATENT_VALUE,
        )
        return AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=_LATENT_NOPE + _LATENT_ROPE,
            rotary=True,
            latent=latent,
        )
    hidden = need(sizes, "model", "hidden")
    head_size = extra.get("kv-channels") or extra.get("head_dim")
    if head_size is None and hidden % heads:
        raise MissingField(f"model.extra.head_dim (hidden {hidden} is no multiple of {heads} heads)")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=int(sizes.get("kv_heads") or heads),
        head_size=int(head_size or hidden // heads),
        bias=family.bias,
        output_bias=family.bias,
        qk_norm="qwen3" in str(sizes.get("arch")).lower() or "qwen3" in str(sizes.get("name")).lower(),
        rotary=family.rotary,
    )
