"""A run on this rank: its model, optimizer, position in the plan, and what the training loop calls.

The loop itself, forward, loss, backward and step, is in train/main.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.distributed.dummy_pass import run_dummy_pass, settle_buckets
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Step
from ckpttool.errors import CheckFailed
from train.config import plan as planning
from train.config.training import TrainConfig
from train.data.augment import augmented
from train.data.batches import load
from train.data.data_set import Data
from train.data.samples import count
from train.log.step_log import StepLog
from train.model import wrapping
from train.model.ema import Ema
from train.model.optimizer import build_optimizer, build_scheduler, clip
from train.model.precision import Precision
from train.run.limits import total_steps
from train.run.proof import Proof
from train.tasks.task import Classification, Task
from train.trainer.scoring import Score, Scorer, selection_score


@dataclass
class Progress:
    """How far a training run has come.

    Attributes:
        epoch: epochs finished.
        step: optimizer steps done in the current epoch.
        global_step: optimizer steps done since the beginning.
        samples: samples used since the beginning, by all ranks.
        best: the `selection_score` of the best score on the test set so far.
        unscored: the evaluation after the last step is still to be done: a signal has cut it short.
        lr: the learning rate of the last step.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    samples: int = 0
    best: float = -math.inf
    unscored: bool = False
    lr: float = 0.0


@dataclass(frozen=True)
class TrainScore:
    """A model's score on the samples it was trained on; `correct` is None where the task has no classes."""

    loss: float
    correct: int | None
    samples: int

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.samples if self.correct is not None and self.samples else None


class Sums:
    """This rank's sums over some forward passes. What lies on the device stays there: reading it would wait.

    Attributes:
        loss, count: of the task; `loss / count` is the mean loss.
        correct, samples: for the accuracy.
    """

    NAMES = ("loss", "correct", "samples", "count")

    def __init__(self) -> None:
        self.loss: torch.Tensor | float = 0.0
        self.correct: torch.Tensor | float = 0
        self.samples: int | float = 0
        self.count: torch.Tensor | float = 0

    def add(
        self, loss: torch.Tensor, count: int | torch.Tensor, correct: torch.Tensor | None, *, samples: int
    ) -> None:
        """Add what one forward pass gave."""
        self.loss = self.loss + loss.detach().double()
        self.correct = self.correct + (0 if correct is None else correct.detach())
        self.samples += samples
        self.count = self.count + count

    def merge(self, other: Sums) -> None:
        """Add the sums of other passes."""
        for name in self.NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def values(self) -> list[float]:
        """Return the sums as numbers, in the order of `NAMES`."""
        return [float(getattr(self, name)) for name in self.NAMES]

    def restore(self, values: Sequence[float]) -> None:
        """Become the sums that `values` returned."""
        for name, value in zip(self.NAMES, values, strict=True):
            setattr(self, name, value)


class Trainer:
    """A model on this rank, wrapped in DDP, with its optimizer and its position in the plan."""

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        model: nn.Module,
        place: Place,
        task: Task,
    ) -> None:
        self.config, self.data, self.place, self.task = config, data, place, task
        self.samples = augmented(data.train, config, len(data.classes))
        self.plan = planning.make_plan(config, count(data.train))
        self.steps_per_epoch = self.plan.steps_of(place.world_size)
        self.scorer = Scorer(data, task, place, batch_size=config.eval_batch, workers=config.workers)
        self.progress = Progress()
        self.precision = Precision(config.amp, place.device)
        model = model.to(place.device)
        if config.batchnorm == "sync":
            batchnorm.to_sync(model)
        self.statistics = RunningStatistics(model) if config.batchnorm == "pooled" else None
        wrapping.wrap(config, model)
        self.ddp = DistributedDataParallel(
            model,
            device_ids=[place.device] if place.device.type == "cuda" else None,
            find_unused_parameters=config.find_unused,
        )
        self.trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config, self.ddp)
        steps = total_steps(config, self.steps_per_epoch)
        self.scheduler = build_scheduler(config, self.optimizer, steps, self.steps_per_epoch)
        self.ema = Ema(self.ddp, config.ema) if config.ema else None
        self.sums = Sums()
        self.started_from: str | None = None
        self.resumed: dict[str, Any] | None = None
        self.proof: Proof | None = None
        self._gradient_norm: torch.Tensor | None = None
        self.log = StepLog(config.log_every, place.device, last=steps)
        self.before_update: Callable[[], object] = lambda: None
        self._stand_in = task.batch_to(default_collate([self.samples[0]]), place.device)
        settle_buckets(self.ddp, lambda: self.run_dummy_step(together=False))
        randomness.seed_all(randomness.seed_from(config.seed, "rank", place.rank))

    def rest_of_epoch(self) -> Iterator[tuple[Step, Iterator[Any]]]:
        """Yield this rank's remaining steps of the current epoch, each with the iterator of its batches.

        Raises:
            CheckFailed: a batch does not suit the task, such as a label that is not one of the classes.
        """
        progress, place = self.progress, self.place
        steps = list(self.plan.of_rank(progress.epoch, place.rank, place.world_size, start=progress.step))
        batches = self.batches_of(steps)
        self.ddp.train()
        for number, step in enumerate(steps, start=progress.global_step + 1):
            heartbeat.begin_step(number)
            yield step, batches

    def passes(self, step: Step) -> int:
        """Return the number of forward passes of this rank in a step: its own, at least one; or the most of
        any rank, if layers are synchronised and every rank must pass them equally often."""
        return step.passes if self.config.batchnorm == "sync" else max(len(step.micro_batches), 1)

    def gradients(self, *, reduced: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a pass: DDP reduces the gradients in it, or only adds them to its own."""
        return contextlib.nullcontext() if reduced else self.ddp.no_sync()

    def run_dummy_step(self, *, together: bool = True) -> None:
        """Run a forward and backward pass with a gradient of zero, as this rank has no samples for it.

        Args:
            together: whether other ranks train in this pass.
        """
        with self.not_compiled(), self.precision.autocast():
            run_dummy_pass(
                self.ddp, self._stand_in, lambda batch: self.task.forward(self.ddp, batch), together=together
            )

    def not_compiled(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a model that is compiled runs as it is."""
        return wrapping.not_compiled() if self.config.compile else contextlib.nullcontext()

    def average_over_count(self, step: Step, sums: Sums) -> None:
        """Make the reduced gradients those of the mean over all that the ranks counted. A collective.

        They are those of the sum divided by the number of samples, which every rank knows before any pass. If
        a task counts tokens or pixels, their number is known only afterwards. It is one factor for all ranks
        after the reduction, so this is exact under SyncBatchNorm and accumulation too.

        Args:
            sums: of this rank's passes in the step.

        Raises:
            CheckFailed: all ranks together counted nothing, so the mean loss has no value. RankFailed on all
                but rank 0.
        """
        if self.task.counts_samples:
            return
        total = float(collectives.total(torch.tensor(float(sums.count), dtype=torch.float64)))
        if not total > 0:
            collectives.report_once(self._refuse_to_count_nothing)
        if total != step.global_size:
            gradients = [p.grad for p in self.ddp.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, step.global_size / total)

    def _refuse_to_count_nothing(self) -> NoReturn:
        raise CheckFailed(
            f"--task {self.config.task}: counted nothing in step {self.progress.global_step + 1}, whose mean "
            "loss has no value",
            hint="leave out samples without anything that counts, or take a larger --batch-size",
        )

    def update(self) -> None:
        """Change the weights by the gradients, and clear those."""
        self.before_update()
        if self.statistics:
            self.statistics.end_step()
        self.precision.unscale(self.optimizer)
        self._gradient_norm = None
        if self.config.clip_norm or self.log.due(self.progress.global_step + 1):
            self._gradient_norm = clip([p for _, p in self.trained], self.config.clip_norm)
        self.progress.lr = float(self.optimizer.param_groups[0]["lr"])
        if self.precision.step(self.optimizer):
            self.scheduler.step()
            if self.ema:
                self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)

    def end_step(self, step: Step, sums: Sums) -> None:
        """Count a step that is done, and log it. A collective."""
        progress = self.progress
        progress.step += 1
        progress.global_step += 1
        progress.samples += step.global_size
        self.sums.merge(sums)
        if isinstance(sums.loss, torch.Tensor):
            self.log.add(sums.loss, sums.count)
        loss = self.log.step(
            progress.global_step,
            samples=step.global_size,
            lr=progress.lr,
            epochs=self.epochs_done(),
            grad_norm=self._gradient_norm,
        )
        may_overflow = self.config.amp == "fp16"  # the scaler then leaves the step out
        if loss is not None and math.isnan(loss) and not may_overflow:
            collectives.report_once(self._refuse_nan)
        if self.proof:
            self.proof.step(progress.global_step)

    def _refuse_nan(self) -> NoReturn:
        raise CheckFailed(
            f"the loss is NaN by step {self.progress.global_step}: nothing can be learned from here on",
            hint="look for NaN in the samples and in the loss, or give a smaller --lr or --warmup",
        )

    def epochs_done(self) -> float:
        """Return the epochs done so far, with the fraction of the current one."""
        return self.progress.epoch + self.progress.step / self.steps_per_epoch

    def epoch_is_done(self) -> bool:
        """Return whether all steps of the current epoch are done, so that it is to be finished."""
        return self.progress.step >= self.steps_per_epoch

    def finish_epoch(self) -> TrainScore:
        """End the current epoch. A collective.

        Returns:
            The score on the epoch's training samples, each as it was when it was used.
        """
        own = torch.tensor(self.sums.values(), dtype=torch.float64)
        loss, correct, samples, counted = collectives.total(own).tolist()
        self.sums = Sums()
        self.progress.epoch += 1
        self.progress.step = 0
        return TrainScore(
            loss / counted, int(correct) if isinstance(self.task, Classification) else None, int(samples)
        )

    def evaluate(self) -> Score:
        """Return what train/evaluate.py would give for the bare model as it would be saved. A collective.

        With `--ema` it is the score of the averaged weights, which are saved as `ema.averages`.

        Raises:
            CheckFailed: a batch does not suit the task; ranks without that sample raise RankFailed.
        """
        heartbeat.phase("evaluation")
        averaged = self.ema.swapped() if self.ema else contextlib.nullcontext()
        self.share_buffers()
        with averaged, self.not_compiled():
            score = self.scorer.score(self.ddp.module)
        if self.proof:
            self.proof.evaluation(score.score())
        return score

    def note_best(self, score: Score) -> bool:
        """Return whether this is the best score on the test set so far, and if so remember it.

        A score with a loss of NaN never is.
        """
        is_best = selection_score(score) > self.progress.best
        if is_best:
            self.progress.best = selection_score(score)
        return is_best

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
        for name, parameter in self.trained:
            if parameter.grad is None:
                raise CheckFailed(
                    f"--model {self.config.model}: parameter {name} did not affect the output in step "
                    f"{self.progress.global_step + 1}, and ranks average the gradients of all parameters",
                    hint="give --find-unused, let every forward pass use it (times 0 if need be), or set "
                    "requires_grad=False",
                )

    def batches_of(self, steps: list[Step]) -> Iterator[Any]:
        """Yield the micro-batches of these steps of the current epoch, in order, on this rank's device.

        Raises:
            CheckFailed: a batch does not suit the task.
        """
        samples, epoch, step = self.samples, self.progress.epoch, self.progress.step
        set_epoch = getattr(samples, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        indices = [micro_batch for step in steps for micro_batch in step.micro_batches]
        # With the step: a run resumed in the middle of an epoch would otherwise draw its first numbers again.
        seed = randomness.seed_from(self.config.seed, "workers", self.place.rank, epoch, step)
        loaded = load(samples, indices, self.place, self.config.workers, seed=seed)
        for micro_batch, batch in zip(indices, loaded, strict=True):
            self.task.check(batch, micro_batch, "training")
            if self.proof:
                self.proof.take(micro_batch, batch)
            yield self.task.batch_to(batch, self.place.device)
