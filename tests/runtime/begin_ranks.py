"""Run on every rank: the loss of one step from the weights of Hugging Face folders, under every case's plan.

usage: torchrun -m tests.runtime.begin_ranks FOLDERS RESULTS.json. Rank 0 writes; a case's folder has its model's name.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.models import build_model
from meshwright.runtime.begin import begin_from_together
from meshwright.runtime.initialize import local_data, own_slice
from meshwright.runtime.parallelize import parallelize
from meshwright.spec.mesh import MeshShape
from tests.parity.cases import Case
from tests.parity.worker import make_slices
from tests.parity.zoo import zoo_cases

KINDS = {2: ("tp2-recompute", "pp2"), 4: ("hsdp2x2", "mixed-uneven")}
MODELS = ("qwen2", "bert", "bert-classifier", "t5", "vit", "swin")


def cases(num_ranks: int) -> list[Case]:
    """Return the plans of each model, without dropout, which transformers would draw in its own way."""
    names = {f"{model}-{kind}" for model in MODELS for kind in KINDS[num_ranks]}
    return [
        Case(
            name=case.name, plan=case.plan.model_copy(update={"job": case.plan.job.model_copy(update={"dropout": 0.0})})
        )
        for case in zoo_cases()
        if case.name in names
    ]


def main(folders: Path, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: dict[str, float] = {}
    for case in cases(dist.get_world_size()):
        plan = case.plan
        weights = begin_from_together(folders / plan.model.name, plan.model, seed=0, new_head=False)
        engine = parallelize(build_model(plan.model), plan, full=weights)
        for held in engine.held:
            mine = own_slice(weights(held.name), held.spec, MeshShape.of(held.strategy), engine.world.local_rank)
            assert torch.equal(local_data(held.tensor), mine), held.name
        losses[case.name] = engine.forward_backward(make_slices(plan, 0)).loss
    if dist.get_rank() == 0:
        results.write_text(json.dumps(losses))
    gc.collect()  # what holds a group in a cycle would end it after its threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
