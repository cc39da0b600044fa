"""One rank's model in training: what the loop of train/main.py calls in each step. Imports torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.distributed.dummy_pass import leaving_no_trace, run_dummy_pass, settle_buckets
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Plan, Step, check
from ckpttool.errors import CheckFailed
from train.config import command_line
from train.config.training import TrainConfig
from train.data.augment import augmented
from train.data.batches import batch_of, load
from train.data.data_set import Data
from train.data.samples import count
from train.log.speed import Work, flops_of, peak_of
from train.log.step_log import StepLog
from train.model import wrapping
from train.model.updater import Updater
from train.tasks.builtin import Classification
from train.tasks.task import Task
from train.trainer.progress import OWN, Progress, Recorder, Score, Scorer, Scores, Sums, TrainScore
from train.trainer.selection import selection


class Feed:
    """The training samples on their way to this rank, as the plan deals them."""

    def __init__(self, config: TrainConfig, data: Data, task: Task, place: Place) -> None:
        self.config, self.data, self.task, self.place = config, data, task, place
        self.samples = augmented(data.train, config, len(data.classes))
        self.collation = data.collation("training")
        self.plan: Plan = command_line.make_plan(config, count(data.train))
        self.steps_per_epoch = self.plan.steps_of(place.world_size)
        self.recorder = Recorder()

    def batches(self, steps: Iterable[Step], progress: Progress) -> Iterator[Any]:
        """Yield the micro-batches of these steps of the current epoch, in order, on this rank's device.

        Raises:
            CheckFailed: a batch does not suit the task, such as a label that is not one of the classes.
        """
        epoch, step = progress.epoch, progress.step
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)
        # Lists of indices are made while they are loaded and dropped when used: of 10^7 they take 400 MB.
        indices, taken = itertools.tee(micro_batch for step in steps for micro_batch in step.micro_batches)
        # With the step: a run resumed in the middle of an epoch would otherwise draw its first numbers again.
        seed = randomness.seed_from(self.config.seed, "workers", self.place.rank, epoch, step)
        how: dict[str, Any] = {"collation": self.collation, "seed": seed}
        loaded = load(self.samples, indices, self.place, self.config.workers, **how)
        for micro_batch, batch in zip(taken, loaded, strict=True):
            self.task.check(batch, micro_batch, "training")
            self.recorder.take(micro_batch, batch)
            yield self.task.batch_to(batch, self.place.device)

    def batch_of(self, indices: list[int]) -> Any:
        """Return samples as one batch on this rank's device, loaded in this process."""
        return self.task.batch_to(batch_of(self.samples, self.collation, indices), self.place.device)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the plan and the data."""
        facts = {"world_size": self.place.world_size, "data": self.data.fingerprint}
        return dataclasses.asdict(self.plan) | facts | {"contents": self.data.contents}

    def load(self, saved: Mapping[str, Any], rank_share: object) -> None:
        """Follow the shares that a run with `--rank-share auto` has measured on as many ranks.

        Raises:
            UsageFault: the shares can't be dealt: the file was changed.
        """
        ranks, shares = self.place.world_size, saved.get("rank_share")
        if shares and self.config.rank_share == rank_share == "auto" and saved["world_size"] == ranks:
            self.plan = dataclasses.replace(self.plan, rank_share=tuple(shares))
            check(self.plan, ranks, command_line.flag)


class Trainer:
    """A model on this rank, wrapped in DDP, with its samples, what updates it, and how far it has come."""

    def __init__(self, config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> None:
        self.config, self.data, self.place, self.task = config, data, place, task
        self.feed = Feed(config, data, task, place)
        self.progress = Progress()
        self.selection = selection(config.best, task, tuple(data.others))
        scored: dict[str, Any] = {"batch_size": config.eval_batch, "workers": config.workers}
        of_test_sets = {OWN: data, **data.others}.items()
        self.scorers = {name: Scorer(each, task, place, **scored) for name, each in of_test_sets}
        model = model.to(place.device)
        if config.batchnorm == "sync":
            batchnorm.to_sync(model)
        self.statistics = RunningStatistics(model) if config.batchnorm == "pooled" else None
        self._dummy_batch = self.feed.batch_of([0])
        work = self._work(model)
        wrapping.wrap(config, model)
        how: dict[str, Any] = {"device_ids": [place.device]} if place.device.type == "cuda" else {}
        self.ddp = DistributedDataParallel(model, find_unused_parameters=config.find_unused, **how)
        self.updater = Updater(config, self.ddp, place.device, self.feed.steps_per_epoch)
        self.log = StepLog(config.log_every, place.device, last=self.updater.total_steps)
        self.log.work = work
        self.init: str | None = None  # the digest of the weights that --init gave
        self.before_update: Callable[[], object] = lambda: None
        settle_buckets(self.ddp, lambda: self.run_dummy_step(together=False))
        randomness.seed_all(randomness.seed_from(config.seed, "rank", place.rank))

    def _work(self, model: nn.Module) -> Work:
        """Return what is known of the work of a model that is not wrapped yet; only rank 0 logs it."""
        place, task = self.place, self.task
        if place.rank != 0:
            return Work()
        copied = copy.deepcopy(model)  # one may count its passes
        forward = partial(task.forward, copied)
        flops = flops_of(lambda: run_dummy_pass(copied, self._dummy_batch, forward, together=False))
        return Work(task.unit, flops, peak_of(place.device, self.config.amp, place.world_size))

    @property
    def recorder(self) -> Recorder:
        return self.feed.recorder

    def rest_of_epoch(self) -> Iterator[tuple[Step, Iterator[Any]]]:
        """Yield this rank's remaining steps of the current epoch, each with the iterator of its batches."""
        progress, place = self.progress, self.place
        steps = self.feed.plan.of_rank(progress.epoch, place.rank, place.world_size, progress.step)
        batches = self.feed.batches(steps, progress)
        for number, step in enumerate(steps, start=progress.global_step + 1):
            heartbeat.begin_step(number)
            yield step, batches

    def passes(self, step: Step) -> int:
        """Return the number of forward passes of this rank in a step: its own, at least one; or the most of
        any rank, if layers are synchronised and every rank must pass them equally often."""
        return step.passes if self.config.batchnorm == "sync" else max(len(step.micro_batches), 1)

    def run_dummy_step(self, *, together: bool = True) -> None:
        """Run a pass with a gradient of zero, as this rank has no samples for it; others train in it if
        `together`."""
        with self.not_compiled(), self.updater.precision.autocast():
            forward = partial(self.task.forward, self.ddp)
            run_dummy_pass(self.ddp, self._dummy_batch, forward, together=together)

    def not_compiled(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a model that is compiled runs as it is."""
        return wrapping.not_compiled() if self.config.compile else contextlib.nullcontext()

    def depends_on_passes(self, *, shares: bool = False) -> str:
        """Return why another `--accumulate` would be another training; "" if it would be the same.

        With `shares`, why other shares of the ranks would be: synchronised layers don't depend on those.
        Not a collective; leaves no trace.
        """
        norms = [layer for layer in self.ddp.modules() if isinstance(layer, _BatchNorm) and layer.training]
        synced = nn.SyncBatchNorm, batchnorm.SyncBatchNorm
        by_pass = any(not (shares and isinstance(layer, synced)) for layer in norms)
        reasons = ["BatchNorm normalises each pass by itself"] * by_pass
        with torch.no_grad(), leaving_no_trace(self.ddp, together=False), self.not_compiled():
            before = collectives.digest_all(randomness.take())
            self.task.forward(self.ddp.module, self._dummy_batch)
            if collectives.digest_all(randomness.take()) != before:
                reasons.append("random numbers (as of dropout) are drawn pass by pass")
        return ", and ".join(reasons)

    def average_over_count(self, step: Step, sums: Sums) -> bool:
        """Make the reduced gradients those of the mean over all that the ranks counted. A collective.

        Returns whether anything counted: else the mean loss has no value, and the step is to change nothing.

        They are those of the sum divided by the number of samples, which every rank knows before any pass. If
        a task counts tokens or pixels, their number is known only afterwards. It is one factor for all ranks
        after the reduction, so this is exact under SyncBatchNorm and accumulation too.
        """
        if self.task.counts_samples:
            return True
        total = float(collectives.total(torch.tensor(float(sums.count), dtype=torch.float64)))
        if not total > 0:
            sums.loss = sums.count = 0  # a user's own sum over nothing may be NaN
            return False
        if total != step.global_size:
            gradients = [p.grad for p in self.ddp.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, step.global_size / total)
        return True

    def update(self, counted: bool) -> torch.Tensor | None:
        """Change the weights by the gradients. Return the gradient's norm if the log will want it."""
        self.before_update()
        if self.statistics:
            self.statistics.end_step()
        if not counted:
            self.updater.optimizer.zero_grad(set_to_none=True)
            self.progress.uncounted += 1
            self.progress.lr = self.updater.lr
            return None
        measured = self.log.due(self.progress.global_step + 1)
        self.progress.lr, norm = self.updater.step(measured=measured)
        return norm

    def end_step(self, step: Step, sums: Sums, norm: torch.Tensor | None) -> None:
        """Count a step that is done, and log it. A collective."""
        progress = self.progress
        progress.step += 1
        progress.global_step += 1
        progress.samples += step.global_size
        progress.sums.merge(sums)
        if isinstance(sums.loss, torch.Tensor):
            self.log.add(sums.loss, sums.count)
        facts: dict[str, Any] = {"samples": step.global_size, "lr": progress.lr, "epochs": self.epochs_done()}
        loss = self.log.step(progress.global_step, **facts, grad_norm=norm)
        may_overflow = self.config.amp == "fp16"  # the scaler then leaves the step out
        if loss is not None and math.isnan(loss) and not may_overflow:
            collectives.report_once(self._refuse_nan)
        self.recorder.step(progress.global_step)

    def _refuse_nan(self) -> NoReturn:
        what = f"the loss is NaN by step {self.progress.global_step}: training has diverged"
        hint = "look for NaN in the samples and in the loss, or give a smaller --lr or --warmup"
        raise CheckFailed(what, hint=hint)

    def epochs_done(self) -> float:
        """Return the epochs done so far, with the fraction of the current one."""
        return self.progress.epoch + self.progress.step / self.feed.steps_per_epoch

    def epoch_is_done(self) -> bool:
        return self.progress.step >= self.feed.steps_per_epoch

    def finish_epoch(self) -> TrainScore:
        """End the current epoch; return the score on its samples, as they were used. A collective."""
        return self.progress.end_epoch(counts_correct=isinstance(self.task, Classification))

    def evaluate(self) -> Score:
        """Return what train/evaluate.py would give for the bare model as it would be saved. A collective.

        With `--ema` it is the score of the averaged weights, which are saved as `ema.averages`.
        """
        return self.scores()[OWN]

    def scores(self) -> Scores:
        """Return `evaluate` of each test set by name. A collective."""
        heartbeat.phase("evaluation")
        with self.as_scored(), self.not_compiled():
            scores = {name: scorer.score(self.ddp.module) for name, scorer in self.scorers.items()}
        others = {name: score.score() for name, score in scores.items() if name != OWN}
        self.recorder.evaluation(scores[OWN].score() | ({"tests": others} if others else {}))
        return scores

    @contextlib.contextmanager
    def as_scored(self) -> Iterator[None]:
        """Let the model be as it is scored: rank 0's buffers, the averages of `--ema`. A collective."""
        ema = self.updater.ema
        self.share_buffers()
        with ema.swapped() if ema else contextlib.nullcontext():
            yield

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers, as DDP does before each forward pass. A collective.

        They may differ: each rank's plain BatchNorm has seen different samples.
        """
        apart = getattr(self.ddp, "parameters_to_ignore", ())
        collectives.broadcast_into(b for name, b in self.ddp.module.named_buffers() if name not in apart)

    def check_gradients(self) -> None:
        """Raise CheckFailed if a parameter did not affect this step's loss: DDP has not averaged it then."""
        if self.config.find_unused:
            return
        for name, parameter in self.updater.parameters:
            if parameter.grad is None:
                which = f"parameter {name} did not affect the output in step {self.progress.global_step + 1}"
                why = f"{which}, and ranks average the gradients of all parameters"
                ways = "let every forward pass use it (times 0 if need be), or set requires_grad=False"
                raise CheckFailed(f"--model {self.config.model}: {why}", hint=f"give --find-unused, {ways}")
