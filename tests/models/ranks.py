"""Run on every rank: each model with all layers split over the ranks, against the same model on one device.

usage: torchrun -m tests.models.ranks RESULTS.json. Rank 0 writes, a model, what all ranks found.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.cost.collectives import tensor_parallel_collectives
from meshwright.cost.inventory import Call
from meshwright.models import Transformer, build_layer, build_model
from meshwright.models.build import tie
from meshwright.models.dropout import Place
from meshwright.models.tensor_parallel import TensorParallel
from meshwright.runtime.initialize import local_data
from meshwright.runtime.split import recompute, split_weights
from meshwright.spec.families import model_from_config
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.strategy import Strategy
from tests.configs import BERT, MISTRAL, SWIN, T5, VIT
from tests.parity.recorder import recorded_calls

NUM_SAMPLES, SEQ_LEN, TARGET_SEQ_LEN = 3, 20, 14
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": MISTRAL,
    "bert": BERT,
    "bert-classes": BERT | {"architectures": ["BertForSequenceClassification"]},
    "t5": T5,
    "t5-untied": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 1},
    "vit": VIT,
    "swin": SWIN,
}
PLACE = Place(seed=3, step=0, layer=0, first_sample=0, rate=0.2)


def main(results_path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        spec = model_from_config({"model_type": name.split("-")[0], **config}, name=name, where="config.json")
        for is_recomputed in (False, True):
            records: list[Any] = [None] * mesh.size()
            dist.all_gather_object(records, compared(spec, mesh, is_recomputed=is_recomputed))
            found[f"{name}-recomputed" if is_recomputed else name] = records
    if dist.get_rank() == 0:
        Path(results_path).write_text(json.dumps(found))
    gc.collect()  # recomputed layers are cycles, which hold the group
    dist.destroy_process_group()


def compared(spec: ModelSpec, mesh: DeviceMesh, *, is_recomputed: bool) -> dict[str, Any]:
    """Return the errors of loss and gradients on this rank, and the collectives that were not priced so."""
    torch.manual_seed(0)
    whole = build_model(spec, "cpu")
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)
    inputs, targets = make_batch(spec)
    expected = whole(*inputs, targets, at=PLACE)
    expected.backward()

    split = split_model(whole, mesh, is_recomputed=is_recomputed)
    with recorded_calls() as calls:
        loss = split(*inputs, targets, at=PLACE)
        loss.backward()
    job = JobSpec(global_batch_size=NUM_SAMPLES, seq_len=SEQ_LEN, target_seq_len=TARGET_SEQ_LEN, param_dtype="fp32")
    strategy = Strategy(tp=mesh.size(), recompute="full" if is_recomputed else "none")
    priced: Counter[Call] = Counter()
    for layer in spec.layers:
        for one in tensor_parallel_collectives(layer, strategy, NUM_SAMPLES, job):
            priced[Call(one.op, one.message_bytes, tuple(range(mesh.size())))] += one.count
    return {
        "loss_error": float((loss / expected - 1).detach().abs()),
        "gradient_errors": gradient_errors(whole, split, mesh),
        "calls": [f"{c}: priced {priced[c]}, issued {calls[c]}" for c in {*priced, *calls} if priced[c] != calls[c]],
        "num_calls": sum(calls.values()),
    }


def make_batch(spec: ModelSpec) -> tuple[tuple[Tensor, ...], Tensor]:
    if spec.fixed_seq_len:
        return (torch.randn(NUM_SAMPLES, 3, 32, 32),), torch.randint(0, 2, (NUM_SAMPLES,))
    inputs = [torch.randint(0, 300, (NUM_SAMPLES, SEQ_LEN))]
    if spec.has_targets:
        inputs.append(torch.randint(0, 300, (NUM_SAMPLES, TARGET_SEQ_LEN)))
    is_language = spec.head.kind == "head"
    return tuple(inputs), torch.randint(0, 300, inputs[-1].shape) if is_language else torch.tensor([1, 0, 1])


def split_model(whole: Transformer, mesh: DeviceMesh, *, is_recomputed: bool) -> Transformer:
    """Return the model with this rank's part of every layer."""
    spec = whole.spec
    split = build_model(spec, "meta")
    tp = TensorParallel(size=mesh.size(), index=dist.get_rank(), group=mesh.get_group())
    for index, layer in enumerate(spec.layers):
        with torch.device("meta"):
            part = build_layer(layer)
        split_weights(part, layer_parameters(layer), tp, mesh)
        part.to_empty(device="cpu")
        for parameter in layer_parameters(layer):
            value = whole.layers[index].get_parameter(parameter.name).detach()
            own = value if parameter.tp_dim is None else value.chunk(tp.size, parameter.tp_dim)[tp.index]
            local_data(part.get_parameter(parameter.name)).copy_(own)
        if is_recomputed:
            recompute(part)
        split.layers[index] = part
    if spec.tied_embedding:
        tie(split.layers[0], split.layers[-1])
    return split


def gradient_errors(whole: Transformer, split: Transformer, mesh: DeviceMesh) -> dict[str, float]:
    """Return the parameters whose gradient is off, in units of 1e-5 of its own and 1e-7 of the global maximum."""
    highest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    errors: dict[str, float] = {}
    for index, layer in enumerate(whole.spec.layers):
        for parameter in layer_parameters(layer):
            expected = whole.layers[index].get_parameter(parameter.name).grad
            got = split.layers[index].get_parameter(parameter.name).grad
            assert expected is not None
            assert got is not None, f"{index}: {parameter.name}"
            own = expected
            if parameter.tp_dim is not None:
                own = expected.chunk(mesh.size(), parameter.tp_dim)[dist.get_rank()]
            tolerance = 1e-5 * float(expected.abs().max()) + 1e-7 * highest
            error = float((local_data(got) - own).abs().max()) / tolerance
            if error > 1:
                errors[f"{index}.{parameter.name}"] = error
    return errors


if __name__ == "__main__":
    main(sys.argv[1])
