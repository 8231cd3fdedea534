"""Bytes, seconds and counts between people and the program: the only place that scales a unit.

Inside the program everything is plain bytes and seconds. KB, MB, GB, TB are powers of 1000;
KiB, MiB, GiB, TiB are powers of 1024.
"""

from __future__ import annotations

import math
import re

from meshwright.errors import UserError
from meshwright.files import shorten

KiB = 1024
MiB = 1024**2
GiB = 1024**3
TiB = 1024**4
GB = 1000**3

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": GB,
    "tb": 1000**4,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
}
_NUMBER_AND_UNIT = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str, *, field: str = "memory") -> int:
    """Return the bytes that `text` means: "80GiB", "512 MB", "1.5e9".

    Raises UserError, naming `field`, when `text` is not a positive size.
    """
    match = _NUMBER_AND_UNIT.match(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise UserError(
            f"{field}: {shorten(text)} is not a size; write a number and a unit, such as 80GiB, 40GB or 512MiB"
        )
    value = float(match.group(1)) * _BYTE_UNITS[unit]
    if not math.isfinite(value) or value < 1:
        raise UserError(f"{field}: {shorten(text)} is not a positive number of bytes")
    if not unit and value < MiB:
        raise UserError(f"{field}: {shorten(text)} would be {value:g} bytes; write a unit, such as {text.strip()}GiB")
    return int(value)


def show_bytes(num_bytes: float) -> str:
    """Return `num_bytes` for the screen, in binary units with three significant digits."""
    for unit, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= scale:
            return f"{_three_digits(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """Return `seconds` for the screen: 2.41 s, 35.2 ms, 8.10 us."""
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def show_count(count: float) -> str:
    """Return a count for the screen: 124M, 6.74B, 512."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)}{unit}"
    return f"{count:g}"


def show_percent(fraction: float) -> str:
    """Return a fraction as a signed percentage: +3.1 %."""
    return f"{100 * fraction:+.1f} %"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004 three significant digits
    return f"{value:.{digits}f}"


def several(count: int, what: str, ending: str = "s") -> str:
    """Return a number of things in words: 1 stage, 2 stages."""
    return f"{count:,} {what}{ending if count != 1 else ''}"
