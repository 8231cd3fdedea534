"""Bytes per token that one block or head of a uniform run keeps for its backward pass, on one rank.

Tensor by tensor in 16 bit, hidden size h, local queries q, keys k, values v (heads times their size), inner size f of
the MLP, all of them on one of t tensor-parallel ranks; s = t under sequence parallelism, else 1 (Korthikanti et al.,
arXiv 2205.05198, section 4: 34 sbh + 5 a s^2 b in all of a GPT block with f = 4h, 10 + 24/t with tensor parallelism,
34/t with sequence parallelism):

    norms      input and output of both, 8h/s (24h/s of RMS norms written in eager PyTorch, with fp32 copies); DTensor
               saves the gathered output of sequence-parallel norms, 4h/s + 4h; two dropout masks, 2h/s
    attention  q, k, v and the core's output, 2(q + 2k) + 2q, and 4 a head of log-sum-exps (flash); flash kernels pad
               heads to a multiple of 8, and the output is then copied; unfused: the scores as softmax and as input
               of the next product, 4 a key and head, and 1 for the dropout mask
    latent     (arXiv 2405.04434, section 2.1) inputs and outputs of the norms of both latents, 4 a latent element
    MLP        plain 4f; gated 8f in eager PyTorch, else what the framework's kernels save
    experts    each visited expert's permuted input and output, 4h, and its MLP; shared experts as an MLP

Recomputation keeps the input, 2h/s (full); all but the core's scores (attention); or, of a per-operator policy
(torchtitan), the input, the core's output and every second product of weights (operators), of which the last one's
output is dropped again where the block is compiled, because no backward pass needs it.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.frameworks import Framework, framework
from meshwright.spec.model import BlockLayer
from meshwright.spec.run import RunSpec

_HALF, _FP32, _MASK = 2, 4, 1
_FLASH_HEAD_MULTIPLE = 8
_EAGER_GATED_BYTES = 8  # every operator saves its inputs
_PLAIN_BYTES = 4


class SavedBytes(NamedTuple):
    """Bytes per token that wait for a block's backward pass, by part."""

    norms_bytes: float
    attention_bytes: float
    scores_bytes: float
    mlp_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.norms_bytes + self.attention_bytes + self.scores_bytes + self.mlp_bytes


def saved_bytes(run: RunSpec, layer: BlockLayer) -> SavedBytes:
    """Return what one block keeps where nothing is recomputed."""
    defaults = framework(run.framework)
    return SavedBytes(
        norms_bytes=_norms_bytes(run, layer, defaults),
        attention_bytes=_attention_bytes(run, layer),
        scores_bytes=_scores_bytes(run, layer),
        mlp_bytes=_mlp_bytes(run, layer, defaults),
    )


def input_bytes(run: RunSpec) -> float:
    """Return the bytes per token of hidden states as they go from block to block."""
    return _HALF * run.model.token_embedding.hidden_size / _hidden_ranks(run)


def kept_bytes(run: RunSpec, layer: BlockLayer) -> float:
    """Return what one block keeps on average under the run's recomputation."""
    saved = saved_bytes(run, layer)
    match run.recompute:
        case "none":
            kept = saved.total_bytes
        case "full":
            kept = input_bytes(run)
        case "attention":
            kept = saved.total_bytes - saved.scores_bytes
        case "operators":
            kept = _products_bytes(run, layer)
    every = run.recompute_every
    return (kept + (every - 1) * saved.total_bytes) / every


def recomputed_bytes(run: RunSpec, layer: BlockLayer) -> float:
    """Return what is alive, beside what was kept, once a block has been computed again."""
    saved = saved_bytes(run, layer)
    match run.recompute:
        case "none":
            return 0.0
        case "full":
            return saved.total_bytes - input_bytes(run)
        case "attention":
            return saved.scores_bytes
        case "operators":
            return max(0.0, saved.total_bytes - _products_bytes(run, layer))


def working_bytes(run: RunSpec, layer: BlockLayer) -> float:
    """Return what the backward pass of one block's MLP needs beside what is saved.

    The gradients of its inner tensors, whose saved inputs are freed one product later (2 or 4f), and those of the
    residual stream (2h/s) and, with tensor parallelism, of the product's whole input (2h), which sequence parallelism
    has gathered once more (2h).
    """
    mlp = layer.mlp
    inner = _inner_sizes(run, layer)
    whole = 0 if run.tp == 1 else 2 if run.sequence_parallel else 1
    hidden = _HALF * layer.hidden_size * (1 / _hidden_ranks(run) + whole)
    return (2 if mlp.gated else 1) * _HALF * inner + hidden


def ring_bytes(run: RunSpec, layer: BlockLayer) -> float:
    """Return the keys and values that context parallelism receives beside those in use."""
    _, keys, values = _sizes(run, layer)
    return 2 * _HALF * (keys + values) if run.cp > 1 else 0.0


def head_bytes(run: RunSpec) -> float:
    """Return what the last norm keeps: its input and output, and the gathered output under sequence parallelism."""
    hidden = run.model.language_head.hidden_size
    return 2 * _HALF * hidden / _hidden_ranks(run) + (_HALF * hidden if run.sequence_parallel else 0)


def head_gradient_bytes(run: RunSpec) -> float:
    """Return the gradients of hidden states in the head's backward pass: whole, and scattered."""
    hidden = run.model.language_head.hidden_size
    return _HALF * hidden + (_HALF * hidden / run.tp if run.sequence_parallel else 0)


def _hidden_ranks(run: RunSpec) -> int:
    return run.tp if run.sequence_parallel else 1


def _sizes(run: RunSpec, layer: BlockLayer) -> tuple[float, float, float]:
    """Return the local elements of queries, keys and values."""
    attention, tp = layer.attention, run.tp
    heads = attention.num_heads / tp
    if attention.latent is not None:
        return heads * attention.head_size, heads * attention.head_size, heads * attention.latent.value_size
    keys = max(attention.num_kv_heads / tp, 1) * attention.head_size
    return heads * attention.head_size, keys, keys


def _norms_bytes(run: RunSpec, layer: BlockLayer, defaults: Framework) -> float:
    hidden, ranks = layer.hidden_size, _hidden_ranks(run)
    masks = 2 * _MASK * hidden / ranks if run.dropout else 0.0
    if run.software.operators == "eager" and layer.norm == "rmsnorm":
        return 2 * defaults.eager_rmsnorm_bytes * hidden / ranks + masks
    output_ranks = 1 if defaults.saves_gathered else ranks
    return 2 * _HALF * hidden * (1 / ranks + 1 / output_ranks) + masks


def _attention_bytes(run: RunSpec, layer: BlockLayer) -> float:
    attention = layer.attention
    queries, keys, values = _sizes(run, layer)
    output = values if attention.latent else queries
    core = _HALF * (queries + keys + values + output)
    size = attention.head_size
    if run.software.attention != "unfused":
        padded = -(-size // _FLASH_HEAD_MULTIPLE) * _FLASH_HEAD_MULTIPLE
        if padded != size:
            core = core * padded / size + _HALF * output
        core += _FP32 * attention.num_heads / run.tp
    if attention.qk_norm:
        core += _HALF * (queries + keys)
    if attention.latent is not None:
        core += 2 * _HALF * (attention.latent.query_rank + attention.latent.kv_rank)
    return core


def _scores_bytes(run: RunSpec, layer: BlockLayer) -> float:
    if run.software.attention != "unfused":
        return 0.0
    each = 2 * _HALF + (_MASK if run.dropout else 0)
    return each * layer.attention.num_heads / run.tp * run.seq_len


def _mlp_bytes(run: RunSpec, layer: BlockLayer, defaults: Framework) -> float:
    mlp = layer.mlp
    each = _element_bytes(run, layer, defaults)
    if mlp.experts is None:
        return each * mlp.ffn_size / run.tp
    visits = mlp.experts.top_k
    permuted = 2 * _HALF * layer.hidden_size / _hidden_ranks(run)
    routed = visits * (permuted + each * mlp.ffn_size / run.tp)
    return routed + each * mlp.experts.shared_ffn_size / run.tp


def _element_bytes(run: RunSpec, layer: BlockLayer, defaults: Framework) -> float:
    """Return the bytes saved per inner element of an MLP."""
    if run.software.operators == "eager":
        return _EAGER_GATED_BYTES if layer.mlp.gated else _PLAIN_BYTES
    if layer.mlp.experts is not None and layer.mlp.gated:
        return defaults.expert_bytes
    return defaults.gated_bytes if layer.mlp.gated else _PLAIN_BYTES


def _inner_sizes(run: RunSpec, layer: BlockLayer) -> float:
    """Return the local inner elements a token of the widest MLP that runs at once."""
    experts = layer.mlp.experts
    if experts is None:
        return layer.mlp.ffn_size / run.tp
    return max(experts.top_k * layer.mlp.ffn_size, experts.shared_ffn_size) / run.tp


def _products_bytes(run: RunSpec, layer: BlockLayer) -> float:
    """Return what a policy keeps that saves attention's output and every second product (q, v, first of the MLP)."""
    queries, _, values = _sizes(run, layer)
    output = values if layer.attention.latent else queries
    first = _HALF * _inner_sizes(run, layer)
    is_compiled = run.software.operators == "fused"
    last = _HALF * layer.hidden_size if layer.mlp.gated and not is_compiled else 0.0
    return input_bytes(run) + _HALF * (queries + values + output) + first + last
