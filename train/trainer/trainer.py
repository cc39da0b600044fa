"""One rank's model and its steps. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ckpttool import batchnorm
from ckpttool.batchnorm import RunningStatistics
from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.distributed.group import Place
from ckpttool.distributed.plan import Step
from ckpttool.distributed.uneven import leaving_no_trace, settle_buckets
from ckpttool.errors import CheckFailed
from train.config.sections import OWN, ModelConfig, TrainConfig
from train.data.data_set import Data
from train.log.step_log import StepLog, work_of
from train.model import wrapping
from train.model.updater import Updater
from train.model.wrapping import Sharded
from train.tasks.builtin import Classification, Task
from train.trainer import preflight
from train.trainer.apart import NOTHING, Stateful
from train.trainer.exact import Exact
from train.trainer.feed import Feed
from train.trainer.progress import Progress, Recorder, Score, Scorer, Scores, Sums, TrainScore, selection


def _wrapped(settings: ModelConfig, model: nn.Module, place: Place) -> DistributedDataParallel | Sharded:
    wrapping.compare(model, "before training")
    wrapping.share_extra_states(model)
    if settings.shard:
        return Sharded(settings, model, place)
    how: dict[str, Any] = {"device_ids": [place.device]} if place.device.type == "cuda" else {}
    return DistributedDataParallel(model, find_unused_parameters=settings.find_unused, **how)


class Trainer:
    """A model on this rank, with its samples, what updates it, and how far it has come.

    Attributes:
        ddp: the model in DDP, or in what takes its place with `--shard`.
        exact: the passes of its steps.
        changed: what each pass changes, as it was tried.
        differing: what differs if ranks compute another loss for that, with the same weights.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        model: nn.Module,
        place: Place,
        task: Task,
        changed: Stateful = NOTHING,
    ) -> None:
        self.config, self.data, self.place, self.task = config, data, place, task
        self.changed = changed
        self.feed = Feed(config, data, task, place)
        self.progress = Progress()
        self.selection = selection(config.scores.best, task, tuple(data.others))
        settings = config.model
        scored: dict[str, Any] = {"batch_size": config.data.eval_batch, "workers": config.ranks.workers}
        scored["in_step"] = settings.shard
        of_test_sets = {OWN: data, **data.others} if data.test is not None else {}
        self.scorers = {name: Scorer(each, task, place, **scored) for name, each in of_test_sets.items()}
        if not settings.shard:  # there a rank may have no room for it
            model = model.to(place.device)
        if settings.batchnorm == "sync":
            batchnorm.to_sync(model)
        self.statistics = RunningStatistics(model) if settings.batchnorm == "pooled" else None
        may_ask = config.batch.accumulate > 1 or config.saving.resume
        dummy = self.feed.batch_of([0])
        self._draws = self._draws_numbers(model, dummy) if may_ask else False
        work = work_of(config, task, place, model, dummy)  # on all ranks: a user's model may gather in a pass
        wrapping.wrap(settings, model)
        self.ddp = _wrapped(settings, model, place)
        self.differing = preflight.compare_pass(settings, task, self.ddp.module, dummy)
        self.updater = Updater(config, self.ddp, place.device, self.feed.expected_steps)
        self.exact = Exact(config, task, self.feed, self.ddp, self.updater, self.progress, dummy)
        self.log = StepLog(config.log.log_every, place.device, last=self.updater.total_steps)
        self.log.work = work
        self.init: str | None = None  # the digest of the weights that --init gave
        self.before_update: Callable[[], object] = lambda: None
        if not settings.shard:
            settle_buckets(self.ddp, lambda: self.exact.run_dummy_pass(together=False))
        randomness.seed_all(randomness.seed_from(config.numbers.seed, "rank", place.rank))

    @property
    def recorder(self) -> Recorder:
        return self.feed.recorder

    @property
    def judge(self) -> str | None:
        """The fingerprint of the test set that `--best` names; None where it is --data's own."""
        other = self.data.others.get(self.selection.test_set)
        return None if other is None else other.fingerprint

    def rest_of_epoch(self) -> Iterator[tuple[Step, Iterator[tuple[Any, int]]]]:
        """Yield this rank's remaining steps of the current epoch, each with the iterator of its batches."""
        progress, place, epoch = self.progress, self.place, self.progress.epoch
        steps = self.feed.plan.of_rank(progress.epoch, place.rank, place.world_size, progress.step)
        batches = self.feed.batches(steps, progress)
        for number, step in enumerate(steps, start=progress.global_step + 1):
            if progress.epoch != epoch:  # a stream has ended
                return
            heartbeat.begin_step(number)
            yield step, batches

    def not_compiled(self) -> AbstractContextManager[Any]:
        """Return a context in which a model that is compiled runs as it is."""
        return wrapping.not_compiled() if self.config.model.compile else nullcontext()

    def depends_on_passes(self, *, shares: bool = False) -> str:
        """Return why another `--accumulate` would be another training; "" if it would be the same.

        With `shares`, why other shares of the ranks would be: synchronised layers don't depend on those.
        Not a collective.
        """
        norms = [layer for layer in self.ddp.modules() if isinstance(layer, _BatchNorm) and layer.training]
        by_pass = any(not (shares and isinstance(layer, wrapping.SYNCHRONISED)) for layer in norms)
        reasons = ["BatchNorm normalises each pass by itself"] * by_pass
        reasons += ["random numbers (as of dropout) are drawn pass by pass"] * self._draws
        reasons += [self.changed.why] * bool(self.changed.names)
        return ", and ".join(reasons)

    def _draws_numbers(self, model: nn.Module, batch: Any) -> bool:
        """Return whether a model draws random numbers in a pass. Not a collective; leaves no trace."""
        device = next(model.parameters()).device  # with --shard it is not where it will be trained
        batch = self.task.batch_to(batch, device)
        with torch.no_grad(), leaving_no_trace(model, together=False):
            before = collectives.digest_all(randomness.take())
            self.task.forward(model, batch)
            return collectives.digest_all(randomness.take()) != before

    def update(self, step: Step, counted: bool) -> torch.Tensor | None:
        """Change the weights by the gradients. Return the gradient's norm if the log will want it."""
        self.before_update()
        is_last = self.epoch_ends_with(step) and self.progress.epoch + 1 == self.config.training.epochs
        if is_last and not self.feed.is_planned:
            self.log.last = self.progress.global_step + 1
        if self.statistics:
            self.statistics.end_step()
        if not counted:
            self.updater.clear_gradients()
            self.progress.uncounted += 1
            self.progress.lr = self.updater.lr
            return None
        self.progress.lr, norm = self.updater.step(measured=self.log.due(self.progress.global_step + 1))
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
        may_overflow = self.config.numbers.amp == "fp16"  # the scaler then leaves the step out
        if loss is not None and math.isnan(loss) and not may_overflow:
            collectives.report_once(self._refuse_nan)
        self.recorder.step(progress.global_step)

    def _refuse_nan(self) -> NoReturn:
        what = f"the loss is NaN by step {self.progress.global_step}: training has diverged"
        hint = "look for NaN in the samples and in the loss, or give a smaller --lr or --warmup"
        raise CheckFailed(what, hint=hint)

    def epochs_done(self) -> float:
        """Return the epochs done so far, with the fraction of the current one."""
        return self.progress.epoch + self.progress.step / self.feed.expected_steps

    def epoch_ends_with(self, step: Step) -> bool:
        return step.index + 1 >= self.feed.steps_per_epoch

    def epoch_is_done(self) -> bool:
        return self.progress.step >= self.feed.steps_per_epoch

    def finish_epoch(self) -> TrainScore:
        """End the current epoch; return the score on its samples, as they were used. A collective."""
        score = self.score_so_far()
        self.feed.begin_epoch()
        self.progress.end_epoch()
        return score

    def score_so_far(self) -> TrainScore:
        """Return the score on the samples of the current epoch, as they were used. A collective."""
        return self.progress.score(counts_correct=isinstance(self.task, Classification))

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

    @contextmanager
    def as_scored(self) -> Iterator[None]:
        """Let the model be as it is scored: rank 0's buffers, the averages of `--ema`. A collective."""
        ema = self.updater.ema
        self.share_buffers()
        with ema.swapped() if ema else nullcontext():
            yield

    def share_buffers(self) -> None:
        """Give every rank rank 0's buffers, as DDP does before each forward pass. A collective.

        They may differ: each rank's plain BatchNorm has seen different samples.
        """
        apart = getattr(self.ddp, "parameters_to_ignore", ())
        collectives.broadcast_into(b for name, b in self.ddp.module.named_buffers() if name not in apart)
