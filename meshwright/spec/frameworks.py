"""What each framework does unless a run says otherwise: who holds what in which dtype, kernels, loss, overlaps.

The values are data, each with its source: `data/frameworks.yaml`. A run says otherwise through its own `software`
and `held`.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from meshwright.files import from_data
from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, Spec
from meshwright.spec.run import FrameworkName, HeldBytes, RunSpec, Software
from meshwright.spec.shipped import read_shipped, shipped

Loss = Literal["eager", "compiled", "vocab_parallel", "fused"]


class Framework(Spec):
    """How one framework trains. Bytes are per parameter, per logit or per element, as said; `sources` by field.

    `holds_masters`: the parameters held are the fp32 masters, sharded with the optimizer's states, and a 16-bit copy
    is made to compute with (kept from forward to backward below ZeRO-3, gathered layer by layer there).
    `keeps_gradients`: gradient buffers live from step to step; otherwise the first backward pass makes them.
    `logit_bytes`: at the widest moment of the loss, per local logit, by its implementation.
    `gated_bytes`: what fused operators save per inner element of a gated MLP, `expert_bytes` of gated experts;
    `eager_rmsnorm_bytes`: per hidden element of an RMS norm in eager mode, its output included.
    `saves_gathered`: sequence-parallel inputs are saved gathered instead of being gathered again in backward.
    `weight_stub_bytes`: of stand-in gradients, one for each shape of weight in a block, that stay allocated.
    `gathers_weights`: ZeRO-3 gathers weight by weight, not layer by layer.
    `waiting_hiddens`: whole hidden states that wait for the communication stream under sequence parallelism, unless
    tensor parallelism is asynchronous.
    `step_bytes`: temporaries of the optimizer's step per parameter that a rank updates, `step_whole_bytes` per local
    parameter of a run without pipeline stages, `step_largest_bytes` per element of the largest tensor updated.
    `bucket_bytes`: flat buffers of communication, from ZeRO-1 on.
    `grows_segments`: the allocator's segments grow, so that large blocks can take the place of many small ones.
    """

    software: Software
    held: HeldBytes
    holds_masters: bool
    keeps_gradients: bool
    logit_bytes: dict[Loss, NonNegativeFloat]
    gated_bytes: NonNegativeFloat
    expert_bytes: NonNegativeFloat
    eager_rmsnorm_bytes: NonNegativeFloat
    saves_gathered: bool = False
    weight_stub_bytes: NonNegativeFloat = 0
    gathers_weights: bool = False
    waiting_hiddens: NonNegativeFloat = 0
    step_bytes: NonNegativeFloat = 0
    step_whole_bytes: NonNegativeFloat = 0
    step_largest_bytes: NonNegativeFloat = 0
    bucket_bytes: NonNegativeInt = 0
    grows_segments: bool = False
    sources: dict[str, str]


def framework(name: FrameworkName) -> Framework:
    """Return the defaults of the framework called `name`."""
    return _frameworks()[name]


def default_software(name: FrameworkName) -> Software:
    """Return the kernels, loss and overlaps that the framework called `name` has unless told otherwise."""
    return framework(name).software


def held_of(run: RunSpec) -> HeldBytes:
    """Return the bytes a parameter that `run` says it holds, else those of its framework."""
    return run.held or framework(run.framework).held


@cache
def _frameworks() -> dict[FrameworkName, Framework]:
    data = read_shipped(shipped("frameworks.yaml"))
    return {name: from_data(Framework, entry, where=f"frameworks.yaml: {name}") for name, entry in data.items()}
