"""One epoch of training: the arithmetic of data parallelism.

DDP averages gradients over W ranks. The gradient we want is that of the mean loss over the N samples of a
global batch, so each rank's loss is W · Σℓ / N over its own samples: exact for shares of any size, unlike
the usual mean of each rank's mean.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed import collectives, randomness
from ckpttool.distributed.buckets import settle_buckets
from ckpttool.distributed.mean_loss import global_mean_loss
from ckpttool.distributed.place import Place
from ckpttool.distributed.stand_in import pass_standing_in
from ckpttool.errors import CheckFailed
from train.config import TrainConfig
from train.data import Data
from train.loading import load
from train.optimizers import build_optimizer, build_scheduler
from train.plan import Plan, Step
from train.samples import count
from train.scoring import Score as TestScore
from train.scoring import Scorer, merit
from train.task import Task

Batch = Any


@dataclass
class Progress:
    """How far a training run has come.

    Attributes:
        epoch: epochs finished.
        step: optimizer steps done in the current epoch.
        global_step: optimizer steps done since the beginning.
        samples: samples used since the beginning, by all ranks.
        best: the `merit` of the best score on the test set so far.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    samples: int = 0
    best: float = -math.inf


@dataclass(frozen=True)
class Score:
    """A model's score on the samples it was trained on."""

    correct: int
    samples: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples if self.samples else 0.0


def make_plan(config: TrainConfig, data: Data) -> Plan:
    """Return how the training samples are cut into batches and dealt to ranks."""
    return Plan(count(data.train), config.batch_size, config.seed, config.drop_last, config.accumulate)


class Trainer:
    """A model on this rank, wrapped in DDP, with its optimizer and its position in the plan."""

    def __init__(self, config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> None:
        self.config, self.data, self.place, self.task = config, data, place, task
        self.plan = make_plan(config, data)
        self.scorer = Scorer(data, task, place, batch_size=config.eval_batch, workers=config.workers)
        self.progress = Progress()
        devices = [place.device] if place.device.type == "cuda" else None
        model = model.to(place.device)
        if config.batchnorm == "sync":
            batchnorm.to_sync(model)
        self.statistics = RunningStatistics(model) if config.batchnorm == "pooled" else None
        self.ddp = DistributedDataParallel(model, device_ids=devices)
        self.optimizer = build_optimizer(config, self.ddp)
        self.scheduler = build_scheduler(config, self.optimizer, self.plan.steps)
        self.sums = self._no_sums()
        self._stand_in = task.batch_to(default_collate([data.train[0]]), place.device)
        settle_buckets(self.ddp, lambda: self._pass_standing_in(together=False))
        randomness.seed_all(randomness.seed_from(config.seed, "rank", place.rank))

    def steps(self) -> Iterator[None]:
        """Train the rest of the current epoch, and yield after each optimizer step. A collective.

        Raises:
            CheckFailed: a label is not one of the classes.
        """
        progress, place = self.progress, self.place
        self.ddp.train()
        steps = list(self.plan.of_rank(progress.epoch, place.rank, place.world_size, start=progress.step))
        batches = self._load(steps)
        for step in steps:
            self._take(step, batches)
            progress.step += 1
            progress.global_step += 1
            progress.samples += step.global_size
            yield

    def finish_epoch(self) -> Score:
        """End the current epoch. A collective.

        Returns:
            The score on the epoch's training samples, each as it was when it was used.
        """
        loss, correct, samples = collectives.total(self.sums).tolist()
        self.sums = self._no_sums()
        self.progress.epoch += 1
        self.progress.step = 0
        return Score(int(correct), int(samples), loss / samples)

    def evaluate(self) -> TestScore:
        """Return what train/evaluate.py would give for the bare model as it would be saved. A collective.

        Raises:
            CheckFailed: a label is not one of the classes; ranks without that sample raise RankFailed.
        """
        with self.one_model():
            return self.scorer.score(self.ddp.module)

    def note_best(self, score: TestScore) -> bool:
        """Return whether this is the best score on the test set so far, and if so remember it.

        A score with a loss of NaN never is.
        """
        is_best = merit(score) > self.progress.best
        if is_best:
            self.progress.best = merit(score)
        return is_best

    @contextlib.contextmanager
    def one_model(self) -> Iterator[None]:
        """Give every rank rank 0's buffers, as DDP does before each forward pass. A collective.

        They may differ: each rank's plain BatchNorm has seen different samples.
        """
        apart = getattr(self.ddp, "parameters_to_ignore", ())
        collectives.broadcast_into(b for name, b in self.ddp.module.named_buffers() if name not in apart)
        yield

    def _take(self, step: Step, batches: Iterator[Batch]) -> None:
        """Take one optimizer step. Every rank runs backward exactly once with gradient synchronisation."""
        passes = self._passes(step)
        counted = 0
        for number in range(1, passes + 1):
            in_sync = number == passes
            if number > len(step.micro_batches):
                with contextlib.nullcontext() if in_sync else self.ddp.no_sync():
                    self._pass_standing_in()
                continue
            batch = self.task.batch_to(next(batches), self.place.device)
            with contextlib.nullcontext() if in_sync else self.ddp.no_sync():
                outputs = self.task.forward(self.ddp, batch)
                loss, count = self.task.loss(outputs, batch)
                global_mean_loss(loss, step.global_size).backward()
            correct = self.task.correct(outputs, batch)
            self.sums[0] += loss.detach()
            self.sums[1] += 0 if correct is None else correct
            self.sums[2] += count
            counted += int(count)
        self._check_gradients()
        total = int(collectives.total(torch.tensor([counted]))[0])
        if total != step.global_size:
            for parameter in self.ddp.parameters():
                if parameter.grad is not None:
                    parameter.grad *= step.global_size / total
        if self.statistics:
            self.statistics.end_step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def _check_gradients(self) -> None:
        """Raise CheckFailed if a parameter did not affect this step's loss: DDP has not averaged it then."""
        for name, parameter in self.ddp.module.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise CheckFailed(
                    f"--model {self.config.model}: parameter {name} did not affect the output in step "
                    f"{self.progress.global_step + 1}, and ranks average the gradients of all parameters",
                    hint="let every forward pass use it (times 0 if need be), or set requires_grad=False",
                )

    def _passes(self, step: Step) -> int:
        """Return the number of forward passes in a step: this rank's own; or the most of any rank, if the
        layers are synchronised and every rank must pass them equally often."""
        if self.config.batchnorm != "sync":
            return max(len(step.micro_batches), 1)
        largest_share = -(-step.global_size // self.place.world_size)
        return min(self.config.accumulate, largest_share)

    def _pass_standing_in(self, *, together: bool = True) -> None:
        """Take part in a forward and backward pass without samples."""
        forward = functools.partial(self.task.forward, self.ddp)
        pass_standing_in(self.ddp, self._stand_in, forward, together=together)

    def _load(self, steps: list[Step]) -> Iterator[Batch]:
        """Yield the micro-batches of these steps, in order. Raise CheckFailed for an unknown label."""
        samples, epoch, step = self.data.train, self.progress.epoch, self.progress.step
        set_epoch = getattr(samples, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        indices = [micro_batch for step in steps for micro_batch in step.micro_batches]
        # With the step: a run resumed in the middle of an epoch would otherwise draw its first numbers again.
        seed = randomness.seed_from(self.config.seed, "workers", self.place.rank, epoch, step)
        loaded = load(samples, indices, self.place, self.config.workers, seed=seed)
        for micro_batch, batch in zip(indices, loaded, strict=True):
            self.task.check(batch, micro_batch, "training")
            yield batch

    def _no_sums(self) -> torch.Tensor:
        """Return zeros for this rank's loss, correct predictions and samples in the current epoch."""
        return torch.zeros(3, dtype=torch.float64, device=self.place.device)
