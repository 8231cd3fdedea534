"""Run on every rank: train each case of this world size for a few steps and compare with one device.

usage: torchrun -m tests.parity.worker RESULTS.json [name ...]. Rank 0 writes one record a case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.inventory import Call, step_calls
from meshwright.cost.layer import held_parameters
from meshwright.cost.memory import state_bytes
from meshwright.cost.predict import stage_activation_bytes
from meshwright.models import build_model
from meshwright.runtime.initialize import local_data, own_slice
from meshwright.runtime.optimizer import make_optimizer
from meshwright.runtime.parallelize import Batch, Engine, parallelize
from meshwright.spec.mesh import MeshShape
from meshwright.spec.plan import Plan
from meshwright.spec.terms import StateBytes
from tests.parity.cases import all_cases
from tests.parity.faults import FAULTS, planted
from tests.parity.measure import optimizer_bytes, saved_activation_bytes, storage_bytes
from tests.parity.recorder import recorded_calls
from tests.parity.reference import NUM_STEPS, make_batch, train_reference
from tests.parity.tuples import handing_on_tuples, tuple_plan, tuple_reference
from tests.parity.zoo import zoo_cases

SEED = 7
TUPLES_AFTER = "hsdp2x2"  # the case of four ranks after which tuples are tried


def main(results_path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records: dict[str, Any] = {}
    for case in [*all_cases(), *zoo_cases()]:
        if case.plan.num_devices != dist.get_world_size() or (names and case.name not in names):
            continue
        records[case.name] = _together(run_case(case.plan))
        for fault, where in FAULTS.items():
            if where == case.name:
                with planted(fault):
                    records[f"fault:{fault}"] = _together(first_step(case.plan))
        if case.name == TUPLES_AFTER:
            records["tuples"] = _together(run_tuples())
        if dist.get_rank() == 0:
            Path(results_path).write_text(json.dumps(records))
    gc.collect()  # what holds a group in a cycle would end it after its threads
    dist.destroy_process_group()


def run_case(plan: Plan) -> dict[str, Any]:
    """Return all comparisons of one plan on this rank; the larger, the worse."""
    reference = train_reference(plan)
    engine = parallelize(build_model(plan.model), plan, seed=SEED)
    optimizer = make_optimizer(engine.parameters(), plan.job.optimizer)
    record: dict[str, Any] = {"loss_error": [], "norm_error": []}
    for step in range(NUM_STEPS):
        batch = make_slices(plan, step)
        with recorded_calls() as calls:
            report = engine.forward_backward(batch, step=step)
        want_loss, want_norm = (float(reference["curve"][name][step]) for name in ("losses", "norms"))
        record["loss_error"].append(abs(report.loss / want_loss - 1))
        record["norm_error"].append(abs(report.gradient_norm / want_norm - 1))
        if step == 0:
            record["gradient_error"] = gradient_error(engine, reference["gradients"])
            record["calls"] = _differences(step_calls(plan, dist.get_rank()), calls)
            record["num_calls"] = sum(calls.values())
        engine.clip_gradients(plan.job.optimizer.clip_norm)
        optimizer.step()
        if step == 0:
            record["states"] = [_predicted_states(engine), _held_states(engine, optimizer)]
        engine.zero_grad()
    record["parameter_error"] = parameter_error(engine, reference["parameters"])
    record["tied_copies"] = tied_copies_differ(engine)
    predicted = sum(stage_activation_bytes(plan, engine.world.stage))
    record["activations"] = [predicted, saved_activation_bytes(engine, make_slices(plan, 0))]
    return record


def run_tuples() -> dict[str, Any]:
    """Return how far a plan whose layers hand on three tensors is from one device."""
    plan = tuple_plan()
    with handing_on_tuples():
        want_loss, gradients = tuple_reference(plan, SEED)
        engine = parallelize(build_model(plan.model), plan, seed=SEED)
        report = engine.forward_backward(make_slices(plan, 0))
    return {"loss_error": [abs(report.loss / want_loss - 1)], "gradient_error": gradient_error(engine, gradients)}


def first_step(plan: Plan) -> dict[str, Any]:
    """Return how far one step is from the reference; an exception also counts as caught."""
    reference = train_reference(plan)
    engine = parallelize(build_model(plan.model), plan, seed=SEED)
    report = engine.forward_backward(make_slices(plan, 0))
    want_loss, want_norm = (float(reference["curve"][name][0]) for name in ("losses", "norms"))
    return {
        "loss_error": [abs(report.loss / want_loss - 1)],
        "norm_error": [abs(report.gradient_norm / want_norm - 1)],
        "gradient_error": gradient_error(engine, reference["gradients"]),
    }


def make_slices(plan: Plan, step: int) -> Batch:
    inputs, targets = make_batch(plan, step)

    def batch(first: int, count: int) -> tuple[tuple[Tensor, ...], Tensor]:
        # Clones: a view would keep the storage of the whole batch alive, and be counted so.
        taken = tuple(x[first : first + count].clone() for x in inputs)
        return taken, targets[first : first + count].clone()

    return batch


def gradient_error(engine: Engine, reference: dict[str, Tensor]) -> float:
    """Return the largest error of a gradient in units of 1e-5 of its own and 1e-7 of the global maximum."""
    global_max = max(float(g.abs().max()) for g in reference.values())
    worst = 0.0
    for held in engine.held:
        whole = reference[held.name]
        mine = own_slice(whole, held.spec, MeshShape.of(held.strategy), engine.world.local_rank)
        if mine.numel():
            tolerance = 1e-5 * float(whole.abs().max()) + 1e-7 * global_max
            worst = max(worst, float((held.local_gradient - mine).abs().max()) / tolerance)
    return worst


def parameter_error(engine: Engine, reference: dict[str, Tensor]) -> float:
    worst = 0.0
    for held in engine.held:
        mine = own_slice(reference[held.name], held.spec, MeshShape.of(held.strategy), engine.world.local_rank)
        if mine.numel():
            worst = max(worst, float((local_data(held.tensor) - mine).abs().max()))
    return worst


def tied_copies_differ(engine: Engine) -> float:
    """Return the largest difference between the two copies of a weight tied across stages: 0 to the bit."""
    world = engine.world
    if world.plan.num_stages == 1 or not world.plan.model.tied_embedding:
        return 0.0
    pair = (world.column[0], world.column[-1])
    if world.rank not in pair:
        return 0.0
    weight = next(held for held in engine.held if held.name == "layers.0.token.weight")
    copies = [torch.empty_like(local_data(weight.tensor)) for _ in pair]
    dist.all_gather(copies, local_data(weight.tensor).contiguous(), group=world.groups[pair, "collective"])
    return float((copies[0] - copies[1]).abs().max()) if copies[0].numel() else 0.0


def _predicted_states(engine: Engine) -> list[int]:
    plan, stage, local = engine.plan, engine.world.stage, engine.world.local_rank
    total = StateBytes()
    for index in range(plan.boundaries[stage], plan.boundaries[stage + 1]):
        strategy = plan.strategies[index]
        mesh = MeshShape.of(strategy)
        parameters = held_parameters(plan.model, plan.model.layers[index], plan.num_stages)
        total += state_bytes(parameters, strategy, plan.job, shard_index=mesh.dp_index(local) % mesh.dp_shard)
    return [total.master_bytes, total.gradient_bytes, total.optimizer_bytes]


def _held_states(engine: Engine, optimizer: torch.optim.Optimizer) -> list[int]:
    gradients = [held.tensor.grad for held in engine.held if held.tensor.grad is not None]
    return [storage_bytes(engine.parameters()), storage_bytes(gradients), optimizer_bytes(optimizer)]


def _differences(want: Counter[Call], got: Counter[Call]) -> list[str]:
    return [f"{call}: priced {want[call]}, issued {got[call]}" for call in {*want, *got} if want[call] != got[call]]


def _together(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of all ranks."""
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, record)
    return records


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: an orderly exit may wait for ranks that wait for this one
