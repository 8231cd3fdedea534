"""The training loop of one rank: data by global sample index, steps, held-out loss, metrics, checkpoints."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.files import read_data, sha256, write_spec
from meshwright.models import build_model
from meshwright.models.weights import CONFIG, FullParameter
from meshwright.runtime.begin import begin_from_together
from meshwright.runtime.checkpoint import (
    DataInfo,
    clear_left_overs,
    find_checkpoint,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from meshwright.runtime.data.order import Inputs
from meshwright.runtime.data.prepare import DataRequest, LastSamples, RunData, open_data
from meshwright.runtime.data.task import CLASSES
from meshwright.runtime.diagnose import raise_not_finite
from meshwright.runtime.launch import check_world_size
from meshwright.runtime.memory import PeakMemory
from meshwright.runtime.metrics import Metrics
from meshwright.runtime.optimizer import learning_rate, make_optimizer, set_learning_rate
from meshwright.runtime.parallelize import Engine, StepReport, parallelize, refuse_what_cannot_run
from meshwright.runtime.stopwatch import PARTS, Part
from meshwright.runtime.supervise import supervised
from meshwright.runtime.warm_up import warm_up
from meshwright.runtime.watchdog import Progress
from meshwright.spec.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Spec
from meshwright.spec.flops import step_flops
from meshwright.spec.plan import Plan

PLAN_FILE, CHECKPOINTS = "plan.json", "checkpoints"


class TrainOptions(Spec):
    """What a run does beside following its plan.

    `data` are sources of the model's `task` (docs/training.md), or none for its usual ones; `tokenizer` is "bytes" or
    a tokenizer's file or folder. The run's plan, metrics, TensorBoard events and checkpoints lie in `run_dir`.
    `num_steps` is what the learning rate is planned for; a run may `stop_at` an earlier step and be
    resumed. `eval_every`, `save_every` 0: only at the end. `resume` names a checkpoint or a run folder,
    `init_from` a Hugging Face folder whose weights training begins from, where `new_head` says that a head which the
    folder lacks is drawn from the seed.
    """

    data: tuple[str, ...] = ()
    run_dir: str
    num_steps: PositiveInt
    task: str | None = None
    tokenizer: str = "bytes"
    cache_dir: str = "runs/cache"
    seed: NonNegativeInt = 0
    held_out_fraction: NonNegativeFloat = 0.05
    eval_every: NonNegativeInt = 0
    eval_samples: NonNegativeInt = 64
    save_every: NonNegativeInt = 0
    stop_at: PositiveInt | None = None
    log_every: PositiveInt = 1
    resume: str | None = None
    init_from: str | None = None
    new_head: bool = False
    timeout_s: PositiveInt = 600

    @property
    def terms(self) -> dict[str, str]:
        """What all ranks must be told alike: a change makes another run. Paths may differ by machine."""
        is_none = {"resume": str(self.resume is None), "init_from": str(self.init_from is None)}
        told = self.model_copy(update={"data": (), "run_dir": "", "cache_dir": "", **is_none})
        return {"options": sha256(told)}


class DataMismatchError(UserError):
    """Ranks hold different data."""

    on_every_rank = True


def prepare_data(plan: Plan, options: TrainOptions, progress: Progress | None = None) -> RunData:
    """Return the data of a run; tokens are made if they are not cached. One process at a time may make them."""
    request = DataRequest(
        sources=options.data,
        tokenizer=options.tokenizer,
        cache_dir=options.cache_dir,
        seed=options.seed,
        held_out_fraction=options.held_out_fraction,
        evaluates=options.eval_samples > 0,
        task=options.task,
    )
    return open_data(plan.model, plan.job, request, progress)


def train(plan: Plan, options: TrainOptions, *, show: Callable[[str], None]) -> int:
    """Train on this rank, started by torchrun or `launch_local`. `show` prints a line (used on rank 0).

    Returns the number of the signal that ended the run early, or 0.
    """
    refuse_what_cannot_run(plan)
    stop = _Stop()

    def work(device: torch.device, progress: Progress) -> bool:
        check_world_size(plan.num_devices)
        return _Run(plan, options, device, show, progress, stop).run()

    is_whole = supervised(
        work,
        plan.cluster.device.backend,
        timeout_s=options.timeout_s,
        terms={"plan": sha256(plan), **options.terms},
        on_lost_store=stop.on_lost_store,
    )
    return 0 if is_whole else stop.signal


class _Stop:
    """A wish to end early, after a step and a checkpoint: by a signal, or because the launcher is gone."""

    def __init__(self) -> None:
        self.signal = int(signal.SIGTERM)  # of this rank, or of another
        self.engine: Engine | None = None

    def listen(self, engine: Engine) -> None:
        """Finish the step, save and end on SIGTERM or the first Ctrl-C; a second Ctrl-C ends this rank at once.

        A second SIGTERM does not: cluster managers send one to every process, and so does our launcher.
        """
        self.engine = engine
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def on_lost_store(self) -> None:
        if self.engine is not None:
            os.write(2, f"rank {self.engine.world.rank}: the job's launcher is gone; saving and ending\n".encode())
            self.engine.request_stop()

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.engine is not None:
            self.engine.request_stop()


class _Run:
    def __init__(
        self,
        plan: Plan,
        options: TrainOptions,
        device: torch.device,
        show: Callable[[str], None],
        progress: Progress,
        stop: _Stop,
    ) -> None:
        self.plan, self.options, self.device, self.show = plan, options, device, show
        self.progress, self.stop = progress, stop
        self.is_first = dist.get_rank() == 0
        progress.begin("reading the data")
        self.data = self._data()
        self.data_info = DataInfo(
            seed=options.seed,
            seq_len=plan.job.seq_len,
            tokens_sha256=self.data.identity,
            held_out_fraction=options.held_out_fraction,
            task=self.data.task,
            target_seq_len=plan.job.lengths.target_seq,
        )
        self.unigram_entropy = self.data.entropy() if self.is_first else 0.0
        progress.begin("warming up")
        warm_up(device)
        progress.begin("building the model")
        self.config: dict[str, Any] | None = None
        self.memory = PeakMemory(device)
        full = None if options.init_from is None else self._begin_from(options.init_from)
        self.engine: Engine = parallelize(build_model(plan.model), plan, seed=options.seed, device=device, full=full)
        self.engine.pipeline.progress = progress
        self.optimizer = make_optimizer(self.engine.parameters(), plan.job.optimizer)
        self.step, self.num_samples = 0, 0
        self.folder = Path(options.run_dir)
        self._saved_step: int | None = None
        if options.resume is not None:
            progress.begin(f"reading {options.resume}")
            self._resume(Path(options.resume))
        self.metrics = Metrics(self.folder, show) if self.is_first else None
        if self.is_first:
            write_spec(plan, self.folder / PLAN_FILE)
            clear_left_overs(self.folder / CHECKPOINTS)

    def run(self) -> bool:
        """Train to the last step; return False when a stop was asked for before."""
        options = self.options
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        if self.metrics is not None:
            self.metrics.write(
                "start",
                step=self.step,
                task=self.data.task,
                pids=pids,
                num_steps=options.num_steps,
                num_ranks=self.plan.num_devices,
                samples_per_epoch=self.data.training.samples_per_epoch,
                unigram_entropy=self.unigram_entropy,
                baseline_memory_bytes=self.memory.baseline_bytes,
                resumed_from=options.resume,
                begun_from=options.init_from,
            )
        self.stop.listen(self.engine)
        last_step = min(options.num_steps, options.stop_at or options.num_steps)
        while self.step < last_step:
            started = time.perf_counter()
            rate = learning_rate(self.plan.job.optimizer, self.step, options.num_steps)
            report = self._train_step(rate)
            self.step += 1
            self.num_samples += self.plan.global_batch_size
            if self.step % options.log_every == 0 or self.step == last_step:
                self._log_step(report, rate, time.perf_counter() - started)
            if options.eval_every and self.step % options.eval_every == 0 and self.step < last_step:
                self._evaluate()
            if options.save_every and self.step % options.save_every == 0 and self.step < last_step:
                self._save()
            if report.stop_requested:
                break
        is_whole = self.step >= last_step
        if is_whole:
            self._evaluate()
        self._save()
        if self.metrics is not None:
            self.metrics.close()
        return is_whole

    def _train_step(self, rate: float) -> StepReport:
        first_sample = self.num_samples
        self.progress.begin("training", self.step + 1)

        def batch(first: int, count: int) -> tuple[Inputs, torch.Tensor]:
            return self.data.training.batch(first_sample + first, count)

        self.engine.pipeline.stopwatch.take()  # begin anew: a record is of one step
        report = self.engine.forward_backward(batch, step=self.step)
        if not report.is_finite:
            raise_not_finite(self.engine, batch, self.step + 1)
        with self.engine.pipeline.stopwatch.timing("optimizer"):
            self.engine.clip_gradients(self.plan.job.optimizer.clip_norm)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.engine.zero_grad()
        return report

    def _evaluate(self) -> None:
        held_out = self.data.held_out
        if held_out is None:
            return
        num_samples = min(self.options.eval_samples, held_out.samples_per_epoch)
        samples = LastSamples(held_out, num_samples)
        self.progress.begin("evaluating")
        found = self.engine.evaluate(samples.batch, ceil(num_samples / self.plan.micro_batch_samples))
        if self.metrics is not None:
            more = {"held_out_accuracy": found.accuracy} if self.data.task in CLASSES else {}
            self.metrics.write(
                "held_out", step=self.step, held_out_loss=found.loss, num_tokens=found.num_targets, **more
            )

    def _save(self) -> None:
        if self._saved_step == self.step:
            return
        self.progress.begin("saving a checkpoint")
        path = save_checkpoint(
            self.folder / CHECKPOINTS,
            self.engine,
            self.optimizer,
            step=self.step,
            num_samples=self.num_samples,
            data=self.data_info,
            config=self.config,
        )
        self._saved_step = self.step
        if self.metrics is not None:
            self.metrics.write("checkpoint", step=self.step, path=str(path))

    def _begin_from(self, folder: str) -> FullParameter:
        weights = begin_from_together(folder, self.plan.model, seed=self.options.seed, new_head=self.options.new_head)
        self.config = read_data(Path(folder) / CONFIG)
        if weights.new and self.is_first:
            self.show(f"new, since {folder} has none that fit: {', '.join(weights.new)}")
        return weights

    def _resume(self, path: Path) -> None:
        checkpoint = find_checkpoint(path, self.show if self.is_first else lambda _: None)
        info = load_checkpoint(checkpoint, self.engine, self.optimizer)
        if info.data.seed != self.options.seed:
            raise UserError(
                f"seed: {checkpoint} was trained with data seed {info.data.seed}, not {self.options.seed}; "
                f"use --seed {info.data.seed} so that no sample is seen twice"
            )
        if info.data != self.data_info and self.is_first:
            self.show(
                f"warning: {checkpoint} was trained on other data or another task, seq_len or held-out share; "
                f"sample {info.num_samples} is now another one, and some may be seen twice or never"
            )
        self.step, self.num_samples = info.step, info.num_samples
        self.config = read_config(checkpoint)
        if checkpoint.resolve().parent == (self.folder / CHECKPOINTS).resolve():
            self._saved_step = self.step

    def _log_step(self, report: StepReport, rate: float, step_s: float) -> None:
        self.progress.begin("writing metrics")
        peaks, parts = self._gather_peaks_and_parts()
        if self.metrics is None:
            return
        job, num_samples = self.plan.job, self.plan.global_batch_size
        flops_per_s = self.plan.cluster.device.peak_flops_per_s(job.param_dtype) * self.plan.num_devices
        mfu = step_flops(self.plan.model, job.lengths, num_samples) / step_s / flops_per_s
        is_images = self.data.task == "images"
        rate_of_work = (
            {"images_per_s": num_samples / step_s}
            if is_images
            else {"tokens_per_s": num_samples * job.tokens_per_sample / step_s}
        )
        self.metrics.write(
            "step",
            step=self.step,
            loss=report.loss,
            gradient_norm=report.gradient_norm,
            lr=rate,
            step_s=step_s,
            **rate_of_work,
            mfu=mfu if self.device.type == "cuda" else None,  # of a CPU no peak is known, only measured rates
            num_samples=self.num_samples,
            num_tokens=report.num_tokens,
            peak_memory_bytes=peaks,
            parts_s=parts,
        )

    def _gather_peaks_and_parts(self) -> tuple[list[int], dict[Part, list[float]]]:
        """Return every rank's peak memory and where its seconds went in the last step (see Stopwatch)."""
        stopwatch = self.engine.pipeline.stopwatch
        mine = torch.tensor([float(self.memory.peak_bytes), *stopwatch.take()], dtype=torch.float64, device=self.device)
        everyone = torch.empty((dist.get_world_size(), len(mine)), dtype=torch.float64, device=self.device)
        dist.all_gather_single(everyone.view(-1), mine)
        peaks, *parts = everyone.T.tolist()
        named = dict(zip(PARTS, parts, strict=True)) if stopwatch.means_something else {}
        return [int(peak) for peak in peaks], named

    def _data(self) -> RunData:
        """Return the data; the first rank of each machine makes the tokens. All ranks must have the same."""
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            prepare_data(self.plan, self.options, self.progress)
        dist.barrier()
        data = prepare_data(self.plan, self.options, self.progress)
        hashes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hashes, data.identity)
        others = [str(rank) for rank, one in enumerate(hashes) if one != hashes[0]]
        if others:
            raise DataMismatchError(
                f"data: ranks {', '.join(others)} read other data than rank 0; "
                "put the same files and tokenizer on every machine"
            )
        return data
