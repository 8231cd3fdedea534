"""What to hold back of a device's memory so that what is planned for fits.

Predictions count tensors. A device also holds its context and communicators, an allocator keeps more than is alive,
and published runs used more than predicted by a quantile of their residuals (`spec.memory`):

    usable = (memory - context - communicators) / (reserved_factor (1 + quantile at the confidence))
"""

from __future__ import annotations

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.memory import margin_bytes, shipped_memory
from meshwright.spec.run import FrameworkName

_COMMUNICATORS = 3  # all ranks, tensor and data parallel


def margin_of(
    memory_bytes: int, cluster: ClusterSpec, confidence: float, framework: FrameworkName = "meshwright"
) -> int:
    """Return the bytes of `memory_bytes` to hold back so that a plan fits with `confidence`; 0 on CPU ranks.

    Raises UserError when `confidence` is out of range.
    """
    excess = margin_bytes(1.0, "reserved", framework, confidence)
    if cluster.device.backend == "cpu":
        return 0
    known = shipped_memory()
    groups = _COMMUNICATORS if cluster.num_devices > 1 else 0
    left_bytes = max(0.0, memory_bytes - known.context_bytes - groups * known.communicator_bytes)
    return min(memory_bytes - 1, memory_bytes - int(left_bytes / (known.reserved_factor * (1 + excess))))
