"""Whether a layer can run under a strategy, and if not, why: the field, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from meshwright.spec.model import BlockLayer, CustomLayer, EmbeddingLayer, HeadLayer, LayerSpec
from meshwright.spec.strategy import Strategy


def why_illegal(layer: LayerSpec, strategy: Strategy, micro_batch_samples: int) -> str | None:
    """Return the reason why `layer` cannot use `strategy`, or None when it can.

    `micro_batch_samples` is the micro-batch over all ranks of the stage.
    """
    return why_illegal_tp(layer, strategy.tp) or why_illegal_dp(strategy, micro_batch_samples)


def why_illegal_dp(strategy: Strategy, micro_batch_samples: int) -> str | None:
    """Return why a micro-batch cannot be cut into this many data-parallel slices, or None."""
    if micro_batch_samples % strategy.dp:
        return f"dp {strategy.dp} does not divide the micro-batch of {micro_batch_samples} samples"
    return None


@lru_cache(maxsize=4096)
def why_illegal_tp(layer: LayerSpec, tp: int) -> str | None:
    """Return why tensor-parallel degree `tp` is impossible for `layer`, or None."""
    for name, size in _split_sizes(layer):
        if size % tp:
            allowed = ", ".join(str(degree) for degree in range(1, min(size, 4 * tp) + 1) if size % degree == 0)
            return f"tp {tp} does not divide {name}={size}; allowed: {allowed}"
    return None


def _split_sizes(layer: LayerSpec) -> Iterator[tuple[str, int]]:
    """Yield what tensor parallelism splits; nothing for layers that every rank holds whole."""
    if isinstance(layer, EmbeddingLayer | HeadLayer):
        yield "padded_vocab_size", layer.padded_vocab_size
    elif isinstance(layer, BlockLayer):
        for attention in (layer.attention, layer.cross_attention):
            if attention is not None:
                yield "num_kv_heads", attention.num_kv_heads
                yield "num_heads", attention.num_heads
        yield "ffn_size", layer.mlp.ffn_size
        if layer.mlp.experts is not None:
            yield "shared_ffn_size", layer.mlp.experts.shared_ffn_size
    elif isinstance(layer, CustomLayer):
        for parameter in layer.parameters:
            if parameter.tp_dim is not None:
                yield f"dimension {parameter.tp_dim} of {parameter.name}", parameter.shape[parameter.tp_dim]


def why_layer_only_priced(spec: LayerSpec) -> str | None:
    """Return what of `spec` the cost model prices and no module implements, or None."""
    if not isinstance(spec, BlockLayer):
        return None
    attention, cross = spec.attention, spec.cross_attention
    is_there = {
        "mlp.experts": spec.mlp.experts is not None,
        "attention.latent": attention.latent is not None,
        "attention.relative and grouped queries": attention.keeps_scores
        and attention.num_heads != attention.num_kv_heads,
        "cross_attention, but without attention.relative": cross is not None and attention.relative is None,
        "cross_attention that knows positions": cross is not None
        and (cross.causal or cross.rotary or cross.keeps_scores),
    }
    found = [name for name, value in is_there.items() if value]
    return f"{spec.kind} with {found[0]}" if found else None


def why_strategy_only_priced(strategy: Strategy) -> str | None:
    """Return what of `strategy` the cost model prices and our runtime does not run, with what it does; or None."""
    for name, given, allowed in (
        ("sequence_parallel", strategy.sequence_parallel, False),
        ("cp", strategy.cp, 1),
        ("ep", strategy.ep, 1),
    ):
        if given != allowed:
            return f"{name} {given} can be priced but not run yet; use {allowed}"
    return "zero_stage 1 can be priced but not run yet; use 0, 2 or 3" if strategy.zero_stage == 1 else None
