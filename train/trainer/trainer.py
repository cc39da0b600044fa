"""One rank's model and its steps. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
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
from ckpttool.distributed.uneven import gradients_zeroed, leaving_no_trace, run_dummy_pass, settle_buckets
from ckpttool.errors import CheckFailed
from train.config.sections import OWN, ModelConfig, TrainConfig
from train.data.data_set import Data
from train.log.step_log import StepLog, Work, work_of
from train.model import wrapping
from train.model.updater import Updater
from train.model.wrapping import Sharded
from train.tasks.builtin import Classification, ModelLoss, Task
from train.trainer import preflight
from train.trainer.feed import Feed
from train.trainer.preflight import NO_GRADIENT
from train.trainer.progress import Progress, Recorder, Score, Scorer, Scores, Sums, TrainScore, selection

Named = Sequence[tuple[str, nn.Parameter]]


class AllUsed:
    """Makes sure that each pass of a step uses all parameters, as ranks sum gradients by their order.

    used.between()      # after each pass but the last
    used.end()          # CheckFailed names a parameter that a pass has left out

    A parameter that only an earlier pass has used has a gradient all the same. Under DDP the last pass
    matters, in which all gradients are averaged, and so written to. FSDP2 sums over ranks in each pass.
    """

    def __init__(self, settings: ModelConfig, parameters: Named, *, may_search: bool = True) -> None:
        self.settings, self.parameters, self.may_search = settings, parameters, may_search
        self._kept: list[torch.Tensor] = []  # with --shard, of the passes before
        self._versions: list[int | None] = []  # else, before the last pass

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()  # a pass without samples uses all, too

    def between(self) -> None:
        gradients = [parameter.grad for _, parameter in self.parameters]
        if not self.settings.shard:
            self._versions = [None if grad is None else grad._version for grad in gradients]
            return
        self._kept = self._added()
        for _, parameter in self.parameters:
            parameter.grad = None

    def end(self, step: int) -> None:
        before, self._versions = self._versions or [None] * len(self.parameters), []
        for (name, parameter), version in zip(self.parameters, before, strict=True):
            if parameter.grad is None or parameter.grad._version == version:
                raise self._unused(name, f"in step {step}")
        if self._kept:
            for (_, parameter), grad in zip(self.parameters, self._added(), strict=True):
                parameter.grad = grad
            self._kept = []

    @torch.no_grad()
    def _added(self) -> list[torch.Tensor]:
        """Return the gradients with those of the passes before."""
        for name, parameter in self.parameters:
            if parameter.grad is None:
                raise self._unused(name, "in a pass")
        new = [parameter.grad for _, parameter in self.parameters if parameter.grad is not None]
        return [kept.add_(grad) for kept, grad in zip(self._kept, new, strict=True)] if self._kept else new

    def _unused(self, name: str, where: str) -> CheckFailed:
        which = f"parameter {name} did not affect the output {where}"
        why = f"{which}, and ranks average the gradients of all parameters"
        flag = "give --find-unused, " if self.may_search and not self.settings.shard else ""
        ways = "let every forward pass use it (times 0 if need be), or set requires_grad=False"
        return CheckFailed(f"--model {self.settings.name}: {why}", hint=f"{flag}{ways}")


class Used:
    """Which parameters the passes of a step have used, so that no rank updates the others.

    In one process these have no gradient, and an optimizer leaves them as they are. DDP leaves out those that
    no rank has used, but counts a pass without samples, whose gradients of zero bring momentum and decay.
    """

    def __init__(self, parameters: Named) -> None:
        self.parameters = parameters
        self._used: set[int] = set()
        self._counts = True
        for number, (_, parameter) in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))

    def _note(self, number: int, _: torch.Tensor) -> None:
        if self._counts:
            self._used.add(number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a pass in the block count as none."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def between(self) -> None:
        """A pass is done, and not the last one of a step."""

    def end(self, step: int) -> None:
        """End a step's passes: take the gradients of parameters that no rank has used. A collective."""
        own = torch.tensor([number in self._used for number in range(len(self.parameters))])
        self._used.clear()
        of_ranks = collectives.total(own.long()).tolist()
        for (_, parameter), ranks in zip(self.parameters, of_ranks, strict=True):
            if not ranks:
                parameter.grad = None


# ---- the trainer -------------------------------------------------------------------------------------


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
        dummy_batch: of one sample, the same on all ranks.
        differing: what differs if ranks compute another loss for that, with the same weights.
    """

    def __init__(self, config: TrainConfig, data: Data, model: nn.Module, place: Place, task: Task) -> None:
        self.config, self.data, self.place, self.task = config, data, place, task
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
        self.dummy_batch = self.feed.batch_of([0])
        may_ask = config.batch.accumulate > 1 or config.saving.resume
        self._draws = self._draws_numbers(model) if may_ask else False
        work = work_of(config, task, place, model, self.dummy_batch) if place.rank == 0 else Work()
        wrapping.wrap(settings, model)
        self.ddp = _wrapped(settings, model, place)
        self.differing = preflight.compare_pass(settings, task, self.ddp.module, self.dummy_batch)
        self.updater = Updater(config, self.ddp, place.device, self.feed.expected_steps)
        trained = self.updater.parameters
        all_used = AllUsed(settings, trained, may_search=not config.batch.virtual_ranks)
        self.used = Used(trained) if settings.find_unused else all_used
        self.log = StepLog(config.log.log_every, place.device, last=self.updater.total_steps)
        self.log.work = work
        self.init: str | None = None  # the digest of the weights that --init gave
        self.before_update: Callable[[], object] = lambda: None
        self._count_sum: Callable[[], torch.Tensor] | None = None  # over ranks, of the present step
        if not settings.shard:
            settle_buckets(self.ddp, lambda: self.run_dummy_step(together=False))
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

    def passes(self, step: Step) -> int:
        """Return the number of forward passes of this rank in a step: its own, at least one; or the most of
        any rank, if a pass sends, as through synchronised layers, and ranks must take equally many."""
        in_step = self.config.model.batchnorm == "sync" or self.config.model.shard
        return step.passes if in_step else max(len(step.micro_batches), 1)

    def run_dummy_step(self, after_forward: Callable[[], object] | None = None, **how: bool) -> None:
        """Run a pass with a gradient of zero, as this rank has no samples for it.

        Other ranks train in it, unless `together=False` is given.
        """

        def forward(batch: Any) -> Any:
            outputs = self.task.forward(self.ddp, batch)
            if after_forward is not None:
                after_forward()
            return outputs

        with self.not_compiled(), self.updater.precision.autocast(), self.used.paused():
            run_dummy_pass(self.ddp, self.dummy_batch, forward, **how)

    def not_compiled(self) -> AbstractContextManager[Any]:
        """Return a context in which a model that is compiled runs as it is."""
        return wrapping.not_compiled() if self.config.model.compile else nullcontext()

    def depends_on_passes(self, *, shares: bool = False) -> str:
        """Return why another `--accumulate` would be another training; "" if it would be the same.

        With `shares`, why other shares of the ranks would be: synchronised layers don't depend on those.
        Not a collective.
        """
        norms = [layer for layer in self.ddp.modules() if isinstance(layer, _BatchNorm) and layer.training]
        synced = nn.SyncBatchNorm, batchnorm.SyncBatchNorm
        by_pass = any(not (shares and isinstance(layer, synced)) for layer in norms)
        reasons = ["BatchNorm normalises each pass by itself"] * by_pass
        reasons += ["random numbers (as of dropout) are drawn pass by pass"] * self._draws
        return ", and ".join(reasons)

    def _draws_numbers(self, model: nn.Module) -> bool:
        """Return whether a model draws random numbers in a pass. Not a collective; leaves no trace."""
        device = next(model.parameters()).device  # with --shard it is not where it will be trained
        batch = self.task.batch_to(self.dummy_batch, device)
        with torch.no_grad(), leaving_no_trace(model, together=False):
            before = collectives.digest_all(randomness.take())
            self.task.forward(model, batch)
            return collectives.digest_all(randomness.take()) != before

    def begin_count(self, sums: Sums) -> None:
        """Send what this rank has counted in a step, unless all know it. A collective, between the last
        forward pass and its backward pass: the sum over ranks arrives with the gradients.
        """
        if self.task.counts_samples and self.feed.is_planned:
            return
        # A count that lies on the GPU is not waited for here, or backward would begin later.
        count = torch.as_tensor(sums.count, dtype=torch.float64).reshape(1)
        others = torch.tensor([sums.samples, *self.feed.told()], dtype=torch.float64)
        own = torch.cat([count, others.to(count.device, non_blocking=True)])
        self._count_sum = collectives.begin_total(own)

    def backward_of(self, loss: torch.Tensor, count: float | torch.Tensor) -> AbstractContextManager[None]:
        """Return the context of a backward pass: where nothing counts, the gradient of a mean is NaN."""
        if not loss.requires_grad:  # torch's own error does not say in which step
            where = f"in step {self.progress.global_step + 1} the loss of rank {self.place.rank}"
            what = f"{where} does not depend on the parameters of --model {self.config.model.name}"
            raise CheckFailed(f"--task {self.task.name}: {what}", hint=NO_GRADIENT)
        # A count that lies on the GPU is waited for only where the loss is such a mean.
        is_near = not isinstance(count, torch.Tensor) or count.device.type == "cpu"
        nothing = (is_near or isinstance(self.task, ModelLoss)) and not count
        return gradients_zeroed(self.ddp) if nothing else nullcontext()

    def average_over_count(self, step: Step, sums: Sums) -> tuple[Step, bool]:
        """Make the reduced gradients those of the mean over all that the ranks counted.

        It waits for what `begin_count` sent. A collective where samples may be missing.

        Returns the step with the samples that it had, which may be fewer than planned, and whether anything
        counted: else the mean loss has no value, and the step is to change nothing.

        They are those of the sum divided by the number of samples, which every rank knows before any pass. If
        a task counts tokens or pixels, their number is known only afterwards. It is one factor for all ranks
        after the reduction, so this is exact under SyncBatchNorm and accumulation too.
        """
        if self._count_sum is None:
            return step, True
        total, *told = self._count_sum().tolist()
        self._count_sum = None
        planned = step.global_size
        if not self.feed.is_planned:
            step = self.feed.settle(step, int(told[0]), told[1:])
            if self.epoch_ends_with(step) and self.progress.epoch + 1 == self.config.training.epochs:
                self.log.last = self.progress.global_step + 1
        if not total > 0:
            sums.loss = sums.count = 0  # a user's own sum over nothing may be NaN
            return step, False
        if total != planned:
            gradients = [p.grad for _, p in self.updater.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, planned / total)
        return step, True

    def update(self, counted: bool) -> torch.Tensor | None:
        """Change the weights by the gradients. Return the gradient's norm if the log will want it."""
        self.before_update()
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

    def check_gradients(self) -> None:
        """End a step's passes: what none has used has no gradient, or is an error. A collective."""
        self.used.end(self.progress.global_step + 1)
