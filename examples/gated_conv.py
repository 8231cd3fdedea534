"""A model that is not in the zoo: blocks of a causal convolution with a gate, described, planned and trained.

    python examples/gated_conv.py                                       # writes runs/gated_conv/model.yaml
    export PYTHONPATH=examples                                          # where the builder is found
    python -m meshwright profile --model runs/gated_conv/model.yaml --local 2 --global-batch 16 --seq-len 64 \
        --dtype fp32 -o runs/gated_conv/profile.json
    python -m meshwright plan --model runs/gated_conv/model.yaml --cluster 2xcpu --global-batch 16 --seq-len 64 \
        --dtype fp32 --profile runs/gated_conv/profile.json -o runs/gated_conv/plan.json
    python -m meshwright train runs/gated_conv/plan.json --local 2 --steps 60 --run-dir runs/gated_conv/run

What meshwright must know of a block of yours is one CustomLayer: the module that a builder makes of it, its
parameters with the dimension that tensor parallelism splits, and counts a token. The planner reads the description
alone, without torch and without this file; the builder is imported where the block is measured and trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.files import write_spec
from meshwright.spec.model import CustomLayer, EmbeddingLayer, HeadLayer, LayerGroup, ModelSpec, pad_vocab
from meshwright.spec.tensors import ParameterSpec

if TYPE_CHECKING:
    from torch import nn

MODEL = Path("runs/gated_conv/model.yaml")
VOCABULARY = 256  # bytes


def describe(hidden: int, ffn: int, kernel: int) -> CustomLayer:
    """Return the description of one block."""
    return CustomLayer(
        hidden_size=hidden,
        builder="gated_conv:build",
        options=(("ffn", ffn), ("kernel", kernel)),
        parameters=(
            ParameterSpec(name="norm1.weight", shape=(hidden,)),
            # Columns are split over tensor-parallel ranks (dimension 0), rows of what follows (dimension 1).
            ParameterSpec(name="value.weight", shape=(hidden, hidden), tp_dim=0),
            ParameterSpec(name="gate.weight", shape=(hidden, hidden), tp_dim=0),
            # A kernel for each channel: not a product of all tokens with a matrix.
            ParameterSpec(name="kernel", shape=(hidden, kernel), tp_dim=0, is_looked_up=True),
            ParameterSpec(name="mix.weight", shape=(hidden, hidden), tp_dim=1),
            ParameterSpec(name="norm2.weight", shape=(hidden,)),
            ParameterSpec(name="up.weight", shape=(ffn, hidden), tp_dim=0),
            ParameterSpec(name="down.weight", shape=(hidden, ffn), tp_dim=1),
        ),
        num_parts=2,  # sums over tensor-parallel ranks: after mix and after down
        split_core_flops=2 * hidden * kernel,
        moved_elements=10 * hidden,  # two norms and two residuals
        split_moved_elements=8 * hidden + 2 * ffn,
        kept_elements=6 * hidden,  # inputs, normalised inputs (two copies in stock CPU kernels) of both parts
        split_kept_elements=5 * hidden + ffn,  # value, convolved, gate before and after silu, their product; relu
    )


def build(spec: CustomLayer) -> nn.Module:
    """Return the block as a torch module, its values not set. Called by meshwright where the block runs."""
    import torch
    from torch.nn import functional

    from meshwright.models.norms import RMSNorm
    from meshwright.models.tensor_parallel import (
        SINGLE,
        Linear,
        RowParallelLinear,
        TensorParallel,
        copy_to_ranks,
        local,
    )

    options: dict[str, Any] = dict(spec.options)

    class GatedConv(torch.nn.Module):
        """x + mix(conv(value(norm(x))) * silu(gate(norm(x)))), then x + down(relu(up(norm(x))))."""

        def __init__(self) -> None:
            super().__init__()
            self.tp: TensorParallel = SINGLE  # set by the runtime where it splits the layer
            hidden = spec.hidden_size
            self.norm1, self.norm2 = RMSNorm(hidden, 1e-6), RMSNorm(hidden, 1e-6)
            self.value, self.gate = Linear(hidden, hidden, bias=False), Linear(hidden, hidden, bias=False)
            self.kernel = torch.nn.Parameter(torch.empty(hidden, options["kernel"]))
            self.mix = RowParallelLinear(hidden, hidden, bias=False)
            self.up = Linear(hidden, options["ffn"], bias=False)
            self.down = RowParallelLinear(options["ffn"], hidden, bias=False)

        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            """Return [B, T, H] of `x` [B, T, H]."""
            # What enters split weights goes through copy_to_ranks, so that its gradient is summed over the ranks.
            y = copy_to_ranks(self.norm1(x), self.tp)
            x = x + self.mix(self._convolved(self.value(y)) * functional.silu(self.gate(y)), self.tp)
            y = copy_to_ranks(self.norm2(x), self.tp)
            return x + self.down(functional.relu(self.up(y)), self.tp)

        def _convolved(self, x: torch.Tensor) -> torch.Tensor:
            """Return each channel of `x` [B, T, C] convolved with its own kernel, over tokens that were before."""
            weight = local(self.kernel)
            if weight is None:
                raise TypeError("a weight is missing")
            channels = x.transpose(1, 2)
            padded = functional.pad(channels, (weight.shape[1] - 1, 0))
            return functional.conv1d(padded, weight[:, None], groups=len(weight)).transpose(1, 2)

    return GatedConv()


def model(hidden: int = 64, num_blocks: int = 4) -> ModelSpec:
    """Return a language model of such blocks between the zoo's embedding and head."""
    sizes: dict[str, Any] = {
        "hidden_size": hidden, "vocab_size": VOCABULARY, "padded_vocab_size": pad_vocab(VOCABULARY),
    }  # fmt: skip
    block = describe(hidden, ffn=3 * hidden, kernel=8)
    return ModelSpec(
        name="gated-conv",
        family="gated-conv",
        groups=(
            LayerGroup(num_layers=1, layer=EmbeddingLayer(**sizes)),
            LayerGroup(num_layers=num_blocks, layer=block),
            LayerGroup(num_layers=1, layer=HeadLayer(norm="rmsnorm", norm_eps=1e-6, **sizes)),
        ),
    )


if __name__ == "__main__":
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    write_spec(model(), MODEL)
    print(f"{MODEL} written")
