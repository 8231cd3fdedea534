"""Rates that were put into a profile come out of it again."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost.comm import collective_s, ring_terms
from meshwright.cost.fit import fitted_cluster, fitted_link
from meshwright.errors import UserError
from meshwright.spec.library import cluster
from meshwright.spec.profile import CollectiveOp, CollectiveSample, CopySample, LaunchSample, MatmulSample, Profile

A100, CPU = cluster("8xa100-sxm-40g"), cluster("4xcpu")
OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")


def profile(**samples: Any) -> Profile:
    return Profile(device="test", backend=samples.pop("backend", "cpu"), num_ranks=4, torch_version="0", **samples)


def collectives(latency_s: float, bytes_per_s: float, noise: tuple[float, ...] = (1.0,)) -> list[CollectiveSample]:
    samples: list[CollectiveSample] = []
    for op in OPS:
        for size in (2, 4):
            for message_bytes in (1 << 10, 1 << 16, 1 << 22):
                moved_bytes, latencies = ring_terms(op, message_bytes, size)
                seconds = (moved_bytes / bytes_per_s + latencies * latency_s) * noise[len(samples) % len(noise)]
                samples.append(
                    CollectiveSample(op=op, num_ranks=size, stride=1, message_bytes=message_bytes, seconds=seconds)
                )
    return samples


def matmul(dtype: Any, flops_per_s: float) -> MatmulSample:
    return MatmulSample(dtype=dtype, m=512, k=256, n=128, busy_ranks=4, seconds=2 * 512 * 256 * 128 / flops_per_s)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-5, 1e9), (3e-4, 5e10), (1e-4, 2e8)])
def test_a_link_is_found_again(latency_s: float, bytes_per_s: float):
    exact = fitted_link(collectives(latency_s, bytes_per_s))
    assert (exact.latency_s, exact.bytes_per_s) == (pytest.approx(latency_s), pytest.approx(bytes_per_s))
    noisy = fitted_link(collectives(latency_s, bytes_per_s, (1.1, 0.93, 1.0, 0.9, 1.07)))
    assert noisy.latency_s == pytest.approx(latency_s, rel=0.15)
    assert noisy.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)


def test_a_link_is_never_negative():
    falling = [
        CollectiveSample(op="send", num_ranks=2, stride=1, message_bytes=size, seconds=seconds)
        for size, seconds in ((1 << 10, 2e-3), (1 << 22, 1e-3))
    ]
    link = fitted_link(falling)
    assert link.latency_s >= 0
    assert link.bytes_per_s > 0


def test_measured_rates_replace_the_datasheet():
    fitted = fitted_cluster(
        CPU,
        profile(
            matmuls=(matmul("bf16", 3e11), matmul("fp32", 7e10)),
            copies=(CopySample(moved_bytes=8_000_000, busy_ranks=4, seconds=1e-3),),
            launches=(LaunchSample(busy_ranks=4, seconds=5e-6),),
            collectives=tuple(collectives(1e-5, 1e9)),
        ),
    )
    device = fitted.device
    assert device.bf16_flops_per_s == pytest.approx(3e11)
    assert device.fp32_flops_per_s == pytest.approx(7e10)
    assert device.memory_bytes_per_s * device.memory_efficiency == pytest.approx(8e9)
    assert device.launch_s == 5e-6
    assert collective_s("send", 1e6, (0, 1), fitted) == pytest.approx(1e6 / 1e9 + 1e-5)
    assert device.memory_bytes == CPU.device.memory_bytes
    assert device.source != CPU.device.source


def test_what_was_not_measured_stays():
    rates = fitted_cluster(A100, profile(backend="cuda", matmuls=(matmul("bf16", 2e14),))).device
    assert rates.bf16_flops_per_s * rates.matmul_efficiency == pytest.approx(2e14)
    before = A100.device
    reached = before.fp32_flops_per_s * before.matmul_efficiency
    assert rates.fp32_flops_per_s * rates.matmul_efficiency == pytest.approx(reached)
    # Attention was not measured: it keeps its share of what matrix products reach.
    share = before.attention_efficiency / before.matmul_efficiency
    assert rates.bf16_flops_per_s * rates.attention_efficiency == pytest.approx(2e14 * share)
    unchanged = fitted_cluster(A100, profile(backend="cuda"))
    assert unchanged.model_copy(update={"device": before}) == A100


def test_a_profile_of_another_kind_of_device_is_refused():
    with pytest.raises(UserError, match="profile: was measured on cpu, but 8xa100-sxm-40g is cuda"):
        fitted_cluster(A100, profile())
