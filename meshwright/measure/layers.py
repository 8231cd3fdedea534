"""Measure layers on the shapes that tensor-parallel ranks have: forward and backward apart, without collectives."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.measure.timing import REPEATS, SAMPLE_S, Timed, calls_in_a_sample, summary, synchronize, timed
from meshwright.models import build_layer
from meshwright.spec.base import Dtype
from meshwright.spec.legality import why_illegal_tp
from meshwright.spec.model import BlockLayer, EmbeddingLayer, LayerSpec, ModelSpec
from meshwright.spec.profile import LayerSample, OptimizerSample

_TORCH: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_OPTIMIZER_ELEMENTS = 1 << 20


def wanted_layers(model: ModelSpec, num_ranks: int, batch: int) -> Iterator[tuple[LayerSpec, int, int]]:
    """Yield (layer, tp, samples per rank) that a search over plans for `num_ranks` will ask for.

    Numbers of samples are one, and powers of four up to the batch and the batch itself: between
    them the time is a straight line.
    """
    counts = [1]
    while counts[-1] * 4 < batch:
        counts.append(counts[-1] * 4)
    counts += [batch] if batch > counts[-1] else []
    for layer in dict.fromkeys(group.layer for group in model.groups):
        for tp in (degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0):
            if why_illegal_tp(layer, tp) is None:
                yield from ((layer, tp, count) for count in counts)


def measure_layer(
    layer: LayerSpec, tp: int, samples: int, *, seq_len: int, dtype: Dtype, device: torch.device
) -> LayerSample:
    """Return the sample of one layer; collective over all ranks, which measure it together."""
    module = _built(layer, tp, dtype, device)
    inputs, extra = _inputs(layer, tp, samples, seq_len, dtype, device)
    forward, backward = _forward_backward(module, inputs, extra, device)
    return LayerSample(
        layer=layer,
        tp=tp,
        samples_per_rank=samples,
        seq_len=seq_len,
        dtype=dtype,
        busy_ranks=dist.get_world_size(),
        forward_s=forward.seconds,
        backward_s=backward.seconds,
        spread=max(forward.spread, backward.spread),
    )


def measure_optimizer(device: torch.device) -> OptimizerSample:
    """Return the sample of a fused AdamW step."""
    parameter = nn.Parameter(torch.zeros(_OPTIMIZER_ELEMENTS, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    taken = timed(optimizer.step, device)
    return OptimizerSample(num_elements=parameter.numel(), busy_ranks=dist.get_world_size(), seconds=taken.seconds)


def split_layer(layer: LayerSpec, tp: int) -> LayerSpec:
    """Return the layer that one of `tp` ranks computes, as a layer of its own."""
    if isinstance(layer, BlockLayer):
        attention = layer.attention.model_copy(
            update={
                "num_heads": layer.attention.num_heads // tp,
                "num_kv_heads": layer.attention.num_kv_heads // tp,
            }
        )
        mlp = layer.mlp.model_copy(update={"ffn_size": layer.mlp.ffn_size // tp})
        return layer.model_copy(update={"attention": attention, "mlp": mlp})
    rows = layer.padded_vocab_size // tp
    return layer.model_copy(update={"padded_vocab_size": rows, "vocab_size": rows})


def _built(layer: LayerSpec, tp: int, dtype: Dtype, device: torch.device) -> nn.Module:
    with torch.device(device):
        module = build_layer(split_layer(layer, tp)).to(_TORCH[dtype])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def _inputs(
    layer: LayerSpec, tp: int, samples: int, seq_len: int, dtype: Dtype, device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if isinstance(layer, EmbeddingLayer):
        return torch.randint(0, layer.padded_vocab_size // tp, (samples, seq_len), device=device), ()
    hidden = torch.randn(samples, seq_len, layer.hidden_size, device=device).to(_TORCH[dtype]).requires_grad_()
    if isinstance(layer, BlockLayer):
        return hidden, ()
    return hidden, (torch.randint(0, layer.padded_vocab_size // tp, (samples, seq_len), device=device),)


def _forward_backward(
    module: nn.Module, inputs: Tensor, extra: tuple[Tensor, ...], device: torch.device
) -> tuple[Timed, Timed]:
    """Return forward and backward times; every sample runs several pairs and adds up their halves."""
    gradient = torch.ones_like(module(inputs, *extra))
    leaves = [*module.parameters(), *([inputs] if inputs.requires_grad else [])]

    def pair() -> tuple[float, float]:
        started = time.perf_counter()
        out = module(inputs, *extra)
        synchronize(device)
        between = time.perf_counter()
        out.backward(gradient)
        synchronize(device)
        ended = time.perf_counter()
        for leaf in leaves:
            leaf.grad = None
        return between - started, ended - between

    calls = calls_in_a_sample(pair, device, 2 * SAMPLE_S)
    forward_s: list[float] = []
    backward_s: list[float] = []
    for _ in range(REPEATS):
        dist.barrier()
        pairs = [pair() for _ in range(calls)]
        forward_s.append(sum(f for f, _ in pairs) / calls)
        backward_s.append(sum(b for _, b in pairs) / calls)
    return summary(forward_s, device), summary(backward_s, device)
