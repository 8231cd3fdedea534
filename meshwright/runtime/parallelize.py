"""A plan applied to a model: the whole of hybrid parallelism on one page.

engine = parallelize(build_model(plan.model), plan)
optimizer = make_optimizer(engine, plan.job.optimizer)
report = engine.forward_backward(batch)      # gradients are summed over all ranks, loss over all tokens
norm = engine.clip_gradients(1.0)
optimizer.step(); engine.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import UserError
from meshwright.models.build import Transformer, tie
from meshwright.models.dropout import Place
from meshwright.runtime.gradients import (
    HeldParameter,
    clip,
    scale_gradients,
    set_policy,
    set_prefetch,
    squared_norm,
    sum_split_norms,
    sum_tied,
)
from meshwright.runtime.groups import World
from meshwright.runtime.initialize import FullParameter, initial_parameter, local_data, own_slice, parameter_name
from meshwright.runtime.pipeline import Pipeline
from meshwright.runtime.split import fsdp_unit, recompute, shard_data_parallel, split_weights
from meshwright.runtime.stage import Stage
from meshwright.spec.legality import why_strategy_only_priced
from meshwright.spec.mesh import MeshShape
from meshwright.spec.parameters import layer_parameters
from meshwright.spec.plan import Plan, needs_copy
from meshwright.spec.sample import input_shapes, target_shape

Batch = Callable[[int, int], tuple[Tensor | tuple[Tensor, ...], Tensor]]
"""(first, count) -> what the first layer takes of these samples of the global batch, and the loss's targets.

Shapes are `spec.sample.input_shapes` and `target_shape` after the number of samples: ids and targets [count, seq] of
a decoder, source and target ids and targets of an encoder-decoder, images and classes [count] of an image model.
"""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step over all ranks: mean loss of a token (nats), how many counted, global gradient norm before clipping.

    `stop_requested`: some rank was asked to stop (`Engine.request_stop`).
    """

    loss: float
    num_tokens: int
    gradient_norm: float
    stop_requested: bool = False

    @property
    def is_finite(self) -> bool:
        return isfinite(self.loss) and isfinite(self.gradient_norm)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation counted over all ranks: summed loss (nats), and the targets that it is of.

    `num_correct`: how many of them a classifier found; 0 of other models.
    """

    loss_sum: float
    num_targets: int
    num_correct: int

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.num_targets)

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(1, self.num_targets)


def parallelize(
    model: Transformer,
    plan: Plan,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    full: FullParameter | None = None,
) -> Engine:
    """Return this rank's part of `model` under `plan`. Collective: every rank calls it.

    Values are those of `full` (`models.weights.open_weights`), asked for what this rank's stage has alone. Without
    it, a model on the meta device is initialised from `seed`, the same under every plan; otherwise its values are
    kept. Every rank must pass equal ones.
    """
    refuse_what_cannot_run(plan)
    if model.spec != plan.model:
        raise UserError(f"model: the plan is for {plan.model.name}, but {model.spec.name} was given")
    device = device or default_device(plan)
    world = World.create(plan, device)
    full = full or _full_values(model, plan, seed)
    layers = {
        index: model.layers[index].to("meta")
        for index in range(plan.boundaries[world.stage], plan.boundaries[world.stage + 1])
    }
    tied_here = plan.model.tied_embedding and plan.num_stages == 1
    for index, layer in layers.items():
        strategy = plan.strategies[index]
        mesh = MeshShape.of(strategy)
        if mesh.tp > 1:
            parameters = layer_parameters(plan.model.layers[index])
            split_weights(layer, parameters, world.tensor_parallel(mesh), world.device_mesh(mesh)["tp"])
        if strategy.recompute == "full":
            recompute(layer)
    if tied_here:
        tie(layers[0], layers[len(layers) - 1])
    stage = Stage(layers, world)
    units = [unit for unit in plan.sharded_units(world.stage) if needs_copy(plan.strategies[unit[0]], plan.job)]
    for unit in units:
        shard_data_parallel([layers[index] for index in unit], plan.strategies[unit[0]], world, plan.job)
    if units:
        # The root holds no parameters; it lets the units share streams and end a backward pass together.
        shard_data_parallel([stage], plan.strategies[units[0][0]], world, plan.job, leave_alone=_plain(stage))
    stage.to_empty(device=device)
    if tied_here:
        tie(layers[0], layers[len(layers) - 1])  # again: to_empty makes new parameters, one for each name
    held = _held_parameters(stage, world)
    _fill(held, full, world)
    return Engine(stage=stage, held=held, world=world, seed=seed)


def refuse_what_cannot_run(plan: Plan) -> None:
    """Raise UserError for strategies that can be priced but not run yet."""
    for index, strategy in enumerate(plan.strategies):
        if reason := why_strategy_only_priced(strategy):
            raise UserError(f"layer {index}: {reason}")


def default_device(plan: Plan) -> torch.device:
    """Return the device of this rank: its own GPU, or the CPU, as the plan's cluster says."""
    if plan.cluster.device.backend == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"cluster: {plan.cluster.name} has GPUs, but torch finds none here; plan for a cpu cluster")
    return torch.device("cuda", torch.cuda.current_device())


class Engine:
    """One rank of a training job under a plan."""

    def __init__(self, *, stage: Stage, held: list[HeldParameter], world: World, seed: int = 0) -> None:
        self.stage, self.held, self.world, self.plan = stage, held, world, world.plan
        self.pipeline = Pipeline(stage, world)
        self.seed = seed
        first, last = self.plan.strategies[0], self.plan.strategies[-1]
        self._units = [
            (fsdp_unit(stage.layers[str(unit[0])]), self.plan.strategies[unit[0]])
            for unit in self.plan.sharded_units(world.stage)
            if needs_copy(self.plan.strategies[unit[0]], self.plan.job)
        ]
        set_prefetch(self._units_backward())
        self._inputs_mesh, self._targets_mesh = MeshShape.of(first), MeshShape.of(last)
        self._last_norm = 0.0
        self._wants_stop = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank holds (DTensors), each once."""
        return [parameter.tensor for parameter in self.held]

    def zero_grad(self) -> None:
        for parameter in self.held:
            parameter.tensor.grad = None

    def forward_backward(self, batch: Batch, *, step: int = 0) -> StepReport:
        """Run one global batch; afterwards gradients of the mean token loss are complete on every rank.

        `batch` is asked only for the samples that this rank needs. `step` decides with the seed what dropout drops.
        """
        rate = self.plan.job.dropout
        at = Place(seed=self.seed, step=step, layer=0, first_sample=0, rate=rate) if rate else None
        most_tokens = self.plan.global_batch_size * prod(target_shape(self.plan.model, self.plan.job))
        batch = lru_cache(maxsize=1)(batch)  # on one stage inputs and targets are often of the same slice
        sums = self.pipeline.step(
            self._inputs(batch), self._targets(batch), 1.0 / most_tokens, self._before_backward, at
        )
        with self.pipeline.stopwatch.timing("sync"):
            sum_tied(self.held, self.world)
            sum_split_norms(self.held, self.world)
            norm = squared_norm(self.held)
            stop = torch.full_like(norm, float(self._wants_stop))
            norm_squared, stops, loss, num_tokens = self._over_all_ranks([norm, stop], [sums.loss, sums.num_tokens])
        # How many tokens count is known only now. That spares a reduction before the step; where none is
        # ignored there is nothing left to do.
        scale = most_tokens / max(1.0, num_tokens)
        if num_tokens < most_tokens:
            scale_gradients(self.held, scale)
        self._last_norm = scale * norm_squared**0.5
        return StepReport(
            loss=loss / max(1.0, num_tokens),
            num_tokens=int(num_tokens),
            gradient_norm=self._last_norm,
            stop_requested=stops > 0,
        )

    def request_stop(self) -> None:
        """Let the next step's report say on every rank that a stop was asked for on this one."""
        self._wants_stop = True

    def evaluate(self, batch: Batch, num_micro_batches: int) -> Evaluation:
        """Return loss and counts over `num_micro_batches` micro-batches, forward only."""
        batch = lru_cache(maxsize=1)(batch)
        sums = self.pipeline.evaluate(self._inputs(batch), self._targets(batch), num_micro_batches)
        loss, *counts = self._over_all_ranks([], [sums.loss, sums.num_tokens, sums.num_correct])
        num_targets, num_correct = map(int, counts)
        return Evaluation(loss_sum=loss, num_targets=num_targets, num_correct=num_correct)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; return the norm before."""
        clip(self.held, self._last_norm, max_norm)
        return self._last_norm

    def _units_backward(self) -> list[FSDPModule]:
        """Return the sharded units in the order in which a backward pass first needs them."""
        units = [unit for unit, _ in self._units]
        tied_unit_is_first = len(self.plan.sharded_units(self.world.stage)[0]) > 1 and needs_copy(
            self.plan.strategies[0], self.plan.job
        )  # embedding and head of one stage: needed first, let go last
        return [units[0], *reversed(units[1:])] if tied_unit_is_first else units[::-1]

    def _before_backward(self, micro_batch: int) -> None:
        is_last = micro_batch == self.plan.num_micro_batches - 1
        if is_last or micro_batch == 0:
            for unit, strategy in self._units:
                set_policy(unit, strategy, is_last=is_last)

    def _inputs(self, batch: Batch) -> Callable[[int], tuple[Tensor, ...]]:
        return lambda micro_batch: self._slice(batch, micro_batch, self._inputs_mesh)[0]

    def _targets(self, batch: Batch) -> Callable[[int], Tensor]:
        return lambda micro_batch: self._slice(batch, micro_batch, self._targets_mesh)[1]

    def _slice(self, batch: Batch, micro_batch: int, mesh: MeshShape) -> tuple[tuple[Tensor, ...], Tensor]:
        samples = self.plan.micro_batch_samples
        count = samples // mesh.dp
        first = micro_batch * samples + mesh.dp_index(self.world.local_rank) * count
        given, targets = batch(first, count)
        inputs = given if isinstance(given, tuple) else (given,)
        model, job, device = self.plan.model, self.plan.job, self.world.device
        wanted = [(count, *shape) for shape in (*input_shapes(model, job), target_shape(model, job))]
        shapes = [tuple(tensor.shape) for tensor in (*inputs, targets)]
        if shapes != wanted:
            raise UserError(
                f"batch: samples {first} to {first + count - 1} must be inputs and targets of shapes "
                f"{_show(wanted)}, not {_show(shapes)}"
            )
        return tuple(x.to(device) for x in inputs), targets.to(device)

    def _over_all_ranks(self, of_ranks: list[Tensor], of_targets: list[Tensor]) -> list[float]:
        """Return sums over all ranks, in one small all-reduce.

        What is `of_targets` is known on all tensor-parallel ranks of the last stage, and counts on the first of them.
        """
        counts = self.world.is_last_stage and self._targets_mesh.tp_index(self.world.local_rank) == 0
        wanted = of_targets[0]
        mine = torch.stack([x.to(wanted) for x in (*of_ranks, *of_targets)])
        if not counts:
            mine[len(of_ranks) :] = 0.0
        if dist.get_world_size() > 1:
            dist.all_reduce(mine)
        return mine.tolist()


def _show(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(" x ".join(map(str, shape)) for shape in shapes)


def _plain(stage: Stage) -> set[nn.Parameter]:
    """Return the parameters of layers that stand alone, which no unit holds."""
    layers = (layer for layer in stage.layers.values() if not isinstance(layer, FSDPModule))
    return {parameter for layer in layers for parameter in layer.parameters()}


def _full_values(model: Transformer, plan: Plan, seed: int) -> FullParameter:
    if all(parameter.is_meta for parameter in model.parameters()):
        return initial_parameter(plan.model, seed)
    values = {name: parameter.detach().float().cpu() for name, parameter in model.named_parameters()}
    return values.__getitem__


def _held_parameters(stage: Stage, world: World) -> list[HeldParameter]:
    plan = world.plan
    last = len(plan.model.layers) - 1
    held: dict[int, HeldParameter] = {}
    for name, layer in stage.layers.items():
        index = int(name)
        for spec in layer_parameters(plan.model.layers[index]):
            tensor = layer.get_parameter(spec.name)
            full_name = parameter_name(plan.model, index, spec)
            is_second = plan.num_stages > 1 and index == last and not full_name.startswith(f"layers.{index}.")
            held.setdefault(
                id(tensor),
                HeldParameter(
                    name=full_name,
                    tensor=tensor,
                    spec=spec,
                    strategy=plan.strategies[index],
                    is_second_copy=is_second,
                ),
            )
    return list(held.values())


def _fill(held: list[HeldParameter], full: FullParameter, world: World) -> None:
    with torch.no_grad():
        for parameter in held:
            mine = own_slice(full(parameter.name), parameter.spec, MeshShape.of(parameter.strategy), world.local_rank)
            local_data(parameter.tensor).copy_(mine)
