"""Measure layers on the shapes that tensor-parallel ranks have: forward and backward apart, without collectives.

Two copies of a layer run one after the other, forward through all and then backward through all, as
in a training step: weights come from memory and not from the cache, and activations are fresh.
Then the same with all ranks meeting after every pass of a layer: ranks that talk to each other wait
for the slowest of the moment, and the more they compute in between, the longer (docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.measure.alive import made_by, saved_bytes, transient_bytes
from meshwright.measure.task import Figures, Task, ladder
from meshwright.measure.timing import SAMPLE_S, Call, Timed, calls_in_a_sample, summary, synchronize, timed_between
from meshwright.models import build_layer
from meshwright.models.blocks import starts_decoder
from meshwright.models.tensor_parallel import TensorParallel
from meshwright.runtime.groups import group_alone
from meshwright.runtime.initialize import local_data
from meshwright.runtime.split import TORCH_DTYPES, split_weights
from meshwright.spec.base import Dtype
from meshwright.spec.chain import takes
from meshwright.spec.job import JobSpec
from meshwright.spec.legality import why_illegal_tp
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
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.profile import LayerSample

_MOST_COPIES = 2
_SAMPLES_RATIO = 4
_REPEATS = 3
_MET_REPEATS = 1  # a pass; two passes make two


def layer_tasks(device: torch.device, model: ModelSpec, job: JobSpec, batch: int) -> Iterator[Task]:
    """Yield every layer that a search over plans for the job's ranks will ask for.

    Numbers of samples are one, and powers of four up to the batch and the batch itself: between
    them the time is a straight line.
    """
    num_ranks = dist.get_world_size()
    meeting = _Meeting(device)
    for layer in dict.fromkeys(group.layer for group in model.groups):
        copies = min(_MOST_COPIES, sum(group.num_layers for group in model.groups if group.layer == layer))
        for tp in (degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0):
            if why_illegal_tp(layer, tp) is not None:
                continue
            for samples in ladder(1, batch, _SAMPLES_RATIO):
                yield Task(
                    blank=LayerSample(
                        layer=layer,
                        tp=tp,
                        samples_per_rank=samples,
                        seq_len=job.seq_len,
                        target_seq_len=job.target_seq_len or 0,
                        dtype=job.param_dtype,
                        busy_ranks=num_ranks,
                        forward_s=1.0,
                        backward_s=1.0,
                    ),
                    label=f"{layer.kind} of {samples} samples, tp {tp}",
                    measure=lambda layer=layer, tp=tp, samples=samples, copies=copies: _measure(
                        layer, tp, samples, copies, job, meeting
                    ),
                )


class _Meeting:
    """All ranks say a word to each other; `seconds` is what that takes between short pieces of compute."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._word = torch.zeros(1, device=device)
        self._seconds: float | None = None

    def __call__(self) -> None:
        dist.all_reduce(self._word)

    @property
    def seconds(self) -> float:
        if self._seconds is None:
            self._seconds = timed_between(self, self.device).seconds
        return self._seconds


def _measure(layer: LayerSpec, tp: int, samples: int, copies: int, job: JobSpec, meeting: _Meeting) -> Figures:
    device = meeting.device
    modules = [built_layer(layer, tp, job.param_dtype, device) for _ in range(copies)]
    inputs = layer_inputs(layer, samples, job, device)
    forward, backward, *met = _forward_backward(modules, inputs, meeting)
    parameters = list(modules[0].parameters())
    saved = saved_bytes(lambda: modules[0](*inputs), [local_data(p) for p in parameters])
    return {
        "forward_s": forward.seconds,
        "backward_s": backward.seconds,
        "met_forward_s": met[0].seconds if met else 0,
        "met_backward_s": met[1].seconds if met else 0,
        "saved_bytes": saved,
        "transient_bytes": transient_bytes(lambda: modules[0](*inputs), saved, parameters),
        "spread": max(forward.spread, backward.spread, *(one.spread for one in met)),
        "repeats": forward.repeats,
    }


def built_layer(layer: LayerSpec, tp: int, dtype: Dtype, device: torch.device) -> nn.Module:
    """Return the layer as the first of `tp` ranks holds it, split as the runtime does, with nobody to talk to."""
    with torch.device("meta"):
        module = build_layer(layer).to(TORCH_DTYPES[dtype])
    if tp > 1:
        alone = group_alone()
        mesh = DeviceMesh.from_group(alone, device.type)
        split_weights(module, layer_parameters(layer), TensorParallel(size=tp, index=0, group=alone), mesh)
    module.to_empty(device=device)
    for parameter in module.parameters():
        nn.init.normal_(local_data(parameter), std=0.02)
    return module


def layer_inputs(layer: LayerSpec, samples: int, job: JobSpec, device: torch.device) -> tuple[Tensor, ...]:
    """Return random tensors for all that the layer takes: ids or images, or what is handed on to it, and targets."""

    def states(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, device=device).to(TORCH_DTYPES[job.param_dtype]).requires_grad_()

    def numbers(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, (samples, *shape), device=device)

    lengths = job.lengths
    match layer:
        case EmbeddingLayer():
            ids = numbers(layer.padded_vocab_size, lengths.seq)
            if layer.targets:
                return ids, numbers(layer.padded_vocab_size, lengths.target_seq)
            return (ids, numbers(layer.token_types, lengths.seq)) if layer.token_types else (ids,)
        case PatchEmbeddingLayer():
            return (torch.randn(samples, layer.num_channels, layer.image_size, layer.image_size, device=device),)
        case BlockLayer() | CustomLayer() | MergeLayer():
            starts = isinstance(layer, BlockLayer) and starts_decoder(layer)
            has_target = isinstance(layer, BlockLayer) and any(tensor.name == "target" for tensor in layer.carries)
            handed = takes(layer, starts_decoder=starts, has_target=has_target)
            return tuple(states(*tensor.resolve(lengths)) for tensor in handed)
        case HeadLayer():
            tokens = lengths.of(layer.length)
            return states(tokens, layer.hidden_size), numbers(layer.padded_vocab_size, tokens)
        case ClassifierLayer():
            return states(lengths.of(layer.length), layer.hidden_size), numbers(layer.num_classes)


class _After(torch.autograd.Function):
    """Hands `tensors` on; forward, `call` follows the pass that made them."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        call()
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *gradients


class _Before(torch.autograd.Function):
    """Hands `tensors` on; backward, `call` follows the pass that made their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call()
        return None, *gradients


def _forward_backward(modules: list[nn.Module], inputs: tuple[Tensor, ...], meeting: _Meeting) -> tuple[Timed, ...]:
    """Return forward and backward times of one layer, and then, on several ranks, those with all ranks meeting.

    Every sample runs several pairs of passes and adds up their halves.
    """
    device, num_states = meeting.device, sum(x.requires_grad for x in inputs)  # states come first
    leaves = [*(p for module in modules for p in module.parameters()), *inputs[:num_states]]

    def through(meet: bool) -> tuple[Tensor, ...]:
        tensors = inputs
        for module in modules:
            if meet and num_states:
                tensors = (*_Before.apply(meeting, *tensors[:num_states]), *tensors[num_states:])
            out = module(*tensors)
            tensors = out if isinstance(out, tuple) else (out,)
            tensors = _After.apply(meeting, *tensors) if meet else tensors
        return made_by(tensors)

    # With meetings, what is only handed on counts as made too.
    gradients = {meet: [torch.ones_like(x) for x in through(meet)] for meet in (False, True)}

    def pair(meet: bool = False) -> tuple[float, float]:
        started = time.perf_counter()
        out = through(meet)
        synchronize(device)
        between = time.perf_counter()
        torch.autograd.backward(out, gradients[meet])
        if meet and not num_states:
            meeting()
        synchronize(device)
        ended = time.perf_counter()
        for leaf in leaves:
            leaf.grad = None
        return between - started, ended - between

    calls = calls_in_a_sample(pair, device, 2 * SAMPLE_S)

    def halves(meet: bool, repeats: int) -> tuple[Timed, Timed]:
        samples: list[tuple[float, float]] = []
        for _ in range(repeats):
            dist.barrier()
            pairs = [pair(meet) for _ in range(calls)]
            less_s = meeting.seconds if meet else 0.0
            samples.append(
                (
                    sum(f for f, _ in pairs) / calls / len(modules) - less_s,
                    sum(b for _, b in pairs) / calls / len(modules) - less_s,
                )
            )
        return summary([f for f, _ in samples], device), summary([b for _, b in samples], device)

    alone = halves(False, _REPEATS)
    return alone if dist.get_world_size() == 1 else (*alone, *halves(True, _MET_REPEATS))
