"""What was measured on real ranks: samples, never fits. `cost.fit` makes fits from them."""

from __future__ import annotations

from typing import Literal

from meshwright.spec.base import Dtype, NonNegativeFloat, PositiveFloat, PositiveInt, Spec
from meshwright.spec.model import LayerSpec

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


class MatmulSample(Spec):
    """A square-ish matrix product (m, k) x (k, n), all `busy_ranks` ranks running it at once."""

    dtype: Dtype
    m: PositiveInt
    k: PositiveInt
    n: PositiveInt
    busy_ranks: PositiveInt
    seconds: PositiveFloat


class CopySample(Spec):
    """An elementwise pass that reads and writes `moved_bytes` in total."""

    moved_bytes: PositiveInt
    busy_ranks: PositiveInt
    seconds: PositiveFloat


class LaunchSample(Spec):
    """One tiny operator: what an operator costs beside the work in it."""

    busy_ranks: PositiveInt
    seconds: PositiveFloat


class LayerSample(Spec):
    """One layer on the shapes that a tensor-parallel rank has, without collectives, all ranks busy.

    Seconds are medians; `spread` is half their interquartile range over the median.
    """

    layer: LayerSpec
    tp: PositiveInt
    samples_per_rank: PositiveInt
    seq_len: PositiveInt
    dtype: Dtype
    busy_ranks: PositiveInt
    forward_s: PositiveFloat
    backward_s: PositiveFloat
    spread: NonNegativeFloat = 0.0


class OptimizerSample(Spec):
    """One AdamW step on `num_elements` parameters of a rank."""

    num_elements: PositiveInt
    busy_ranks: PositiveInt
    seconds: PositiveFloat


class CollectiveSample(Spec):
    """One collective over `num_ranks` ranks that lie `stride` apart.

    `message_bytes` is the whole tensor: what an all_reduce reduces, an all_gather or
    all_to_all returns, a reduce_scatter takes in, a send carries.
    """

    op: CollectiveOp
    num_ranks: PositiveInt
    stride: PositiveInt
    message_bytes: PositiveInt
    seconds: PositiveFloat
    spread: NonNegativeFloat = 0.0


class Profile(Spec):
    """Samples of one machine, with the versions that made them."""

    schema_version: Literal[1] = 1
    device: str
    backend: Literal["cpu", "cuda"]
    num_ranks: PositiveInt
    torch_version: str
    matmuls: tuple[MatmulSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    launches: tuple[LaunchSample, ...] = ()
    layers: tuple[LayerSample, ...] = ()
    optimizers: tuple[OptimizerSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
