"""What was measured on real ranks: samples, never fits. `cost.fit` makes fits from them.

Every sample holds the median of its repeats and its spread: half the range between the repeats,
over the median. Two runs agree when their intervals `seconds * (1 +- spread)` meet.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshwright.spec.base import Dtype, NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from meshwright.spec.model import LayerSpec
from meshwright.spec.tensors import Lengths

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
UnitOp = Literal["gather", "reduce_scatter", "all_reduce", "accumulate"]
Key = tuple[object, ...]
# A picosecond to a week, and up to a pebibyte: beyond that a file is broken.
Seconds = Annotated[float, Field(ge=1e-12, le=6e5)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
Slowdown = Annotated[float, Field(ge=0.01, le=1e3)]


class Sample(Spec):
    """One measurement: what was measured (its `key`), and the figures that came out (`FIGURES`)."""

    FIGURES: ClassVar[frozenset[str]] = frozenset({"seconds", "spread", "repeats"})

    spread: NonNegativeFloat = 0.0
    repeats: PositiveInt = 1

    @property
    def key(self) -> Key:
        """What this is a sample of: its kind and every field that is not a figure."""
        wanted = (name for name in type(self).model_fields if name not in self.FIGURES)
        return type(self).__name__, *((name, getattr(self, name)) for name in wanted)

    def joined(self, other: Self) -> Self:
        """Return one sample of both measurements of the same thing: means, and a spread that covers both."""
        share = self.repeats / (self.repeats + other.repeats)
        update: dict[str, object] = {"repeats": self.repeats + other.repeats}
        spread = max(self.spread, other.spread)
        for name in self.FIGURES - {"spread", "repeats"}:
            mine, theirs = getattr(self, name), getattr(other, name)
            mean = share * mine + (1 - share) * theirs
            update[name] = round(mean) if isinstance(mine, int) else mean
            spread = max(spread, abs(mine - theirs) / 2 / mean if mean else 0.0)
        return self.model_copy(update={**update, "spread": spread})


class MatmulSample(Sample):
    """A square-ish matrix product (m, k) x (k, n), all `busy_ranks` ranks running it at once."""

    dtype: Dtype
    m: PositiveInt
    k: PositiveInt
    n: PositiveInt
    busy_ranks: PositiveInt
    seconds: Seconds


class CopySample(Sample):
    """An elementwise pass that reads and writes `moved_bytes` in total."""

    moved_bytes: PositiveInt
    busy_ranks: PositiveInt
    seconds: Seconds


class LaunchSample(Sample):
    """One tiny operator: what an operator costs beside the work in it."""

    busy_ranks: PositiveInt
    seconds: Seconds


class LayerSample(Sample):
    """One layer on the shapes that a tensor-parallel rank has, without collectives, all ranks busy.

    Measured in a stack of such layers, as a step runs them. `saved_bytes` is what autograd keeps
    of a forward pass, input included and parameters not; `transient_bytes` what is alive beside
    it, at most, in the backward pass, without the parameters' gradients. `met_forward_s`,
    `met_backward_s`: a pass after which all ranks wait for the slowest of them, less what they
    say to each other takes. (0: not measured.)
    """

    FIGURES: ClassVar[frozenset[str]] = frozenset(
        {
            "forward_s", "backward_s", "met_forward_s", "met_backward_s", "saved_bytes", "transient_bytes",
            "spread", "repeats",
        }
    )  # fmt: skip

    layer: LayerSpec
    tp: PositiveInt
    samples_per_rank: PositiveInt
    seq_len: PositiveInt
    target_seq_len: NonNegativeInt = 0
    dtype: Dtype
    busy_ranks: PositiveInt
    forward_s: Seconds
    backward_s: Seconds
    met_forward_s: Seconds | Literal[0] = 0
    met_backward_s: Seconds | Literal[0] = 0
    saved_bytes: Bytes = 0
    transient_bytes: Bytes = 0

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.seq_len, self.target_seq_len)


class OptimizerSample(Sample):
    """The end of a step on `num_elements` parameters of a rank: norm, clipping, AdamW."""

    num_elements: PositiveInt
    busy_ranks: PositiveInt
    seconds: Seconds


class AccumulateSample(Sample):
    """Adding one micro-batch's gradients of `num_elements` parameters to those of the ones before."""

    num_elements: PositiveInt
    dtype: Dtype
    busy_ranks: PositiveInt
    seconds: Seconds


class CollectiveSample(Sample):
    """One collective over `num_ranks` ranks that lie `stride` apart, on `num_nodes` nodes.

    `message_bytes` is the whole tensor: what an all_reduce reduces, an all_gather or
    all_to_all returns, a reduce_scatter takes in, a send carries. `seconds` are what it adds to
    ranks that compute in between.
    """

    op: CollectiveOp
    dtype: Dtype = "fp32"
    num_ranks: PositiveInt
    stride: PositiveInt
    num_nodes: PositiveInt = 1
    message_bytes: PositiveInt
    seconds: Seconds


class UnitSample(Sample):
    """What the data-parallel runtime adds to one pass of one layer that it holds: the collective and all around it.

    `gather`: parameters gathered for a pass. `reduce_scatter`, `all_reduce`: gradients reduced
    after a backward pass. `accumulate`: gradients kept until a later one. `message_bytes` as in
    CollectiveSample.
    """

    op: UnitOp
    dtype: Dtype
    num_ranks: PositiveInt
    stride: PositiveInt
    num_nodes: PositiveInt = 1
    message_bytes: PositiveInt
    seconds: Seconds


class OverlapSample(Sample):
    """How much slower compute and a collective each are while both run (arXiv 2307.02031, section 4.2)."""

    FIGURES: ClassVar[frozenset[str]] = frozenset({"compute_slowdown", "communication_slowdown", "spread", "repeats"})

    op: CollectiveOp
    num_ranks: PositiveInt
    message_bytes: PositiveInt
    compute_slowdown: Slowdown
    communication_slowdown: Slowdown


class Profile(Spec):
    """Samples of one machine, with the versions that made them.

    `is_complete` is false while measuring goes on, or when it was interrupted: what is there is whole.
    """

    schema_version: Literal[1] = 1
    device: str
    backend: Literal["cpu", "cuda"]
    num_ranks: PositiveInt
    ranks_per_node: PositiveInt = 1
    torch_version: str
    is_complete: bool = True
    matmuls: tuple[MatmulSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    launches: tuple[LaunchSample, ...] = ()
    layers: tuple[LayerSample, ...] = ()
    optimizers: tuple[OptimizerSample, ...] = ()
    accumulations: tuple[AccumulateSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    units: tuple[UnitSample, ...] = ()
    overlaps: tuple[OverlapSample, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Profile:
        for name in SAMPLE_FIELDS:
            samples = getattr(self, name)
            if len({sample.key for sample in samples}) < len(samples):
                raise ValueError(f"{name} holds two samples of the same thing; keep one of them")
        return self

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, in the order of their fields."""
        return tuple(sample for name in SAMPLE_FIELDS for sample in getattr(self, name))

    def with_samples(self, samples: tuple[Sample, ...], *, is_complete: bool) -> Profile:
        """Return the profile of the same machine with these samples instead."""
        kinds = {name: tuple(s for s in samples if isinstance(s, kind)) for name, kind in SAMPLE_FIELDS.items()}
        return self.model_copy(update={**kinds, "is_complete": is_complete})


SAMPLE_FIELDS: dict[str, type[Sample]] = {
    "matmuls": MatmulSample,
    "copies": CopySample,
    "launches": LaunchSample,
    "layers": LayerSample,
    "optimizers": OptimizerSample,
    "accumulations": AccumulateSample,
    "collectives": CollectiveSample,
    "units": UnitSample,
    "overlaps": OverlapSample,
}
