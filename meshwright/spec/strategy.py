"""How one layer is spread over the devices of its stage, and what makes that legal."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from meshwright.spec.base import PositiveInt, Spec

Inner = Literal["tp", "dp"]


class Strategy(Spec):
    """Parallel degrees of one layer: tp * dp_replicate * dp_shard * cp devices.

    `zero_stage` shards over `dp_shard` ranks: 0 nothing (dp_shard is 1), 1 optimizer states,
    2 also gradients, 3 also parameters. `dp_replicate > 1` with `dp_shard > 1` is hybrid
    sharding (HSDP). `recompute` "full" keeps only the layer's input for the backward pass.
    `inner` names the axis, tp or dp, that holds neighbouring ranks. The number of stages is
    not here: it belongs to the plan. `sequence_parallel`, `cp` and `ep` can be priced; the
    runtime refuses what it cannot run yet.
    """

    tp: PositiveInt = 1
    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    recompute: Literal["none", "full"] = "none"
    inner: Inner = "tp"
    sequence_parallel: bool = False
    cp: PositiveInt = 1
    ep: PositiveInt = 1

    @model_validator(mode="after")
    def _check(self) -> Strategy:
        if self.zero_stage == 0 and self.dp_shard > 1:
            raise ValueError(f"zero_stage 0 shards nothing, but dp_shard is {self.dp_shard}; use dp_replicate instead")
        if self.zero_stage > 0 and self.dp_shard == 1:
            raise ValueError(f"zero_stage {self.zero_stage} needs dp_shard >= 2, not 1")
        if self.inner == "dp" and (self.tp == 1 or self.dp == 1):
            raise ValueError('inner "dp" is the same as "tp" when tp or dp is 1; write inner "tp"')
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp >= 2")
        return self

    @property
    def dp(self) -> int:
        """Ranks that hold different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp * self.cp

    @property
    def sort_key(self) -> tuple[int | str | bool, ...]:
        """A total order over strategies, so that ties are broken the same way everywhere."""
        return (
            self.tp, self.dp_replicate, self.dp_shard, self.zero_stage, self.recompute,
            self.inner, self.sequence_parallel, self.cp, self.ep,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """A short name for tables: tp2-dp4, tp2-zero3x4, hsdp2x2-zero3, with -dp-inner and +recompute."""
        parts = [f"tp{self.tp}"] if self.tp > 1 else []
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"hsdp{self.dp_replicate}x{self.dp_shard}-zero{self.zero_stage}")
        elif self.dp_shard > 1:
            parts.append(f"zero{self.zero_stage}x{self.dp_shard}")
        elif self.dp_replicate > 1:
            parts.append(f"dp{self.dp_replicate}")
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if self.inner == "dp":
            parts.append("dp-inner")
        text = "-".join(parts) or "single"
        text += "+sp" if self.sequence_parallel else ""
        return text + ("+recompute" if self.recompute == "full" else "")
