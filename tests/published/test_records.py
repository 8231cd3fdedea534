"""Published records become runs: fields mapped, guesses listed, and nothing guessed in silence."""

from __future__ import annotations

from typing import Any

import pytest
from published_hardware import network_bytes_per_s
from published_records import record_of
from published_software import recompute_of
from published_statistics import (
    Fit,
    calibrated_errors,
    confusion,
    offset_calibrated_errors,
    order_of,
    percentile,
    summarise,
    with_interval,
)

from meshwright.spec.run import HeldBytes
from meshwright.units import GiB
from tests.published.rows import row


def test_a_megatron_run_of_2021():
    record = record_of(row(norm={"iter_time_s": 9.399}))
    run = record.run
    assert run is not None
    assert record.skipped is None
    assert (run.framework, run.dp, run.num_micro_batches, run.recompute) == ("megatron", 32, 4, "full")
    assert run.cluster.device.name == "a100-sxm-80g"
    assert run.cluster.inter_node.bytes_per_s == 25e9
    assert (run.software.attention, run.software.loss) == ("unfused", "vocab_parallel")
    assert (run.software.overlaps_gradients, run.software.overlaps_tp_backward) == (False, False)
    assert run.held == HeldBytes(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=16, reduce_bytes=2)
    block = run.model.layers[1]
    assert block.kind == "block"
    assert (block.norm, block.attention.bias, block.mlp.gated) == ("layernorm", True, False)
    assert run.model.embedding.max_positions == 2048
    assert run.model.embedding.padded_vocab_size == 51200
    assert run.dropout
    assert record.assumed == ("dropout",)


def test_a_torchtitan_run_with_float8():
    record = record_of(
        row(
            source={"repo": "pytorch/torchtitan", "date": "2024-12"},
            model={
                "arch": "llama", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8,
                "vocab": 128256, "seq": 8192, "tied_embeddings": False,
            },
            hardware={
                "gpu": "H100 SXM HBM2e 96GB (2.4 TB/s, 500W limit)", "n_gpus": 8, "gpu_mem_gb": 96, "inter": None
            },
            precision="bf16 + float8 linear (torchao)",
            parallel={"tp": 1, "dp": 8, "zero": 3, "fsdp": "FSDP2"},
            batch={"mbs": 2, "gbs": 16},
            recompute="selective AC (kind not stated; default is per-op SAC)",
            kernels={"compile": True, "fp8": True, "attention": "SDPA flash"},
            measured={"peak_mem": 76.8, "mem_kind": "torch.cuda max reserved, max over all GPUs"},
            norm={"peak_mem_gib_range": [76.8, 76.8]},
        )
    )  # fmt: skip
    run = record.run
    assert run is not None
    assert (run.framework, run.zero_stage, run.recompute, run.dropout) == ("torchtitan", 3, "operators", False)
    assert run.cluster.device.name == "h100-sxm-96g-500w"
    assert run.software.clock == pytest.approx((5 / 7) ** 0.5, abs=1e-3)
    assert (run.software.fp8, run.software.fp8_gather, run.software.loss) == ("tensorwise", True, "compiled")
    assert run.model.embedding.padded_vocab_size == 128256
    assert "fp8 gather" in record.assumed
    assert (record.memory_kind, record.memory_rank) == ("reserved", "max")
    assert record.memory_bytes_range == (76.8 * GiB, 76.8 * GiB)


def test_a_mixture_of_experts_with_latent_attention():
    record = record_of(
        row(
            source={"date": "2026"},
            model={
                "arch": "moe-mla", "layers": 4, "hidden": 5120, "ffn": 12288, "heads": 128, "kv_heads": 128,
                "vocab": 102400, "seq": 4096, "n_experts": 160, "topk": 6, "moe_ffn": 1536,
                "extra": {"q_lora_rank": 1536, "kv_lora_rank": 512, "dense_layers": 1, "shared_expert_ffn": 3072},
            },
            hardware={"gpu": "B200 SXM", "n_gpus": 8, "gpu_mem_gb": 180, "inter": None},
            precision="bf16",
            parallel={"tp": 1, "ep": 8, "dp": 8, "zero": 1},
            batch={"mbs": 1, "gbs": 32},
            recompute="none",
            kernels={"flash": "TransformerEngine 2.11 attention", "ce_fusion": True},
            notes="no overlap of TP/DP/P2P comm",
            measured={"peak_mem": 45.6, "mem_kind": "torch.cuda.max_memory_allocated() on the last rank"},
        )
    )  # fmt: skip
    run = record.run
    assert run is not None
    dense, sparse = (group for group in run.model.groups if group.layer.kind == "block")
    assert (dense.num_layers, sparse.num_layers) == (1, 3)
    assert sparse.layer.kind == "block"
    assert sparse.layer.mlp.experts is not None
    assert (sparse.layer.mlp.ffn_size, sparse.layer.mlp.experts.shared_ffn_size) == (1536, 3072)
    latent = sparse.layer.attention.latent
    assert latent is not None
    assert (latent.query_rank, latent.kv_rank, sparse.layer.attention.head_size) == (1536, 512, 192)
    assert (run.ep, run.software.loss, run.software.overlaps_gradients) == (8, "fused", False)
    assert (record.memory_kind, record.memory_rank) == ("allocated", "last")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"heads": None}}, "model.heads"),
        ({"model": {"arch": None}}, "model.arch"),
        ({"model": {"arch": "t5"}}, "model.arch (t5 is not a decoder that can be described)"),
        ({"hardware": {"n_gpus": None}, "parallel": {"dp": None}}, "hardware.n_gpus"),
        ({"hardware": {"gpu": "Quantum 9000"}}, "hardware.gpu (no preset for 'quantum 9000')"),
        ({"parallel": {"tp": None}}, "parallel.tp"),
        ({"batch": {"mbs": None, "gbs": None}}, "batch.mbs and batch.gbs"),
        ({"recompute": "op-level, chosen by the search"}, "recompute ("),
        ({"offload": "optimizer"}, "offload (optimizer)"),
        ({"task": "lora fine-tune"}, "task (lora fine-tune"),
        ({"parallel": {"tp": 7}}, "parallel (tp x cp x pp = 7 does not divide 256 GPUs)"),
        ({"parallel": {"ep": 3}}, "ep (3) must divide dp x cp (32)"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], reason: str):
    record = record_of(row(**changes))
    assert record.run is None
    assert record.skipped is not None
    assert record.skipped.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "guess"),
    [
        ({"batch": {"mbs": None}}, "micro-batch of 4"),
        ({"model": {"vocab": None}}, "vocabulary 50257"),
        ({"recompute": None}, "no recomputation"),
        ({"hardware": {"inter": None}}, "network of 25 GB/s a GPU"),
        ({"hardware": {"gpu": "V100", "gpu_mem_gb": None}}, "v100-sxm2-32g for 'v100'"),
        ({"parallel": {"pp": 2, "tp": 4, "vpp": None}}, "1 virtual stages"),
        ({"kernels": None}, "attention unfused"),
        ({"hardware": {"n_gpus": None}}, "256 GPUs, the product of the degrees"),
        ({"batch": {"gbs": 1030}}, "global batch 1024 instead of 1030, no multiple of dp x micro-batch"),
    ],
)
def test_what_is_guessed_is_listed(changes: dict[str, Any], guess: str):
    record = record_of(row(**changes))
    assert record.run is not None
    assert guess in record.assumed


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("4x 100 Gb/s RoCE per node", 6.25e9),
        ("8x 200Gb/s HDR InfiniBand per node", 25e9),
        ("backend RDMA 400 Gb/s per GPU", 50e9),
        ("RoCE 1600 Gbps node-node", 25e9),
        ("4x OmniPath per node", 6.25e9),
        ("3.2 Tb/s per node", 50e9),
        ("25 GB/s per GPU", 25e9),
        ("Omni-Path", None),
        ("", None),
    ],
)
def test_networks(text: str, rate: float | None):
    assert network_bytes_per_s(text, 8, []) == rate


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none (checkpoint=False)", ("none", 1)),
        ("full AC", ("full", 1)),
        ("selective (attention core) ", ("attention", 1)),
        ("selective layer AC (every 2nd layer)", ("full", 2)),
        ("per-op SAC", ("operators", 1)),
    ],
)
def test_recomputation(text: str, found: tuple[str, int]):
    assert recompute_of(row(recompute=text), []) == found


def test_statistics():
    summary = summarise([0.1, -0.2, 0.3])
    assert (summary.median, summary.bias, summary.num) == (0.2, 0.1, 3)
    assert percentile([0.0, 1.0], 90) == pytest.approx(0.9)
    pooled = with_interval({"a": [0.1, 0.1], "b": [0.3]})
    assert (pooled.median, pooled.low, pooled.high) == (0.1, 0.1, 0.3)
    assert calibrated_errors([(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]) == pytest.approx([0, 0, 0])
    assert calibrated_errors([(1.0, 2.0)]) == []
    line = [(size, 2 * size + 1) for size in (1.0, 2.0, 3.0, 4.0)]
    assert offset_calibrated_errors(line) == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert offset_calibrated_errors([*line, (5.0, 22.0)])[:4] == pytest.approx([0, 0, 0, 0], abs=0.01)


def test_order_and_fit():
    order = order_of([("a", 1, 1.0, 1.1), ("b", 2, 2.0, 1.0), ("c", 3, 3.0, 2.0), ("d", 4, 4.0, 2.01)])
    assert order is not None
    assert (order.num_pairs, order.num_right) == (5, 4)  # c and d are too near to have an order
    assert (order.picked, order.best, order.regret) == ("a", "b", pytest.approx(0.1))
    found = confusion([Fit("fits", 0.5, False), Fit("alarm", 1.1, False), Fit("miss", 0.9, True)], 0.98)
    assert (found["num_found"], found["num_false_alarms"]) == (0, 1)
    assert found["misses"][0]["margin"] == pytest.approx(-0.08)
