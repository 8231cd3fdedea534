"""How much memory a rank has used: the rise over what the process held before the model."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size


class PeakMemory:
    """Peak bytes since it was made: allocated on the GPU, or the rise of the resident set on a CPU rank.

    On CPU the resident set also holds what the allocator keeps and communication buffers; what it
    kept from before is given back first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _give_back()
        self.baseline_bytes = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif _STATUS.exists():
            with contextlib.suppress(OSError):  # then the peak includes what came before the model
                _CLEAR.write_text(_RESET_PEAK)
            self.baseline_bytes = _status_bytes("VmRSS")

    @property
    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _status_bytes("VmHWM") - self.baseline_bytes) if _STATUS.exists() else 0


def _give_back() -> None:
    """Let glibc give freed memory back to the system; other C libraries have nothing of the kind."""
    gc.collect()  # engines hold themselves: hooks of their modules
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
