"""Counts on paper against real layers that run: parameters exactly, FLOPs and saved bytes within 1 %."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost.memory import activation_bytes
from meshwright.cost.run_memory_layers import saved_bytes as saved_bytes_of_run
from meshwright.measure.alive import saved_bytes
from meshwright.measure.layers import built_layer, layer_inputs
from meshwright.runtime.initialize import local_data
from meshwright.spec.base import Dtype
from meshwright.spec.families import model_from_config
from meshwright.spec.flops import forward_flops, weight_products
from meshwright.spec.job import JobSpec
from meshwright.spec.model import BlockLayer, LayerSpec
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.strategy import Strategy
from tests.configs import BERT, MISTRAL, SWIN, T5, VIT
from tests.parity.cases import gpt2, llama
from tests.runs import make_run

SEQ_LEN, TARGET_SEQ_LEN, SAMPLES = 16, 12, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": MISTRAL | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 5, "hidden_size": 64},
    "bert": BERT | {"num_attention_heads": 8, "hidden_size": 64},
    "bert-classes": BERT | {"architectures": ["BertForSequenceClassification"]},
    "t5": T5 | {"feed_forward_proj": "gelu"},
    "t5-gated": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "vit": VIT,
    "swin": SWIN | {"num_heads": [4, 4, 8]},
}
MODELS = {
    "gpt2": gpt2(num_heads=8),
    "llama": llama(num_heads=8),
    "llama-qk-norm": llama(num_heads=8, qk_norm=True),
    **{
        name: model_from_config({"model_type": name.split("-")[0], **config}, name=name, where="config.json")
        for name, config in CONFIGS.items()
    },
}
LAYERS = {
    f"{name}-{layer.kind}-{number}": layer
    for name, model in MODELS.items()
    for number, layer in enumerate(dict.fromkeys(model.layers))
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank that can form a group with itself: layers split over tp ranks then run with nobody to talk to."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_job(dtype: Dtype) -> JobSpec:
    return JobSpec(global_batch_size=SAMPLES, seq_len=SEQ_LEN, target_seq_len=TARGET_SEQ_LEN, param_dtype=dtype)


def flops_of_a_rank(layer: LayerSpec, job: JobSpec, tp: int) -> float:
    """Return one sample's FLOPs: every rank multiplies with all of what tensor parallelism does not split."""
    flops = forward_flops(layer, job.lengths)
    whole = sum(
        2 * product.rows * product.parameter.num_elements
        for product in weight_products(layer, job.lengths)
        if product.parameter.tp_dim is None
    )
    return whole + (flops.matmul_flops - whole + flops.attention_flops) / tp


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_counts_are_those_of_the_layer(name: str, dtype: Dtype, tp: int):
    layer, device = LAYERS[name], torch.device("cpu")
    job = make_job(dtype)
    module = built_layer(layer, tp, dtype, device)
    shapes = {name: tuple(local_data(parameter).shape) for name, parameter in module.named_parameters()}
    assert shapes == {p.name: p.local_shape(tp) for p in layer_parameters(layer)}

    inputs = layer_inputs(layer, SAMPLES, job, device)
    # The counter does not know CPU's attention kernel, but the products that it stands for.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(*inputs)
    expected = SAMPLES * flops_of_a_rank(layer, job, tp)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)

    saved = saved_bytes(lambda: module(*inputs), [local_data(p) for p in module.parameters()])
    predicted = activation_bytes(layer, Strategy(tp=tp), SAMPLES, job, "cpu_stock")
    assert predicted == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_relu_keeps_one_tensor(tp: int):
    relu = model_from_config({"model_type": "t5", **T5}, name="t5", where="config.json").layers[1]
    job, device = make_job("fp32"), torch.device("cpu")
    module, inputs = built_layer(relu, tp, "fp32", device), layer_inputs(relu, SAMPLES, job, device)
    saved = saved_bytes(lambda: module(*inputs), [local_data(p) for p in module.parameters()])
    assert activation_bytes(relu, Strategy(tp=tp), SAMPLES, job, "cpu_stock") == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_uniform_run_counts_the_same(tp: int):
    """Of kernels that CPU and GPU implement alike: layer norms, flash attention, gelu."""
    layer = MODELS["gpt2"].layers[1]
    assert isinstance(layer, BlockLayer)
    module = built_layer(layer, tp, "bf16", torch.device("cpu"))
    inputs = layer_inputs(layer, SAMPLES, make_job("bf16"), torch.device("cpu"))
    traced = saved_bytes(lambda: module(*inputs), [local_data(p) for p in module.parameters()])
    run = make_run(model=MODELS["gpt2"], framework="meshwright", seq_len=SEQ_LEN, micro_batch_size=SAMPLES, tp=tp)
    predicted = SAMPLES * SEQ_LEN * saved_bytes_of_run(run, layer).total_bytes
    assert predicted == pytest.approx(traced, rel=0.01)
