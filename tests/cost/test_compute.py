"""Compute seconds: a block by hand, and what degrees, sizes, dtypes and devices do to them."""

from __future__ import annotations

import pytest

from meshwright.cost.compute import accumulate_s, layer_compute, measured_counts, optimizer_s
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.flops import forward_flops
from meshwright.spec.job import JobSpec
from meshwright.spec.library import device, model
from meshwright.spec.model import BlockLayer, LayerSpec
from meshwright.spec.profile import LayerSample

A100 = device("a100-sxm-40g")
BF16 = JobSpec(global_batch_size=8, seq_len=2048)
FP32 = BF16.model_copy(update={"param_dtype": "fp32"})
LLAMA = model("llama-2-7b")
GPT2 = model("gpt2")
LAYERS = [*(LLAMA.layers[i] for i in (0, 1, -1)), *(GPT2.layers[i] for i in (0, 1, -1))]


def total_s(layer: LayerSpec, tp: int = 1, samples: int = 2, job: JobSpec = BF16) -> float:
    cost = layer_compute(layer, tp, samples, job, A100)
    return cost.forward_s + cost.backward_s


@pytest.mark.parametrize("layer", LAYERS)
def test_more_ranks_compute_less_each(layer: LayerSpec):
    times = [total_s(layer, tp) for tp in (1, 2, 4)]
    if layer.kind == "embedding":
        assert times[0] == times[1] == times[2], "every rank writes all hidden states"
    else:
        assert times[0] > times[1] > times[2] > times[0] / 4


@pytest.mark.parametrize("layer", LAYERS)
def test_more_samples_longer_ones_and_wider_dtypes_take_longer(layer: LayerSpec):
    assert total_s(layer, samples=2) < total_s(layer, samples=4) <= 2 * total_s(layer, samples=2)
    assert total_s(layer) < total_s(layer, job=BF16.model_copy(update={"seq_len": 4096}))
    assert total_s(layer) < total_s(layer, job=FP32)


def test_backward_takes_about_twice_as_long():
    cost = layer_compute(LLAMA.layers[1], 1, 2, BF16, A100)
    assert 1.8 < cost.backward_s / cost.forward_s < 2.2


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "gpt2-xl"])
def test_nothing_is_faster_than_the_peak(name: str):
    block = model(name).layers[1]
    flops = forward_flops(block, BF16.lengths)
    halved = flops.matmul_flops + flops.attention_flops / 2  # the masked half of the scores is skipped
    assert layer_compute(block, 1, 1, BF16, A100).forward_s > halved / A100.bf16_flops_per_s


def test_a_block_by_hand_where_memory_and_launches_are_free():
    ideal = A100.model_copy(
        update={"launch_s": 0.0, "memory_bytes_per_s": 1e30, "matmul_efficiency": 0.5, "attention_efficiency": 0.25}
    )
    block = LLAMA.layers[1]
    assert isinstance(block, BlockLayer)
    h, f, s, samples, tp = 4096, 11008, 2048, 3, 4
    products = 2 * samples * s * (4 * h * h + 3 * h * f) / tp / (0.5 * 312e12)
    scores = 2 * samples * s * s * h / tp / (0.25 * 312e12) * (s + 256) / s
    found = layer_compute(block, tp, samples, BF16, ideal)
    assert found.forward_s == pytest.approx(products + scores, rel=1e-9)
    assert found.backward_s == pytest.approx(2 * products + 2.5 * scores, rel=1e-9)


def test_a_faster_device_is_faster():
    h100 = device("h100-sxm")
    for layer in LAYERS:
        assert layer_compute(layer, 1, 2, BF16, h100).backward_s < layer_compute(layer, 1, 2, BF16, A100).backward_s


def test_updates_are_in_proportion_to_what_a_rank_holds():
    assert optimizer_s(2_000_000, A100) == pytest.approx(2 * optimizer_s(1_000_000, A100))
    assert accumulate_s(2_000_000, BF16, A100) == pytest.approx(2 * accumulate_s(1_000_000, BF16, A100))
    bytes_per_s = A100.memory_bytes_per_s * A100.memory_efficiency
    assert accumulate_s(1_000_000, FP32, A100) == pytest.approx(12e6 / bytes_per_s), "read two fp32, write one"


def with_samples(*points: tuple[int, float], busy_ranks: int = 2) -> DeviceSpec:
    samples = tuple(
        LayerSample(
            layer=LLAMA.layers[1], tp=1, samples_per_rank=count, seq_len=2048, dtype="bf16", busy_ranks=busy_ranks,
            forward_s=seconds, backward_s=2 * seconds,
        )
        for count, seconds in points
    )  # fmt: skip
    return A100.model_copy(update={"layer_samples": samples})


def test_measured_layers_lie_on_lines_that_never_fall():
    """Noise made four samples cheaper than one: their mean stands for both, and more still take longer."""
    noisy = with_samples((1, 2e-3), (4, 1.5e-3), (16, 8e-3))
    times = [layer_compute(LLAMA.layers[1], 1, count, BF16, noisy).forward_s for count in (1, 2, 4, 10, 16, 64, 1024)]
    assert times == sorted(times)
    assert times[0] == times[2] == pytest.approx(1.75e-3)
    assert times[3] == pytest.approx((1.75e-3 + 8e-3) / 2)
    assert times[5] > 2 * times[4]
    flat = with_samples((1, 2e-3), (4, 2e-3))
    assert layer_compute(LLAMA.layers[1], 1, 64, BF16, flat).backward_s > 8 * 4e-3


def test_of_two_measurements_the_one_with_more_busy_ranks_counts():
    both = with_samples((1, 1e-3), busy_ranks=2).layer_samples + with_samples((1, 3e-3), busy_ranks=4).layer_samples
    device = A100.model_copy(update={"layer_samples": both})
    assert layer_compute(LLAMA.layers[1], 1, 1, BF16, device).forward_s == 3e-3


def with_meetings(forward_s: float, met_forward_s: float) -> DeviceSpec:
    samples = with_samples((1, forward_s), (4, 4 * forward_s)).layer_samples
    update = {"met_forward_s": met_forward_s, "met_backward_s": 3 * forward_s}
    return A100.model_copy(
        update={"layer_samples": tuple(s.model_copy(update=update) if s.samples_per_rank == 1 else s for s in samples)}
    )


def test_waiting_is_what_meeting_takes_longer():
    found = layer_compute(LLAMA.layers[1], 1, 1, BF16, with_meetings(2e-3, 2.5e-3))
    assert found.forward_s == 2e-3
    assert found.forward_wait_s == pytest.approx(0.5e-3)
    assert found.backward_wait_s == pytest.approx(2e-3)
    plain = layer_compute(LLAMA.layers[1], 1, 1, BF16, with_samples((1, 2e-3)))
    assert (plain.forward_wait_s, plain.backward_wait_s) == (0.0, 0.0)


def test_a_meeting_that_was_faster_shows_noise():
    found = layer_compute(LLAMA.layers[1], 1, 1, BF16, with_meetings(2e-3, 1.5e-3))
    assert found.forward_s == 1.5e-3
    assert found.forward_wait_s == 0.0


def test_a_measured_layer_counts_for_its_lengths_alone():
    """A decoder's block takes other seconds with other targets; calibration knows its own."""
    decoder = model("tiny-t5").layers[-2]
    job = BF16.model_copy(update={"seq_len": 64, "target_seq_len": 48})
    modelled = layer_compute(decoder, 1, 1, job, A100)
    sample = LayerSample(
        layer=decoder, tp=1, samples_per_rank=1, seq_len=64, target_seq_len=48, dtype="bf16", busy_ranks=1,
        forward_s=2 * modelled.forward_s, backward_s=3 * modelled.backward_s,
    )  # fmt: skip
    device = A100.model_copy(update={"layer_samples": (sample,)})
    assert layer_compute(decoder, 1, 1, job, device).forward_s == sample.forward_s
    assert measured_counts(decoder, 1, job, device) == (1,)
    others = job.model_copy(update={"target_seq_len": 32})
    assert measured_counts(decoder, 1, others, device) == ()
    assert layer_compute(decoder, 1, 1, others, device).forward_s < sample.forward_s
    for other_job in (others, BF16):
        layer = LLAMA.layers[1] if other_job is BF16 else decoder
        alone, scaled = (layer_compute(layer, 1, 1, other_job, d) for d in (A100, device))
        assert scaled.forward_s == pytest.approx(2 * alone.forward_s)
        assert scaled.backward_s == pytest.approx(3 * alone.backward_s)


def test_few_tokens_still_read_every_expert_that_they_visit():
    """Beside a dense block of one expert's width and all visits, the other experts' weights are read."""
    block = model("mixtral-8x7b").layers[1]
    assert isinstance(block, BlockLayer)
    experts = block.mlp.experts
    assert experts is not None
    bytes_per_s = A100.memory_bytes_per_s * A100.memory_efficiency

    def forward_s(num_experts: int, seq_len: int) -> float:
        spec = experts.model_copy(update={"num_experts": num_experts, "top_k": 2})
        layer = block.model_copy(update={"mlp": block.mlp.model_copy(update={"experts": spec})})
        return layer_compute(layer, 1, 1, BF16.model_copy(update={"seq_len": seq_len}), A100).forward_s

    one_expert_bytes = 2 * 3 * 4096 * 14336
    router_bytes = 2 * 6 * 4096 + 2 * 4 * 6
    more_s = forward_s(8, 4) - forward_s(2, 4)
    assert more_s == pytest.approx((6 * one_expert_bytes + router_bytes) / bytes_per_s, rel=1e-6)
    # Two tokens make four visits, so of eight experts and of four as many are read.
    assert forward_s(8, 2) - forward_s(4, 2) < one_expert_bytes / bytes_per_s / 100
    # With many tokens products decide.
    assert forward_s(8, 65536) == pytest.approx(forward_s(2, 65536), rel=1e-3)
