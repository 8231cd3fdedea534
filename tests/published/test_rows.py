"""The cost model against a dozen well-documented measurements, each with its figure and where it was published.

Tolerances are wider than the errors reached, so that a refit does not break them, and tight enough that a lost term
does. Figures printed as TFLOP/s are turned into seconds by the formula of their source.
"""

from __future__ import annotations

from typing import Any

import pytest
from published_pricing import price
from published_records import record_of

from meshwright.units import GB, GiB
from tests.published.rows import row

TIME_TOLERANCE, MEMORY_TOLERANCE = 0.12, 0.05


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "ffn": 4 * hidden, "heads": heads, "kv_heads": heads, "vocab": vocab}


def llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8, seq: int = 8192) -> dict[str, Any]:
    return {
        "arch": "llama", "layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads,
        "vocab": 128256, "seq": seq, "tied_embeddings": False,
    }  # fmt: skip


def megatron_s(model: dict[str, Any], batch: int, devices: int, tera_flops: float) -> float:
    """Return the seconds behind a TFLOP/s of arXiv 2104.04473, equation 3, at 2048 tokens with full recomputation."""
    seq, layers, hidden = 2048, model["layers"], model["hidden"]
    flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + model["vocab"] / (16 * layers * hidden))
    return flops / (tera_flops * 1e12 * devices)


def degrees(tp: int = 1, pp: int = 1, vpp: int = 1, **others: Any) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "vpp": vpp, "dp": None, **others}


# arXiv 2104.04473, table 1; micro-batches and interleaving from examples/academic_paper_scripts/sc21/run_table_1.sh.
NARAYANAN = [
    (gpt(40, 6144, 48), 256, 1024, 8, degrees(tp=8), 135),
    (gpt(80, 12288, 96), 1536, 2304, 2, degrees(tp=8, pp=8, vpp=2), 148),
    (gpt(128, 25600, 160), 3072, 3072, 1, degrees(tp=8, pp=64), 163),
]

# arXiv 2205.05198, table 5: full recomputation, and selective with sequence parallelism; no data parallelism.
KORTHIKANTI = [
    (gpt(48, 6144, 64), 8, 4, 4, degrees(tp=8), "full", 1.42),
    (gpt(48, 6144, 64), 8, 4, 4, degrees(tp=8, sp=True), "selective", 1.10),
    (gpt(105, 20480, 128), 280, 280, 1, degrees(tp=8, pp=35, vpp=3, sp=True), "selective", 37.83),
    (gpt(128, 25600, 160), 512, 512, 1, degrees(tp=8, pp=64, sp=True), "selective", 71.49),
]

# mosaicml/llm-foundry, scripts/train/benchmarking/README.md, of January 2024: GPU, micro-batch, batch, tokens/s.
FOUNDRY = [
    ("H100 80GB", gpt(40, 5120, 40, 50368), 64, 2, 128, 2048, "none", 307_209),
    ("H100 80GB", gpt(48, 7168, 56, 50368), 16, 10, 480, 2048, "full", 36_209),
    ("A100 80GB", gpt(24, 2048, 16, 50368), 8, 3, 96, 8192, "none", 110_516),
]

# pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 4: tokens/s of one GPU, GiB reserved.
TITAN = [
    (llama(32, 4096, 14336, 32), 8, degrees(zero=3, fsdp="FSDP2"), 2, "per-op SAC", 6667, 77.0),
    (llama(80, 8192, 28672, 64), 256, degrees(tp=8, sp=True, zero=3, fsdp="FSDP2"), 16, "full AC", 829, 71.9),
]

# MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json, columns "real": seconds, and GiB allocated of the
# fullest rank. 8 B200; micro-batches of 1.
SIMUMAX = [
    (llama(12, 8192, 28672, 64, seq=4096), degrees(tp=2, sp=True, zero=1), 32, 1.387, 60.68),
    (llama(12, 8192, 28672, 64, seq=4096), degrees(pp=2, zero=1), 32, 1.4768, 66.55),
    (llama(4, 16384, 53248, 128, 16, 4096), degrees(tp=4, sp=True, zero=1), 16, 0.8996, 52.89),
]

# bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md: seconds, and GB in use by nvidia-smi.
BIGSCIENCE = [
    (gpt(70, 14336, 112, 250000), degrees(tp=4, pp=12, vpp=None, zero=1), 2, 104.5, 59.0),
    (gpt(72, 14336, 64, 250000), degrees(tp=8, pp=6, vpp=None, zero=1), 2, 131.02, 44.0),
]


def check(made: dict[str, Any], *, time_s: float | None = None, memory_bytes: float | None = None, slack: float = 1.0):
    priced = price(record_of(made))
    assert priced.problem is None
    if time_s is not None:
        assert priced.time_s == pytest.approx(time_s, rel=TIME_TOLERANCE * slack)
    if memory_bytes is not None:
        assert priced.memory_bytes == pytest.approx(memory_bytes, rel=MEMORY_TOLERANCE * slack)


@pytest.mark.parametrize(("model", "devices", "batch", "micro", "parallel", "tera_flops"), NARAYANAN)
def test_megatron_2021(model, devices, batch, micro, parallel, tera_flops):
    made = row(
        model=model, parallel=parallel, batch={"mbs": micro, "gbs": batch}, hardware={"n_gpus": devices}
    )  # fmt: skip
    check(made, time_s=megatron_s(model, batch, devices, tera_flops))


@pytest.mark.parametrize(("model", "devices", "batch", "micro", "parallel", "recompute", "time_s"), KORTHIKANTI)
def test_selective_recomputation_2022(model, devices, batch, micro, parallel, recompute, time_s):
    made = row(
        source={"date": "2022-05"},
        model=model,
        parallel=parallel,
        precision="fp16/bf16 mixed",
        batch={"mbs": micro, "gbs": batch},
        hardware={"n_gpus": devices},
        recompute=recompute,
    )
    check(made, time_s=time_s)


@pytest.mark.parametrize(("gpu", "model", "devices", "micro", "batch", "seq", "recompute", "tokens_per_s"), FOUNDRY)
def test_mpt_with_fsdp(gpu, model, devices, micro, batch, seq, recompute, tokens_per_s):
    made = row(
        source={"name": "llm-foundry", "repo": "mosaicml/llm-foundry", "date": "2024-01"},
        model={**model, "arch": "gpt (MPT: no bias)", "seq": seq},
        hardware={"gpu": gpu, "n_gpus": devices, "inter": "RoCE 1600 Gbps node-node" if "A100" in gpu else None},
        precision="amp bf16 (fp32 params)",
        parallel=degrees(zero=3, fsdp="PyTorch FSDP1 FULL_SHARD"),
        batch={"mbs": micro, "gbs": batch},
        recompute=recompute,
        kernels={"flash": True},
    )
    check(made, time_s=batch * seq / tokens_per_s)


@pytest.mark.parametrize(("model", "devices", "parallel", "micro", "recompute", "tokens_per_s", "reserved_gib"), TITAN)
def test_llama_with_torchtitan(model, devices, parallel, micro, recompute, tokens_per_s, reserved_gib):
    batch = micro * devices // parallel["tp"]
    is_float8 = parallel["tp"] > 1
    made = row(
        source={"name": "torchtitan", "repo": "pytorch/torchtitan", "date": "2024-12"},
        model=model,
        hardware={
            "gpu": "H100 SXM HBM2e 96GB (2.4 TB/s, 500W limit)", "n_gpus": devices, "gpu_mem_gb": 96,
            "inter": "backend RDMA 400 Gb/s per GPU",
        },
        precision="bf16 + float8 linear (torchao)" if is_float8 else "bf16 mixed",
        parallel=parallel,
        batch={"mbs": micro, "gbs": batch},
        recompute=recompute,
        kernels={"flash": True, "compile": True, "fp8": is_float8},
        measured={"peak_mem": reserved_gib, "mem_kind": "torch.cuda max reserved, max over all GPUs"},
        norm={"peak_mem_gib_range": [reserved_gib, reserved_gib]},
    )  # fmt: skip
    time_s = batch * model["seq"] / (tokens_per_s * devices)
    check(made, time_s=time_s, memory_bytes=reserved_gib * GiB, slack=1.5)


@pytest.mark.parametrize(("model", "parallel", "batch", "time_s", "allocated_gib"), SIMUMAX)
def test_truncated_llama_on_b200(model, parallel, batch, time_s, allocated_gib):
    made = row(
        source={"name": "SimuMax B200 summary (Megatron-LM)", "repo": "MooreThreads/SimuMax", "date": "2026-04"},
        model=model,
        hardware={"gpu": "B200 SXM", "n_gpus": 8, "gpu_mem_gb": 180, "inter": None},
        precision="bf16",
        parallel=parallel,
        batch={"mbs": 1, "gbs": batch},
        recompute="none",
        kernels={"flash": "TransformerEngine 2.11 attention", "ce_fusion": True},
        notes="no overlap of TP/DP/P2P comm",
        measured={"peak_mem": allocated_gib, "mem_kind": "max over ranks of torch.cuda.max_memory_allocated()"},
        norm={"peak_mem_gib_range": [allocated_gib, allocated_gib]},
    )
    check(made, time_s=time_s, memory_bytes=allocated_gib * GiB)


@pytest.mark.parametrize(("model", "parallel", "micro", "time_s", "device_gb"), BIGSCIENCE)
def test_bloom_with_megatron_deepspeed(model, parallel, micro, time_s, device_gb):
    made = row(
        source={"name": "chronicles-prequel", "repo": "bigscience-workshop/bigscience", "date": "2022-02"},
        model=model,
        hardware={"n_gpus": 384, "inter": "4x OmniPath per node"},
        precision="bf16 with BF16_Optimizer" if model["layers"] == 70 else "fp16 (Megatron-DeepSpeed, ZeRO-1)",
        parallel=parallel,
        batch={"mbs": micro, "gbs": 2048},
        schedule="1F1B (DeepSpeed PipelineModule)",
        kernels=None,
        measured={"peak_mem": device_gb, "mem_kind": "nvidia-smi used memory snapshot on the first node"},
        norm={"peak_mem_gib_range": [device_gb * GB / GiB, device_gb]},
    )
    middle = device_gb * (GB + GiB) / 2
    check(made, time_s=time_s, memory_bytes=middle, slack=1.5)
