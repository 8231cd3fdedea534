"""A training run of any framework, described uniformly: what `predict` and published measurements speak of.

A `Plan` gives every layer its own strategy and is what this project trains. A run gives one strategy
to all layers, in Megatron's terms (`micro_batch_size` counts samples of one replica), and says which
software runs it, because that decides what is held in which dtype, what is gathered when, and how
fast operators are.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from meshwright.spec.base import LONGEST_SEQ, PositiveFloat, PositiveInt, Spec
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import BatchSize
from meshwright.spec.model import BlockLayer, ModelSpec

FrameworkName = Literal["meshwright", "megatron", "megatron-deepspeed", "deepspeed", "fsdp", "torchtitan", "internevo"]
MemoryKind = Literal["allocated", "reserved", "device"]
Recompute = Literal["none", "full", "attention", "operators"]


class Software(Spec):
    """What decides speed and memory beside the degrees: kernels, loss, compilation, precision, overlap.

    `attention`: flash2 (FlashAttention-2 and later, cuDNN), flash1, or unfused (scores in memory).
    `loss`: which temporaries a logit costs: eager PyTorch, compiled, Megatron's vocabulary-parallel
    cross-entropy (vocab_parallel), its fused form or any in-place one (fused); `loss_chunks` > 1: in so many parts.
    `operators`: norms, activations and residuals fused (by hand or compiled) or eager, one kernel each.
    `fp8`: dtype recipe of the matrix products of blocks; `fp8_gather`: parameters are gathered in fp8.
    `clock`: share of the boost clock that the power limit leaves.
    """

    attention: Literal["flash2", "flash1", "unfused"] = "flash2"
    loss: Literal["eager", "compiled", "vocab_parallel", "fused"] = "eager"
    loss_chunks: PositiveInt = 1
    operators: Literal["fused", "eager"] = "fused"
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    fp8_gather: bool = False
    async_tp: bool = False
    overlaps_tp_backward: bool = False
    overlaps_gradients: bool = True
    overlaps_parameters: bool = False
    clock: Annotated[float, Field(gt=0, le=1)] = 1.0


class HeldBytes(Spec):
    """Bytes a parameter that a rank holds from step to step, and which of them are sharded.

    `reduce_bytes` is what one gradient element is reduced in; `gather_bytes` what one parameter is gathered in.
    """

    parameter_bytes: Annotated[float, Field(ge=0)]
    gradient_bytes: Annotated[float, Field(ge=0)]
    optimizer_bytes: Annotated[float, Field(ge=0)]
    reduce_bytes: PositiveFloat
    gather_bytes: PositiveFloat = 2


class RunSpec(Spec):
    """One uniform hybrid-parallel run. Data-parallel ranks are what tp, cp and pp leave of the devices.

    `micro_batch_size` counts samples of one data-parallel rank; `virtual_stages` are model chunks a device
    (interleaved 1F1B); `shard_ranks` over how many ranks ZeRO shards (None: all of dp x cp); `ep` splits the
    experts over that many of the dp x cp ranks. `recompute`: full keeps a layer's input, attention only drops the
    attention core, operators keeps the matrix products by a per-operator policy (torchtitan); it is applied to every
    `recompute_every`-th layer. `held` None: as the framework does by default.
    """

    schema_version: Literal[1] = 1
    model: ModelSpec
    cluster: ClusterSpec
    framework: FrameworkName
    software: Software = Software()
    held: HeldBytes | None = None
    seq_len: Annotated[int, Field(ge=1, le=LONGEST_SEQ)]
    global_batch_size: BatchSize
    micro_batch_size: PositiveInt
    tp: PositiveInt = 1
    sequence_parallel: bool = False
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    virtual_stages: PositiveInt = 1
    ep: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    shard_ranks: PositiveInt | None = None
    recompute: Recompute = "none"
    recompute_every: PositiveInt = 1
    dropout: bool = False
    schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @model_validator(mode="after")
    def _check(self) -> RunSpec:
        if not self.model.is_decoder_only:
            raise ValueError(f"model: only runs of causal decoders are priced, and {self.model.name} is none")
        split = self.tp * self.cp * self.pp
        if self.cluster.num_devices % split:
            raise ValueError(
                f"tp x cp x pp ({self.tp} x {self.cp} x {self.pp}) must divide {self.cluster.num_devices} devices"
            )
        if self.global_batch_size % (self.dp * self.micro_batch_size):
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of dp x micro_batch_size "
                f"({self.dp} x {self.micro_batch_size})"
            )
        self._check_sequence()
        self._check_sharing()
        self._check_stages()
        return self

    def _check_sequence(self) -> None:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp >= 2")
        parts = self.cp * (self.tp if self.sequence_parallel else 1)
        if self.seq_len % parts:
            raise ValueError(f"seq_len ({self.seq_len}) must be a multiple of {parts}, the ranks that split it")

    def _check_sharing(self) -> None:
        ranks = self.dp * self.cp
        if ranks % self.ep:
            raise ValueError(f"ep ({self.ep}) must divide dp x cp ({ranks})")
        blocks = (group.layer for group in self.model.groups if isinstance(group.layer, BlockLayer))
        if self.ep > 1 and all(block.mlp.experts is None for block in blocks):
            raise ValueError(f"ep ({self.ep}) splits experts, but {self.model.name} has none")
        if self.shard_ranks is not None and ranks % self.shard_ranks:
            raise ValueError(f"shard_ranks ({self.shard_ranks}) must divide dp x cp ({ranks})")
        if self.shard_ranks not in (None, 1) and self.zero_stage == 0:
            raise ValueError(f"shard_ranks ({self.shard_ranks}) needs zero_stage 1, 2 or 3")

    def _check_stages(self) -> None:
        if self.virtual_stages > 1 and (self.pp == 1 or self.schedule == "gpipe"):
            raise ValueError("virtual_stages above 1 need pp >= 2 and schedule 1f1b")
        if self.pp * self.virtual_stages > self.model.num_blocks:
            raise ValueError(
                f"pp x virtual_stages ({self.pp * self.virtual_stages}) is more than {self.model.num_blocks} blocks"
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.cluster.num_devices // (self.tp * self.cp * self.pp)

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shards; 1 without ZeRO."""
        return (self.shard_ranks or self.dp * self.cp) if self.zero_stage else 1
