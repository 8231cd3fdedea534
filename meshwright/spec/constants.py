"""The constants of the cost model that no data sheet gives: shipped with where each comes from.

`data/constants.yaml` holds the values, how they were fitted and on which groups of published runs. Those of a type
of device stand for all devices whose name starts with one of its prefixes; a device of no such type is priced by
the efficiencies of its own spec.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import Field

from meshwright.files import from_data
from meshwright.spec.base import NonNegativeFloat, PositiveFloat, Spec
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.shipped import read_shipped, shipped

# Batched products of one head's scores are far smaller than weight products; fitted on two types of device.
_UNFUSED_OVER_MATMUL = 0.4

Share = Annotated[float, Field(gt=0, le=1)]


class DeviceConstants(Spec):
    """Shares of a device's peaks that operators reach: of FLOP/s in 16 bit, of fp8 FLOP/s, of bytes/s of memory.

    `matmul` of large weight products, `flash2` of forward attention cores of such kernels, `unfused` of batched
    products of scores, `fp8` of weight products in fp8.
    """

    matmul_efficiency: Share
    flash2_efficiency: Share
    unfused_efficiency: Share
    memory_efficiency: Share
    fp8_efficiency: Share


class DeviceType(Spec):
    """Devices that share constants: those whose names start with one of `prefixes`."""

    name: str
    prefixes: tuple[str, ...]
    constants: DeviceConstants
    fitted_on: tuple[str, ...]


class Constants(Spec):
    """Constants of all devices, and those of the types that were fitted. `source` says how.

    `nvlink_efficiency`, `nic_efficiency`: shares of the links' bytes/s that collectives reach, on fitted types.
    `flash1_share`: rate of FlashAttention 1 over that of its successor. `exposed_share`: of communication that runs
    beside computing at NVLink's rate. `eager_factor`: bytes that eager operators move over those of fused ones, with
    RMS norms, and `eager_plain_factor` with layer norms. `fp8_copy_factor`: of the casts to fp8.
    `async_tp_factor`, `overlapped_tp_factor`: of tensor-parallel communication that is cut into pieces, and of that
    which a backward pass hides behind weight gradients. `ring_hop_s`: a rank's share of the latency of a ring.
    `straggler_share`: of the step, for each doubling of nodes. `engine_skew_s`: under DeepSpeed's pipeline engine,
    each block, micro-batch and doubling of tp. `unaligned_factor`: of batched products whose head size is no multiple
    of 8. `routed_factor`: of the visits of routed experts, which are uneven, and whose products are grouped.
    """

    nvlink_efficiency: Share
    nic_efficiency: Share
    flash1_share: Share
    exposed_share: NonNegativeFloat
    eager_factor: PositiveFloat
    eager_plain_factor: PositiveFloat
    fp8_copy_factor: PositiveFloat
    async_tp_factor: PositiveFloat
    overlapped_tp_factor: PositiveFloat
    ring_hop_s: NonNegativeFloat
    straggler_share: NonNegativeFloat
    engine_skew_s: NonNegativeFloat
    unaligned_factor: PositiveFloat
    routed_factor: PositiveFloat
    devices: tuple[DeviceType, ...]
    source: str

    def of(self, device: DeviceSpec) -> DeviceConstants:
        """Return the constants of the type of `device`, or what its own spec says."""
        for kind in self.devices:
            if device.name.startswith(kind.prefixes):
                return kind.constants
        return _of_datasheet(device)

    def is_fitted(self, device: DeviceSpec) -> bool:
        """Return whether `device` is of a type whose constants were fitted."""
        return any(device.name.startswith(kind.prefixes) for kind in self.devices)


def _of_datasheet(device: DeviceSpec) -> DeviceConstants:
    return DeviceConstants(
        matmul_efficiency=device.matmul_efficiency,
        flash2_efficiency=device.attention_efficiency,
        unfused_efficiency=_UNFUSED_OVER_MATMUL * device.matmul_efficiency,
        memory_efficiency=device.memory_efficiency,
        fp8_efficiency=device.matmul_efficiency,
    )


@cache
def shipped_constants() -> Constants:
    """Return the constants that the package ships."""
    return from_data(Constants, read_shipped(shipped("constants.yaml")), where="constants.yaml")
