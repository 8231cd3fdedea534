"""Counts on paper against real layers that run: parameters exactly, FLOPs and saved bytes within 1 %."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost.memory import activation_bytes
from meshwright.cost.run_memory_layers import saved_bytes as saved_bytes_of_run
from meshwright.measure.alive import saved_bytes
from meshwright.measure.layers import built_layer, layer_inputs
from meshwright.models.decoder import rotary_table
from meshwright.runtime.initialize import local_data
from meshwright.runtime.split import TORCH_DTYPES
from meshwright.spec.base import Dtype
from meshwright.spec.flops import forward_flops
from meshwright.spec.job import JobSpec
from meshwright.spec.model import BlockLayer, LayerSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.strategy import Strategy
from tests.parity.cases import gpt2, llama
from tests.runs import make_run

SEQ_LEN, SAMPLES = 16, 2
MODELS = {
    "gpt2": gpt2(num_heads=8),
    "llama": llama(num_heads=8),
    "llama-qk-norm": llama(num_heads=8, qk_norm=True),
}
LAYERS = {f"{name}-{layer.kind}": layer for name, model in MODELS.items() for layer in dict.fromkeys(model.layers)}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank that can form a group with itself: layers split over tp ranks then run with nobody to talk to."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rotary_storages(layer: LayerSpec, dtype: Dtype) -> list[torch.Tensor]:
    """Return the cached rotation tables, which all layers share."""
    if not isinstance(layer, BlockLayer) or not layer.attention.rotary:
        return []
    spec = layer.attention
    return list(
        rotary_table(
            SEQ_LEN, spec.head_size, spec.rope_theta, spec.rope_scaling, torch.device("cpu"), TORCH_DTYPES[dtype]
        )
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_counts_are_those_of_the_layer(name: str, dtype: Dtype, tp: int):
    layer, device = LAYERS[name], torch.device("cpu")
    job = JobSpec(global_batch_size=SAMPLES, seq_len=SEQ_LEN, param_dtype=dtype)
    module = built_layer(layer, tp, dtype, device)
    shapes = {name: tuple(local_data(parameter).shape) for name, parameter in module.named_parameters()}
    assert shapes == {p.name: p.local_shape(tp) for p in layer_parameters(layer)}

    inputs, extra = layer_inputs(layer, SAMPLES, SEQ_LEN, dtype, device)
    # The counter does not know CPU's attention kernel, but the products that it stands for.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(inputs, *extra)
    flops = forward_flops(layer, job.lengths)
    expected = SAMPLES * (flops.matmul_flops + flops.attention_flops) / tp
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)

    leave_out = [local_data(p) for p in module.parameters()] + rotary_storages(layer, dtype)
    saved = saved_bytes(lambda: module(inputs, *extra), leave_out)
    predicted = activation_bytes(layer, Strategy(tp=tp), SAMPLES, job, "cpu_stock")
    assert predicted == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_uniform_run_counts_the_same(tp: int):
    """Of kernels that CPU and GPU implement alike: layer norms, flash attention, gelu."""
    layer = LAYERS["gpt2-block"]
    assert isinstance(layer, BlockLayer)
    module = built_layer(layer, tp, "bf16", torch.device("cpu"))
    inputs, _ = layer_inputs(layer, SAMPLES, SEQ_LEN, "bf16", torch.device("cpu"))
    traced = saved_bytes(lambda: module(inputs), [local_data(p) for p in module.parameters()])
    run = make_run(model=MODELS["gpt2"], framework="meshwright", seq_len=SEQ_LEN, micro_batch_size=SAMPLES, tp=tp)
    predicted = SAMPLES * SEQ_LEN * saved_bytes_of_run(run, layer).total_bytes
    assert predicted == pytest.approx(traced, rel=0.01)
