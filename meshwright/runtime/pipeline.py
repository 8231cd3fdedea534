"""Run one step of a stage: the actions of `spec.schedule` in order, with sends and receives at the borders.

Forward and backward messages use process groups of their own, so that a send of one direction never
waits behind a receive of the other. Sends are asynchronous; a stage waits for the send of a
micro-batch when its gradient has come back (then the neighbour has surely received it), and for the
rest at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.models.dropout import Place
from meshwright.models.loss import IGNORE_INDEX
from meshwright.runtime.groups import World
from meshwright.runtime.predictions import watched_classes
from meshwright.runtime.split import TORCH_DTYPES
from meshwright.runtime.stage import Stage
from meshwright.runtime.stopwatch import Stopwatch
from meshwright.runtime.watchdog import Progress
from meshwright.spec.base import divide
from meshwright.spec.mesh import Layout
from meshwright.spec.model import hands_on
from meshwright.spec.schedule import make_schedule
from meshwright.spec.tensors import TensorSpec

_OTHER_DTYPES = {"fp32": torch.float32, "int64": torch.int64, "bool": torch.bool}

Inputs = Callable[[int], tuple[Tensor, ...]]  # micro-batch -> this rank's slice of what the first layer takes
Targets = Callable[[int], Tensor]  # the same of the loss's targets
Pending = list[tuple[dist.Work, Tensor]]


@dataclass(slots=True)
class LossSums:
    """Summed loss and counted tokens of this rank's slices (fp64; zero but on the last stage).

    `num_correct`: of a classifier's samples in evaluation, those whose class was found.
    """

    loss: Tensor
    num_tokens: Tensor
    num_correct: Tensor

    @staticmethod
    def zero(device: torch.device) -> LossSums:
        loss = torch.zeros((), dtype=torch.float64, device=device)
        return LossSums(loss, *torch.zeros(2, dtype=torch.int64, device=device))

    def add(self, loss: Tensor, targets: Tensor) -> None:
        self.loss += loss.detach()
        self.num_tokens += (targets != IGNORE_INDEX).sum()

    def add_classes(self, classes: Tensor, targets: Tensor) -> None:
        self.num_correct += (classes == targets).sum()  # never so where the target counts nothing


@dataclass(slots=True)
class _InFlight:
    """What a micro-batch leaves for its backward pass: received inputs, and where output gradients go."""

    inputs: tuple[Tensor, ...]
    edges: tuple[GradientEdge, ...]
    sends: Pending = field(default_factory=list)


class Border:
    """The tensors between two neighbouring stages, as the sender lays them out."""

    def __init__(self, world: World, sender_index: int, tensors: tuple[TensorSpec, ...] | None = None) -> None:
        plan = world.plan
        layout = Layout.of(plan.strategies[sender_index])
        samples = divide(plan.micro_batch_samples, layout.dp, "micro-batch over dp")
        tensors = hands_on(plan.model.layers[sender_index]) if tensors is None else tensors
        self.shapes = tuple((samples, *t.resolve(plan.job.lengths)) for t in tensors)
        param = TORCH_DTYPES[plan.job.param_dtype]
        self.dtypes = tuple(param if t.dtype == "param" else _OTHER_DTYPES[t.dtype] for t in tensors)
        self.device = world.device

    def empty(self) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


class Pipeline:
    """This rank's part of the pipeline."""

    def __init__(self, stage: Stage, world: World) -> None:
        plan = world.plan
        self.stage, self.world = stage, world
        self.stopwatch = Stopwatch(world.device)
        self.progress = Progress()
        self.actions = make_schedule(plan.schedule, plan.num_stages, plan.num_micro_batches)[world.stage]
        first, last = plan.boundaries[world.stage], plan.boundaries[world.stage + 1] - 1
        self.is_first, self.is_last = world.stage == 0, world.is_last_stage
        self.arriving = None if self.is_first else Border(world, first - 1)
        column = world.column
        self.previous = None if self.is_first else column[world.stage - 1]
        self.next = None if self.is_last else column[world.stage + 1]
        self.leaving = None if self.is_last else Border(world, last)
        self.forward_group = world.groups.get((column, "forward"))
        self.backward_group = world.groups.get((column, "backward"))

    def step(
        self,
        inputs: Inputs,
        targets: Targets,
        loss_scale: float,
        before_backward: Callable[[int], None],
        at: Place | None = None,
    ) -> LossSums:
        """Run all micro-batches forward and backward; return the summed, unscaled loss.

        `inputs` and `targets` give this rank's slice of a micro-batch (used on the first and last stage).
        The loss is multiplied by `loss_scale` before it is differentiated. `before_backward` is called
        with the micro-batch's number. `at` is the place of the step in training, where there is dropout.
        """
        sums = LossSums.zero(self.world.device)
        in_flight: dict[int, _InFlight] = {}
        sent_back: Pending = []
        for phase, micro_batch in self.actions:
            self.progress.at(phase, micro_batch)
            if phase == "forward":
                with self.stopwatch.timing("waiting"):
                    taken = inputs(micro_batch) if self.is_first else self._receive(self.arriving, self.previous)
                with self.stopwatch.timing("forward"):
                    wanted = targets(micro_batch) if self.is_last else None
                    out = self._forward(taken, wanted, self._in_micro_batch(at, micro_batch))
                    in_flight[micro_batch] = self._sent_on(taken, out, wanted, sums, loss_scale)
            else:
                work = in_flight.pop(micro_batch)
                with self.stopwatch.timing("waiting"):
                    gradients = None if self.is_last else self._receive_gradients()
                    _wait(work.sends)
                with self.stopwatch.timing("backward"):
                    before_backward(micro_batch)
                    torch.autograd.backward(work.edges, gradients)  # type: ignore[arg-type]  # edges are accepted
                    sent_back += self._send_backward(work.inputs)
        with self.stopwatch.timing("waiting"):
            _wait(sent_back)
        self.progress.begin("summing the gradients")
        return sums

    def _sent_on(
        self,
        inputs: tuple[Tensor, ...],
        out: tuple[Tensor, ...],
        targets: Tensor | None,
        sums: LossSums,
        loss_scale: float,
    ) -> _InFlight:
        """Send on what a forward pass hands on (it is let go as soon as it is sent), or count its loss."""
        if targets is not None:
            sums.add(out[0], targets)
            out = (out[0] * loss_scale,)
        edges = tuple(get_gradient_edge(x) for x in out if x.requires_grad)
        return _InFlight(inputs, edges, self._send_forward(out))

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, targets: Targets, num_micro_batches: int) -> LossSums:
        """Run micro-batches forward only; return the summed loss, and of a classifier how often it was right."""
        sums = LossSums.zero(self.world.device)
        sends: Pending = []
        for micro_batch in range(num_micro_batches):
            self.progress.at("forward", micro_batch)
            taken = inputs(micro_batch) if self.is_first else self._receive(self.arriving, self.previous)
            wanted = targets(micro_batch) if self.is_last else None
            with watched_classes(self.stage) as classes:
                out = self.stage(*taken) if wanted is None else self.stage(*taken, targets=wanted)
            if wanted is not None:
                sums.add(out[0], wanted)
                for found in classes:
                    sums.add_classes(found, wanted)
            sends += self._send_forward(out)
        _wait(sends)
        return sums

    def _in_micro_batch(self, at: Place | None, micro_batch: int) -> Place | None:
        return None if at is None else at._replace(first_sample=micro_batch * self.world.plan.micro_batch_samples)

    def _forward(self, inputs: tuple[Tensor, ...], targets: Tensor | None, at: Place | None) -> tuple[Tensor, ...]:
        for x in inputs:
            if x.is_floating_point() and not self.is_first:  # nobody wants the gradient of an image
                x.requires_grad_()
        return self.stage(*inputs, at=at) if targets is None else self.stage(*inputs, targets=targets, at=at)

    def _send_forward(self, out: tuple[Tensor, ...]) -> Pending:
        return [] if self.is_last else _send([x.detach() for x in out], self.next, self.forward_group)

    def _send_backward(self, inputs: tuple[Tensor, ...]) -> Pending:
        if self.is_first:
            return []
        gradients = [x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs if x.is_floating_point()]
        return _send(gradients, self.previous, self.backward_group)

    def _receive_gradients(self) -> tuple[Tensor, ...]:
        assert self.leaving is not None  # noqa: S101 not the last stage
        wanted = tuple(x for x in self.leaving.empty() if x.is_floating_point())
        return _receive_into(wanted, self.next, self.backward_group)

    def _receive(self, border: Border | None, source: int | None) -> tuple[Tensor, ...]:
        assert border is not None  # noqa: S101 not the first stage
        return _receive_into(border.empty(), source, self.forward_group)


def _send(tensors: list[Tensor], target: int | None, group: dist.ProcessGroup | None) -> Pending:
    pending: Pending = []
    for x in tensors:
        x = x.contiguous()
        work = dist.isend(x, target, group=group)
        assert work is not None  # noqa: S101 this rank is in the group
        pending.append((work, x))
    return pending


def _receive_into(
    buffers: tuple[Tensor, ...], source: int | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, ...]:
    for work in [dist.irecv(x, source, group=group) for x in buffers]:
        assert work is not None  # noqa: S101 this rank is in the group
        work.wait()
    return buffers


def _wait(pending: Pending) -> None:
    for work, _ in pending:
        work.wait()
    pending.clear()
