"""What a run reports: one JSON object a line, TensorBoard events, and a line on the screen. Rank 0 only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.units import show_bytes, show_seconds

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_LONGEST_LINE_BYTES = 1 << 20
_CHARTS = (
    "loss",
    "gradient_norm",
    "lr",
    "step_s",
    "tokens_per_s",
    "images_per_s",
    "mfu",
    "held_out_loss",
    "held_out_accuracy",
)


class MetricsError(UserError):
    """The run folder can no longer be written."""

    exit_code = 1


class Metrics:
    """Writes records to `folder`/metrics.jsonl and its numbers to `folder`/tensorboard."""

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(folder / METRICS_FILE)
            self._lines = (folder / METRICS_FILE).open("a", encoding="utf-8")
            self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER))
        except OSError as error:
            raise UserError(f"run-dir: {folder} cannot be written: {error.strerror}") from None
        self._folder, self._show = folder, show

    def write(self, kind: str, **values: Any) -> None:
        """Append one record and chart its known numbers at its step."""
        try:
            self._lines.write(json.dumps({"kind": kind, **values}) + "\n")
            self._lines.flush()
            self._chart(values)
        except OSError as error:
            raise MetricsError(f"step {values['step']}: {self._folder} cannot be written: {error.strerror}") from None
        try:
            self._show(_line(kind, values))
        except BrokenPipeError:  # whoever read the screen has gone; training goes on
            self._show = lambda _: None

    def close(self) -> None:
        try:
            self._lines.close()
            self._events.close()
        except OSError as error:
            raise MetricsError(f"{self._folder} cannot be written: {error.strerror}") from None

    def _chart(self, values: Mapping[str, Any]) -> None:
        for name in _CHARTS:
            if values.get(name) is not None:
                self._events.add_scalar(name, values[name], values["step"])
        for rank, peak in enumerate(values.get("peak_memory_bytes", ())):
            self._events.add_scalar(f"peak_memory_bytes/rank_{rank}", peak, values["step"])


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without an end, which a run that was killed, or a full disk, has left."""
    if not path.exists():
        return
    with path.open("rb+") as lines:
        start = max(0, lines.seek(0, os.SEEK_END) - _LONGEST_LINE_BYTES)
        lines.seek(start)
        lines.truncate(start + lines.read().rfind(b"\n") + 1)


def _line(kind: str, values: Mapping[str, Any]) -> str:
    if kind == "step":
        mfu = f"  mfu {100 * values['mfu']:.1f} %" if values["mfu"] is not None else ""
        return (
            f"step {values['step']:>5}  loss {values['loss']:.4f}  norm {values['gradient_norm']:.3f}  "
            f"lr {values['lr']:.2e}  {show_seconds(values['step_s'])}/step  "
            f"{_rate(values)}{mfu}  peak {show_bytes(max(values['peak_memory_bytes']))}"
        )
    if kind == "held_out":
        accuracy = values.get("held_out_accuracy")
        what = "tokens" if accuracy is None else f"samples  accuracy {100 * accuracy:.2f} %"
        return (
            f"step {values['step']:>5}  held-out loss {values['held_out_loss']:.4f} over {values['num_tokens']} {what}"
        )
    if kind == "checkpoint":
        return f"step {values['step']:>5}  checkpoint {values['path']}"
    return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in values.items())


def _rate(values: Mapping[str, Any]) -> str:
    what = "tokens" if "tokens_per_s" in values else "images"
    return f"{values[f'{what}_per_s']:,.0f} {what}/s"
