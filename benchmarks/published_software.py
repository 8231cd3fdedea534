"""The software of a published record: framework, kernels, held bytes, recomputation; read from its text fields.

A framework is recognised by the words of `parallel.fsdp`, `precision`, `optimizer`, `schedule`, `measured.mem_kind`
and of the source's repository. Where a record is silent, the habit of its framework at its date is taken and noted
in `assumed`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from published_models import MissingField

from meshwright.spec.run import FrameworkName, HeldBytes, Recompute, Software

_FLASH2_SINCE = "2023-07"  # arXiv 2307.08691
_SDPA_SINCE = "2023-12"  # transformers 4.36 calls PyTorch's scaled_dot_product_attention by default
_ASYNC_TP_BACKWARD_SINCE = 2022  # Megatron-LM: input gradients are reduced while weight gradients are computed
_FP16_GRADIENTS_UNTIL = 2022  # Megatron-LM: fp32 main gradients were for bf16 only
# From about PyTorch 2.8 on, peaks of torchtitan runs with compiled loss are 16 GiB lower at 128k vocabulary and 8k
# tokens: the same page prints both (pytorch/ao, torchao/float8/README.md; H100 with 2.7, MI300X with 2.9).
_COMPILED_LOSS_IN_PLACE_SINCE = "2025-05"
# When the software ran, where the page says something else than its own date: file and GPU.
_STATED_DATES = {("torchao/float8/README.md", "H100"): "2025-03 (PyTorch 2.7.0a0, torchtitan 0.0.2)"}
# NVIDIA's recipes on top of Megatron Core: overlap of all communication, fused cross-entropy and no dropout by default.
_RECIPES_ON_MEGATRON = re.compile(r"\bnemo\b|megatron-bridge|dgxc-benchmarking|megascale")
_TORCHTUNE_LOSS_CHUNKS = 8  # torchtune's CEWithChunkedOutputLoss


def text_of(record: Mapping[str, Any]) -> str:
    """Return the free text of `record` that tells its software, lower case."""
    parallel, source = record["parallel"], record["source"]
    parts = [
        record.get("precision"), record.get("optimizer"), record.get("schedule"), parallel.get("fsdp"),
        record["measured"].get("mem_kind"), source.get("repo"), source.get("name"), record.get("notes"),
        parallel.get("other"),
    ]  # fmt: skip
    return " | ".join(str(part) for part in parts if part).lower()


def framework_of(record: Mapping[str, Any], assumed: list[str]) -> FrameworkName:
    """Return the framework that the words of `record` point to."""
    text, parallel = text_of(record), record["parallel"]
    fsdp = str(parallel.get("fsdp") or "").lower()
    splits_model = any((parallel.get(name) or 1) > 1 for name in ("tp", "pp", "cp", "ep"))
    if re.search(r"interne?vo|internlm", text):
        return "internevo"
    if "galvatron" in text:
        assumed.append("framework meshwright (as Galvatron: FSDP shards around tensor-parallel modules)")
        return "meshwright"
    if re.search(r"torchtitan|pytorch/ao\b", text) or "fsdp2" in fsdp:
        return "torchtitan"
    if "fsdp" in fsdp:
        return "fsdp"
    if "deepspeed" in text:
        has_megatron = "megatron" in text or "pipeline" in text or splits_model
        return "megatron-deepspeed" if has_megatron and parallel.get("zero") != 3 else "deepspeed"
    if parallel.get("zero") == 3:
        assumed.append("framework deepspeed (ZeRO-3 without FSDP)")
        return "deepspeed"
    if "megatron" not in text:
        is_fp16 = "fp16" in str(record.get("precision") or "").lower()
        guess: FrameworkName = "megatron" if splits_model or parallel.get("zero") or is_fp16 else "fsdp"
        assumed.append(f"framework {guess}")
        return guess
    return "megatron"


def software_of(record: Mapping[str, Any], framework: FrameworkName, clock: float, assumed: list[str]) -> Software:
    """Return kernels, loss, compilation, precision and overlap of `record`."""
    kernels, text = _kernels(record), text_of(record)
    forbids_overlap = bool(re.search(r"no overlap|non-overlap", text))
    shards = framework in ("fsdp", "torchtitan", "internevo", "deepspeed", "meshwright")
    has_recipe = framework == "megatron" and bool(_RECIPES_ON_MEGATRON.search(text))
    if has_recipe:
        assumed.append("overlap and fused loss of NVIDIA's recipes")
    overlap_text = "overlap-grad-reduce overlap-param-gather" if has_recipe else str(kernels.get("overlap", ""))
    fp8 = _fp8(record, kernels)
    operators = _operators(record, framework, kernels, assumed)
    loss, chunks = _loss(record, framework, operators, kernels, assumed)
    return Software(
        attention=_attention(record, framework, kernels, assumed),
        loss=loss,
        loss_chunks=chunks,
        operators=operators,
        fp8=fp8,
        fp8_gather=fp8 != "none" and _gathers_fp8(record, framework, fp8, assumed),
        async_tp=kernels.get("async_tp") is True,
        overlaps_tp_backward=framework == "megatron"
        and _year(record) >= _ASYNC_TP_BACKWARD_SINCE
        and not forbids_overlap,
        overlaps_gradients=not forbids_overlap and (shards or "overlap-grad-reduce" in overlap_text),
        overlaps_parameters=not forbids_overlap and "overlap-param-gather" in overlap_text,
        clock=clock,
    )


def held_of(record: Mapping[str, Any], framework: FrameworkName) -> HeldBytes | None:
    """Return the bytes a parameter where `record` says something else than its framework's default, else None."""
    precision, optimizer = str(record.get("precision") or "").lower(), str(record.get("optimizer") or "").lower()
    is_16_bit_pure = bool(re.search(r"pure|bf16-true|full bf16", precision))
    if is_16_bit_pure or "8-bit" in optimizer:
        in_backward = "in backward" in optimizer or "in-backward" in optimizer or "8-bit" in optimizer
        weight_bytes = 2 if is_16_bit_pure else 4
        return HeldBytes(
            parameter_bytes=weight_bytes,
            gradient_bytes=0 if in_backward and is_16_bit_pure else weight_bytes,
            optimizer_bytes=2 if "8-bit" in optimizer else 2 * weight_bytes,
            reduce_bytes=weight_bytes,
        )
    if "bf16_optimizer" in precision:  # bf16 gradients and their fp32 sum, neither sharded
        return HeldBytes(parameter_bytes=2, gradient_bytes=6, optimizer_bytes=12, reduce_bytes=4)
    if "fp16" in precision and framework == "megatron" and _year(record) < _FP16_GRADIENTS_UNTIL:
        return HeldBytes(parameter_bytes=2, gradient_bytes=2, optimizer_bytes=16, reduce_bytes=2)
    return None


def refuse_precision(record: Mapping[str, Any]) -> None:
    """Raise MissingField where `record` computes in a precision that no run can say."""
    text = str(record.get("precision") or "").lower()
    if "fp4" in text or (re.search(r"fp32|float32|tf32", text) and not re.search(r"bf16|fp16|amp|mixed|fp8", text)):
        raise MissingField(f"precision ({text})")


def recompute_of(record: Mapping[str, Any], assumed: list[str]) -> tuple[Recompute, int]:
    """Return what is recomputed, and of every how-manieth layer."""
    text = record.get("recompute")
    if text is None:
        assumed.append("no recomputation")
        return "none", 1
    text = str(text).lower()
    if re.search(r"every 2nd|selective layer", text):
        return "full", 2
    if re.search(r"per-op|selective op|\bop sac", text):
        return "operators", 1
    if re.match(r"none|no\b|off|without|disabled", text):
        return "none", 1
    if re.match(r"full|on\b|yes|uniform|(activation|gradient) checkpointing|checkpoint", text):
        return "full", 1
    if text.startswith("selective"):
        return "attention", 1
    raise MissingField(f"recompute ({text!r} is no uniform rule)")


def has_dropout(record: Mapping[str, Any], family: str, assumed: list[str]) -> bool:
    """Return whether activations are dropped: GPT-2's and Megatron's default of 0.1, that MPT and llama turn off."""
    drops = family in ("gpt", "bert") and "no bias" not in str(record["model"].get("arch") or "")
    drops = drops and not _RECIPES_ON_MEGATRON.search(text_of(record))
    if drops:
        assumed.append("dropout")
    return drops


def date_of(record: Mapping[str, Any]) -> str:
    """Return when the software is from: what the page says of it, else the date of the source (year, month)."""
    source = record["source"]
    stated = _STATED_DATES.get((str(source.get("path")), str(record["hardware"].get("gpu"))))
    return stated or str(source.get("date") or "")


def _year(record: Mapping[str, Any]) -> int:
    found = re.match(r"\d{4}", date_of(record))
    return int(found.group(0)) if found else 0


def _kernels(record: Mapping[str, Any]) -> Mapping[str, Any]:
    kernels = record.get("kernels")
    if isinstance(kernels, Mapping):
        return kernels
    return {"text": kernels} if kernels else {}


def _attention(
    record: Mapping[str, Any], framework: FrameworkName, kernels: Mapping[str, Any], assumed: list[str]
) -> Any:
    stated = kernels.get("flash")
    text = " ".join(str(kernels.get(name) or "") for name in ("attention", "attention_backend", "text")).lower()
    calls_pytorch = framework in ("fsdp", "meshwright") and date_of(record) >= _SDPA_SINCE
    if stated is False and calls_pytorch:
        assumed.append("attention flash2 (PyTorch's own instead of the flash-attn package)")
        return "flash2"
    if stated is False or re.search(r"unfused|local", text):
        return "unfused"
    if "mpt" in str(record["model"].get("arch") or "").lower():
        assumed.append("attention flash1 (MPT)")
        return "flash1"
    if stated is True:
        return "flash2" if date_of(record) >= _FLASH2_SINCE else "flash1"
    if stated or re.search(r"flash|ring|sdpa|cudnn|fused", text) or "transformer_engine" in str(kernels):
        if not stated and not text.strip():
            assumed.append("attention flash2 (Transformer Engine)")
        return "flash2"
    has_flash2 = not re.search(r"v100|t4\b|titan rtx|2080", str(record["hardware"].get("gpu") or "").lower())
    modern = has_flash2 and (framework in ("torchtitan", "fsdp", "internevo", "meshwright") or _year(record) >= 2024)
    assumed.append(f"attention {'flash2' if modern else 'unfused'}")
    return "flash2" if modern else "unfused"


def _operators(
    record: Mapping[str, Any], framework: FrameworkName, kernels: Mapping[str, Any], assumed: list[str]
) -> Any:
    if "compile" in kernels:
        return "fused" if kernels["compile"] else "eager"
    compiler = str(kernels.get("compiler") or "")
    if compiler:
        return "eager" if compiler == "eager" else "fused"
    if kernels.get("fused") or framework in ("megatron", "megatron-deepspeed"):
        return "fused"
    if "galvatron" in text_of(record) and kernels.get("flash"):
        assumed.append("operators fused (flash-attention's modules in Galvatron)")
        return "fused"
    if kernels.get("async_tp") or (framework == "torchtitan" and kernels.get("fp8")):
        assumed.append("compiled (needed by async TP and float8)")
        return "fused"
    if framework != "internevo":
        assumed.append("operators eager")
    return "eager"


def _loss(
    record: Mapping[str, Any],
    framework: FrameworkName,
    operators: str,
    kernels: Mapping[str, Any],
    assumed: list[str],
) -> tuple[Any, int]:
    chunks = _TORCHTUNE_LOSS_CHUNKS if kernels.get("chunked_ce") else 1
    fused_text = str(kernels.get("fused") or "").lower()
    if kernels.get("ce_fusion") or re.search(r"\bce\b|cross.?entropy", fused_text):
        return "fused", chunks
    if framework in ("megatron", "megatron-deepspeed"):
        return "fused" if _RECIPES_ON_MEGATRON.search(text_of(record)) else "vocab_parallel", chunks
    is_mpt = "mpt" in str(record["model"].get("arch") or "").lower()
    if is_mpt or framework == "internevo" or kernels.get("fused") is True:
        assumed.append("loss fused (flash-attention's cross-entropy)")
        return "fused", chunks
    if framework == "deepspeed":
        return "vocab_parallel" if "megatron" in text_of(record) else "eager", chunks
    if framework == "torchtitan" and (record["parallel"].get("tp") or 1) > 1:
        assumed.append("loss parallel (torchtitan's default with tensor parallelism)")
        return "vocab_parallel", chunks
    if operators == "eager":
        return "eager", chunks
    if framework == "torchtitan" and date_of(record) >= _COMPILED_LOSS_IN_PLACE_SINCE:
        assumed.append("loss compiled in place")
        return "fused", chunks
    return "compiled", chunks


def _fp8(record: Mapping[str, Any], kernels: Mapping[str, Any]) -> Any:
    text = str(record.get("precision") or "").lower()
    if not re.search(r"fp8|float8", text) or kernels.get("fp8") is False:
        return "none"
    if "grouped gemm" in text and "linear" not in text:
        return "none"
    return "rowwise" if re.search(r"rowwise|mxfp8", text) else "tensorwise"


def _gathers_fp8(record: Mapping[str, Any], framework: FrameworkName, fp8: str, assumed: list[str]) -> bool:
    text = str(record.get("precision") or "").lower()
    if re.search(r"all-gather fp8|fp8 all-gather", text):
        return True
    if framework != "torchtitan" or fp8 == "rowwise" or "bf16 all-gather" in text or "nocompile" in text:
        return False
    assumed.append("fp8 gather")
    return True
