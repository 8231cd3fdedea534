"""How the model is trained, and what memory may be spent on it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from meshwright.errors import UserError
from meshwright.files import shorten
from meshwright.spec.base import LONGEST_SEQ, Dtype, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from meshwright.spec.tensors import Lengths
from meshwright.units import show_bytes

_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*")
_RANGE = re.compile(r"\s*([0-9]{1,9})\s*\.\.\s*([0-9]{1,9})\s*")
LARGEST_BATCH = 1 << 20
BatchSize = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]


class BatchRange(Spec):
    """The global batch sizes from `smallest` to `largest` that the search may choose from."""

    smallest: BatchSize
    largest: BatchSize

    @model_validator(mode="after")
    def _check(self) -> BatchRange:
        if self.smallest > self.largest:
            raise ValueError(f"smallest ({self.smallest}) is above largest ({self.largest})")
        return self


class AdamW(Spec):
    """Adam with decoupled weight decay; two fp32 states a parameter.

    Weight decay applies to matrices, not to norms and biases. The learning rate rises linearly
    over `warmup_steps` and then follows a cosine down to `final_lr_fraction` of its peak.
    """

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 3e-4
    beta1: NonNegativeFloat = 0.9
    beta2: NonNegativeFloat = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    final_lr_fraction: NonNegativeFloat = 0.1

    @model_validator(mode="after")
    def _check(self) -> AdamW:
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, not {getattr(self, name)}")
        if self.final_lr_fraction > 1:
            raise ValueError(f"final_lr_fraction must be at most 1, not {self.final_lr_fraction}")
        return self


class JobSpec(Spec):
    """One training job.

    `global_batch_size` counts samples of `seq_len` tokens per optimizer step over the whole
    cluster: a number, a range, or "auto" (the search raises it until nothing fits). Of an encoder-decoder `seq_len`
    is the source's length, and `target_seq_len` the decoder's; of an image model it is the number of its patches.
    `dropout` is the share of hidden states that training drops (models/dropout.py).
    `param_dtype` is what layers compute in, `reduce_dtype` what gradients are summed in,
    `master_dtype` what the optimizer holds.
    """

    global_batch_size: BatchSize | BatchRange | Literal["auto"]
    seq_len: Annotated[int, Field(ge=1, le=LONGEST_SEQ)]
    target_seq_len: Annotated[int, Field(ge=1, le=LONGEST_SEQ)] | None = None
    param_dtype: Dtype = "bf16"
    reduce_dtype: Dtype = "fp32"
    master_dtype: Literal["fp32"] = "fp32"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    optimizer: AdamW = AdamW()

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.seq_len, self.target_seq_len or 0)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of one sample, an encoder's and a decoder's."""
        return self.seq_len + (self.target_seq_len or 0)

    @property
    def batch_size(self) -> int:
        """The global batch size when it is one number; UserError otherwise."""
        if not isinstance(self.global_batch_size, int):
            raise UserError(f"global_batch_size: a single number is needed here, not {self.global_batch_size}")
        return self.global_batch_size


class Budget(Spec):
    """Memory one device may use. `reserved_bytes` of it is held back and always shown."""

    memory_bytes: PositiveInt
    reserved_bytes: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check(self) -> Budget:
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"reserved_bytes ({show_bytes(self.reserved_bytes)}) leaves nothing of "
                f"{show_bytes(self.memory_bytes)} of memory; reserve less"
            )
        return self

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


def parse_batch(text: str) -> int | BatchRange | Literal["auto"]:
    """Return what `--global-batch` means: "64", "8..512" or "auto"."""
    if text.strip() == "auto":
        return "auto"
    if match := _RANGE.fullmatch(text):
        smallest, largest = int(match.group(1)), int(match.group(2))
        if 1 <= smallest <= largest <= LARGEST_BATCH:
            return BatchRange(smallest=smallest, largest=largest)
        if smallest > largest:
            raise UserError(f"global-batch: {shorten(text)} is not a batch size: the smaller one comes first")
    elif (match := _NUMBER.fullmatch(text)) and 1 <= int(match.group(1)) <= LARGEST_BATCH:
        return int(match.group(1))
    raise UserError(
        f"global-batch: {shorten(text)} is not a batch size; write 64, 8..512 or auto, up to {LARGEST_BATCH} samples"
    )
