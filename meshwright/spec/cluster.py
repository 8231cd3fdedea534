"""What trains: devices, and the links between them. Bytes, seconds and FLOP/s, no prefixes."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from meshwright.spec.base import Dtype, NonNegativeFloat, PositiveFloat, PositiveInt, Spec
from meshwright.spec.profile import CollectiveSample, LayerSample, UnitSample

Kernels = Literal["cpu_stock", "cuda_fused"]


class DeviceSpec(Spec):
    """One accelerator, or one CPU rank.

    `bf16_flops_per_s` and `fp32_flops_per_s` are dense peaks; `matmul_efficiency` is the share
    of them that large matrix products reach. `memory_efficiency` likewise for memory-bound
    operators. `overlap_slowdown` is the factor by which compute and communication slow each
    other down while both run (1.3 in arXiv 2307.02031, section 4.2); null where they cannot
    overlap; `communication_slowdown` is that of communication, where it was measured apart.
    `kernels` says which operator implementations run, and so what they save.
    `layer_samples` and the elements per second of optimizer and gradient accumulation, from a
    profile, go before the rates.
    `source` says where the figures come from.
    """

    name: str
    backend: Literal["cpu", "cuda"]
    memory_bytes: PositiveInt
    memory_bytes_per_s: PositiveFloat
    bf16_flops_per_s: PositiveFloat
    fp32_flops_per_s: PositiveFloat
    matmul_efficiency: PositiveFloat = 1.0
    attention_efficiency: PositiveFloat = 1.0
    memory_efficiency: PositiveFloat = 1.0
    launch_s: NonNegativeFloat = 0.0
    overlap_slowdown: PositiveFloat | None = None
    communication_slowdown: PositiveFloat | None = None
    kernels: Kernels
    layer_samples: tuple[LayerSample, ...] = ()
    optimizer_elements_per_s: PositiveFloat | None = None
    accumulate_elements_per_s: PositiveFloat | None = None
    source: str

    @model_validator(mode="after")
    def _check(self) -> DeviceSpec:
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share of the peak and at most 1, not {getattr(self, name)}")
        for name in ("overlap_slowdown", "communication_slowdown"):
            slowdown = getattr(self, name)
            if slowdown is not None and slowdown < 1:
                raise ValueError(f"{name} is at least 1, not {slowdown}")
        return self

    def peak_flops_per_s(self, dtype: Dtype) -> float:
        return self.bf16_flops_per_s if dtype == "bf16" else self.fp32_flops_per_s


class LinkSpec(Spec):
    """Latency and bandwidth of one link: a message takes latency_s + bytes / bytes_per_s.

    `bytes_per_s` is what one device reaches in one direction; `efficiency` of it is usable.
    """

    bytes_per_s: PositiveFloat
    latency_s: NonNegativeFloat
    efficiency: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _check(self) -> LinkSpec:
        if self.efficiency > 1:
            raise ValueError(f"efficiency is at most 1, not {self.efficiency}")
        return self


class ClusterSpec(Spec):
    """`num_nodes` equal nodes of `devices_per_node` equal devices; ranks count node by node.

    `collective_samples` and `unit_samples`, from a profile, go before the links for groups of their size
    and stride.
    """

    schema_version: Literal[1] = 1
    name: str
    num_nodes: PositiveInt
    devices_per_node: PositiveInt
    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec
    collective_samples: tuple[CollectiveSample, ...] = ()
    unit_samples: tuple[UnitSample, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node
