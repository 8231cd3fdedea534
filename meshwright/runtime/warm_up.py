"""A tiny training step before the real one, so that what torch loads at first use is not counted as the model's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshwright.models import build_layer
from meshwright.runtime.groups import group_alone
from meshwright.spec.model import BlockLayer
from meshwright.spec.parts import AttentionSpec, MlpSpec

_HIDDEN, _TOKENS = 64, 64
_BLOCK = BlockLayer(
    hidden_size=_HIDDEN,
    norm="rmsnorm",
    norm_eps=1e-5,
    attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_size=32, rotary=True),
    mlp=MlpSpec(ffn_size=128, gated=True, activation="silu"),
)


def warm_up(device: torch.device) -> None:
    """Run one step of a tiny layer on this rank alone, and one collective over all. Collective over all ranks.

    A wrong network shows here, before anything large is built.
    """
    with torch.device(device):
        layer = build_layer(_BLOCK)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    fully_shard(layer, mesh=DeviceMesh.from_group(group_alone(), device.type))
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        layer(torch.randn(1, _TOKENS, _HIDDEN, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
