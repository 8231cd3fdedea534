"""Bytes of one sample that autograd keeps of a layer's forward pass, tensor by tensor, on one of `tp` ranks.

For two kernel sets. `cuda_fused`: norms save their input and one or two statistics a row. `cpu_stock`: RMSNorm is
decomposed and saves its input and its normalised input in fp32. Attention is a flash kernel in both (q, k, v, output
and one fp32 statistic per row and head), except where a learned bias is added to the scores: then they are kept, as
q, k, v, output and probabilities. An activation keeps its input, but ReLU its output, which the next product keeps
anyway.

Post-norm blocks keep as much as pre-norm ones: the input of each part, each sum and its statistics. A decoder block
keeps the encoder's states, which its keys and values are made of; blocks of one stage that share a layout share
that tensor (`shared_bytes`), which only a prediction knows: the search counts it in every block. What only passes
through a layer is not kept by it.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.spec.base import dtype_bytes
from meshwright.spec.cluster import Kernels
from meshwright.spec.flops import attention_cores, num_tokens
from meshwright.spec.job import JobSpec
from meshwright.spec.model import (
    BlockLayer,
    ClassifierLayer,
    CustomLayer,
    EmbeddingLayer,
    HeadLayer,
    LayerSpec,
    MergeLayer,
    PatchEmbeddingLayer,
)
from meshwright.spec.parts import AttentionSpec, MlpSpec, Norm

_FP32 = 4
_INT64 = 8


def input_bytes(layer: LayerSpec, job: JobSpec) -> int:
    """Return the bytes of what recomputation keeps: the layer's input (and the loss's targets)."""
    param, tokens = dtype_bytes(job.param_dtype), num_tokens(layer, job.lengths)
    match layer:
        case EmbeddingLayer():
            return tokens * _ids_bytes(layer, 1)
        case PatchEmbeddingLayer():
            return layer.num_patches * layer.patch_elements * param
        case BlockLayer() | CustomLayer():
            return tokens * layer.hidden_size * param + shared_bytes(layer, job)
        case MergeLayer():
            return layer.grid**2 * layer.hidden_size * param
        case HeadLayer():
            return tokens * (layer.hidden_size * param + _INT64)
        case ClassifierLayer():
            return tokens * layer.hidden_size * param + _INT64


def shared_bytes(layer: LayerSpec, job: JobSpec) -> int:
    """Return the bytes of the encoder's states, which all decoder blocks of a stage with one layout keep once."""
    if not isinstance(layer, BlockLayer) or layer.cross_attention is None:
        return 0
    return job.seq_len * layer.hidden_size * dtype_bytes(job.param_dtype)


@lru_cache(maxsize=65536)
def saved_bytes(layer: LayerSpec, tp: int, job: JobSpec, kernels: Kernels) -> int:
    """Return the bytes that autograd saves in `layer`, input included."""
    tokens, param = num_tokens(layer, job.lengths), dtype_bytes(job.param_dtype)
    hidden = layer.hidden_size * param
    match layer:
        case EmbeddingLayer():
            return tokens * (_ids_bytes(layer, tp) + _embedding_norm(layer, job, kernels))
        case PatchEmbeddingLayer():
            return input_bytes(layer, job) + tokens * _embedding_norm(layer, job, kernels)
        case BlockLayer():
            return _block(layer, tp, job, kernels)
        case CustomLayer():
            return tokens * (layer.kept_elements + layer.split_kept_elements // tp) * param
        case MergeLayer():
            norm = _norm(layer.norm, layer.merged_size, 1, job, kernels)
            return tokens * (norm + layer.merged_size * param)
        case HeadLayer():
            norm = _norm(layer.norm, layer.hidden_size, 1, job, kernels) + hidden
            transform = 0 if layer.transform is None else 2 * hidden
            logits = layer.padded_vocab_size // tp * param
            return tokens * (transform + norm + logits + _FP32 + _INT64)
        case ClassifierLayer():
            norm = 0 if layer.norm is None else tokens * _norm(layer.norm, layer.hidden_size, 1, job, kernels)
            pooled = (2 if layer.pooler else 1) * hidden
            return norm + pooled + layer.num_classes * param + _FP32 + _INT64


def working_bytes(layer: LayerSpec, tp: int, job: JobSpec) -> int:
    """Return the bytes of gradients and temporaries inside the layer's backward pass, at its widest."""
    param, tokens = dtype_bytes(job.param_dtype), num_tokens(layer, job.lengths)
    hidden = layer.hidden_size * param
    match layer:
        case EmbeddingLayer() | PatchEmbeddingLayer():
            return 2 * tokens * hidden
        case BlockLayer():
            ffn = layer.mlp.ffn_size // tp
            # Experts have a row for each visit, and its gradient there and back.
            visits = 1 if layer.mlp.experts is None else layer.mlp.experts.top_k
            passed = 3 if layer.mlp.experts is None else 3 + 2 * visits
            mlp = tokens * param * (visits * (3 if layer.mlp.gated else 2) * ffn + passed * layer.hidden_size)
            cores = [
                core.num_queries * param * (2 * core.attention.num_heads // tp * core.num_keys + 3 * layer.hidden_size)
                for core in attention_cores(layer, job.lengths)
                if core.attention.keeps_scores
            ]
            return max(mlp, *cores) if cores else mlp
        case CustomLayer():
            # Gradients of what is kept, one at a time: a third of it beside the hidden states' own.
            return tokens * param * (3 * layer.hidden_size + layer.split_kept_elements // tp // 3)
        case MergeLayer():
            return 3 * tokens * layer.merged_size * param
        case HeadLayer():
            # Probabilities in fp32, and their gradient in the compute dtype.
            return tokens * (layer.padded_vocab_size // tp * (_FP32 + param) + 2 * hidden)
        case ClassifierLayer():
            return 2 * tokens * hidden + layer.num_classes * (_FP32 + param)


def _ids_bytes(layer: EmbeddingLayer, tp: int) -> int:
    """Bytes a token: ids, or, split over the vocabulary, shifted ids and the mask of foreign ones; kinds of tokens."""
    ids = _INT64 if tp == 1 else _INT64 + 1
    return ids + (_INT64 if layer.token_types else 0)


def _embedding_norm(layer: EmbeddingLayer | PatchEmbeddingLayer, job: JobSpec, kernels: Kernels) -> int:
    return 0 if layer.norm is None else _norm(layer.norm, layer.hidden_size, 1, job, kernels)


def _block(layer: BlockLayer, tp: int, job: JobSpec, kernels: Kernels) -> int:
    param, tokens, hidden = dtype_bytes(job.param_dtype), job.lengths.of(layer.length), layer.hidden_size
    norm = _norm(layer.norm, hidden, 1, job, kernels)
    parts = 2 + (layer.cross_attention is not None)
    kept = tokens * (parts * (norm + hidden * param) + norm * layer.closing_norm)
    for attention, num_queries, num_keys in attention_cores(layer, job.lengths):
        of_keys = tokens if attention is layer.attention else num_keys
        kept += _core(attention, tp, num_queries, of_keys, num_keys, job, kernels)
    return kept + tokens * _mlp(layer.mlp, hidden, tp, param) + shared_bytes(layer, job)


def _core(
    attention: AttentionSpec, tp: int, num_queries: int, of_keys: int, num_keys: int, job: JobSpec, kernels: Kernels
) -> int:
    """Bytes of q and output of `num_queries` tokens, k and v of `of_keys`, and statistics or scores of `num_keys` each.

    Keys of a window are those of other queries, so they are no more than the tokens.
    """
    param = dtype_bytes(job.param_dtype)
    heads, kv_heads = attention.num_heads // tp, attention.num_kv_heads // tp
    kept = (2 * heads * num_queries + 2 * kv_heads * of_keys) * attention.head_size * param
    if attention.qk_norm:
        kept += num_queries * _norm("rmsnorm", attention.head_size, heads + kv_heads, job, kernels)
    return kept + num_queries * heads * (num_keys * param if attention.keeps_scores else _FP32)


def _mlp(mlp: MlpSpec, hidden: int, tp: int, param: int) -> int:
    """Bytes a token. Of experts: the router's, permuted inputs and outputs, and each visited one's own.

    The router keeps the scores of all experts, the sum of the chosen ones, and for each visit the expert, the place
    among all visits, the score and the weight.
    """
    ffn_tensors = (4 if mlp.gated else 2) - (mlp.activation == "relu")
    if mlp.experts is None:
        return ffn_tensors * (mlp.ffn_size // tp) * param
    experts = mlp.experts
    routed = experts.top_k * (2 * hidden + ffn_tensors * (mlp.ffn_size // tp)) * param
    shared = ffn_tensors * (experts.shared_ffn_size // tp) * param
    router = (experts.num_experts + 1) * _FP32 + experts.top_k * (2 * _INT64 + _FP32 + param)
    return routed + shared + router


def _norm(norm: Norm, size: int, rows: int, job: JobSpec, kernels: Kernels) -> int:
    """Bytes a token that a norm over `rows` rows of `size` saves: its input and statistics."""
    param = dtype_bytes(job.param_dtype)
    if norm == "rmsnorm" and kernels == "cpu_stock":
        return rows * (2 * size * _FP32 + _FP32)
    statistics = 1 if norm == "rmsnorm" else 2
    statistic_bytes = param if kernels == "cpu_stock" else _FP32
    return rows * (size * param + statistics * statistic_bytes)
