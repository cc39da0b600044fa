"""How far a training has come, and how good it is. Imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpttool.distributed import collectives, heartbeat
from ckpttool.distributed.group import Place
from ckpttool.errors import CheckFailed, FileError, UsageFault
from ckpttool.metrics.base import measures
from ckpttool.metrics.certificate import Certificate, Evaluation, LossCertificate
from ckpttool.metrics.evaluating import Evaluated, Evaluator
from train.config.sections import OWN
from train.data.batches import load
from train.data.data_set import Data
from train.tasks.builtin import Classification, Task

# Of classification, what is correct of each class; of other tasks, their loss and metrics.
Score = Certificate | LossCertificate

# The scores of an evaluation by the name of the test set; OWN comes first.
Scores = Mapping[str, Score]


class Scorer:
    """Scores bare models on one test set. Keeps its loading processes from one score to the next."""

    def __init__(
        self,
        data: Data,
        task: Task,
        place: Place,
        *,
        batch_size: int,
        workers: int = 0,
        in_step: bool = False,
    ) -> None:
        self.data, self.task = data, task
        assert data.test is not None
        self.before_batch: Callable[[], object] = lambda: None  # what it raises ends the evaluation
        self.measures = measures(task.metrics)
        how: dict[str, Any] = {"collation": data.collation("test"), "again": True}
        loaded = partial(load, data.test, place=place, workers=workers, **how)
        dealt: dict[str, Any] = {"batch_size": batch_size, "device": place.device, "load": loaded}
        self.evaluator = Evaluator(data.test, **dealt, in_step=in_step)

    def score(self, model: nn.Module, *, checkpoint: str | None = None) -> Score:
        """Return the score over the samples of all ranks; `checkpoint` is the digest for the certificate.

        A collective: if one rank fails, all end after the current batch.
        """
        if isinstance(self.task, Classification):
            return self.classes(model, checkpoint=checkpoint).certificate
        about, task = self._about(checkpoint), self.task
        how: dict[str, Any] = {"check": self._check, "forward": task.forward, "move": task.batch_to}
        return self.evaluator.losses(model, task.loss, self.measures, about=about, **how)

    def classes(self, model: nn.Module, *, checkpoint: str | None = None) -> Evaluated:
        """Return the score of a classifier, with this rank's rows. A collective, as `score`."""
        about = self._about(checkpoint)
        return self.evaluator.classes(model, about=about, check=self._check, forward=self.task.forward)

    def look(self) -> None:
        """Read all test samples, each on the rank that scores it. A collective; FileError for one of them."""
        with collectives.fail_together():
            try:
                for _ in self.evaluator.loader:
                    heartbeat.progress()
            except FileError as fault:
                hint = "a score is of every test sample: take this one out of the test set"
                raise type(fault)(fault.path, fault.reason, hint=hint) from fault

    def _check(self, batch: Any, indices: Any) -> None:
        self.before_batch()
        self.task.check(batch, indices, "test")

    def _about(self, checkpoint: str | None) -> Evaluation:
        classes = self.data.classes or None
        return Evaluation(checkpoint=checkpoint, data=self.data.fingerprint, classes=classes)


def in_words(score: Score) -> str:
    """Return a score as part of a sentence: `776 of 846 correct (91.73%), loss 0.3012`."""
    if isinstance(score, Certificate):
        return f"{score.correct} of {score.samples} correct ({score.accuracy:.2%}), loss {score.loss:.4f}"
    numbers = ((name, value) for name, value in score.metrics.items() if isinstance(value, int | float))
    metrics = "".join(f", {name} {value:.4g}" for name, value in numbers)
    return f"loss {score.loss:.4f} over {score.count:,}{metrics}, {score.samples:,} samples"


# ---- how far a run has come --------------------------------------------------------------------------


class Sums:
    """This rank's sums over some forward passes: of losses, and of what was counted, predicted and used."""

    NAMES = ("loss", "correct", "samples", "count")

    def __init__(self) -> None:
        # What lies on the device stays there: reading it would wait.
        self.loss: torch.Tensor | float = 0.0
        self.correct: torch.Tensor | float = 0
        self.samples: int | float = 0
        self.count: torch.Tensor | float = 0

    def add(self, loss: torch.Tensor, count: float | torch.Tensor, *, samples: int) -> None:
        """Add what one forward pass gave."""
        self.loss = self.loss + loss.detach().double()
        self.samples += samples
        self.count = self.count + count

    def add_correct(self, correct: torch.Tensor | None) -> None:
        self.correct = self.correct + (0 if correct is None else correct.detach())

    def merge(self, other: Sums) -> None:
        for name in self.NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def values(self) -> list[float]:
        """Return the sums as numbers, in the order of `NAMES`."""
        return [float(getattr(self, name)) for name in self.NAMES]

    def restore(self, values: Sequence[float]) -> None:
        for name, value in zip(self.NAMES, values, strict=True):
            setattr(self, name, value)


@dataclass(frozen=True)
class TrainScore:
    """A model's score on the samples it was trained on; `correct` is None where the task has no classes."""

    loss: float
    correct: int | None
    samples: int

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.samples if self.correct is not None and self.samples else None


@dataclass
class Progress:
    """How far a training run has come."""

    epoch: int = 0  # finished
    step: int = 0  # done in the current epoch
    global_step: int = 0
    samples: int = 0  # used since the beginning, by all ranks
    best: float = -math.inf  # the merit of the best score on the test set, the larger the better
    since_best: int = 0  # evaluations since then
    not_finite: int = 0  # of these, those whose score was NaN or infinite
    top: list[list[float]] = field(default_factory=list)  # of --keep-best: [merit, step], the best first
    uncounted: int = 0  # steps that changed nothing, as nothing counted in them
    unscored: bool = False  # a signal has cut short the evaluation after the last step
    lr: float = 0.0  # of the last step
    sums: Sums = field(default_factory=Sums)  # of the current epoch, on this rank

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it. A collective."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return fields | {"sums": collectives.gather(self.sums.values())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of any number of ranks."""
        of_ranks, rank = state["sums"], collectives.rank()
        for name, value in state.items():
            if name != "sums":
                setattr(self, name, value)
        if len(of_ranks) == collectives.world_size():
            self.sums.restore(of_ranks[rank])
        elif rank == 0:  # a different number of ranks: one of them holds the total
            self.sums.restore([sum(column) for column in zip(*of_ranks, strict=True)])

    def score(self, *, counts_correct: bool) -> TrainScore:
        """Return the score on the samples of the current epoch, as they were used. A collective."""
        own = torch.tensor(self.sums.values(), dtype=torch.float64)
        loss, correct, samples, counted = collectives.total(own).tolist()
        mean = loss / counted if counted else math.nan
        return TrainScore(mean, int(correct) if counts_correct else None, int(samples))

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.sums = Sums()
        self.epoch += 1
        self.step = 0

    def note(self, merit: float, keep: int = 0) -> tuple[bool, bool]:
        """Note the merit of an evaluation; return whether it is the best so far, and one of the best `keep`.

        One of -inf, as of NaN, never is.
        """
        is_best = merit > self.best
        self.best, self.since_best = max(merit, self.best), 0 if is_best else self.since_best + 1
        self.not_finite = 0 if is_best else self.not_finite + (merit == -math.inf)
        worst = self.top[keep - 1][0] if 0 < keep <= len(self.top) else -math.inf
        is_kept = keep > 0 and merit > worst
        if is_kept:
            self.top = sorted([*self.top, [merit, self.global_step]], key=lambda one: (-one[0], one[1]))
        self.top = self.top[:keep]
        return is_best, is_kept


class Recorder:
    """Is told what a run does. This one keeps nothing; with `--prove-every` a `Proof` takes its place."""

    @property
    def head(self) -> str | None:
        """What a checkpoint keeps of the record: the hash of its last line."""
        return None

    def begin(self, source: Mapping[str, Any] | None) -> None:
        """A run begins here. A collective, as are the others below that are not said to be on one rank."""

    def epoch(self) -> None:
        """The first step of an epoch, or of the rest of it, comes next."""

    def take(self, indices: list[int], batch: Any) -> None:
        """This rank uses these samples in the current step."""

    def step(self, number: int) -> None:
        """A step is done."""

    def evaluation(self, score: Mapping[str, Any]) -> None:
        """The test set is scored."""

    def checkpoint(self, state: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a checkpoint's file takes its place. On rank 0 alone."""
        return contextlib.nullcontext()

    def end(self, ended_by: str) -> None:
        """The run ends in good order."""

    def leave(self) -> None:
        """The run has failed; send nothing."""


# ---- the best ----------------------------------------------------------------------------------------


SIGNS = {"max": 1, "min": -1}

# The attribute of a metric that says whether more of it is better, as torchmetrics calls it.
MORE = "higher_is_better"


@dataclass(frozen=True)
class Selection:
    """A number of a score, and whether a larger one is the better."""

    test_set: str
    metric: str
    sign: int

    def merit(self, scores: Scores) -> float:
        """Return a number that is the larger the better; -inf if the loss or the metric is not finite.

        Raises:
            CheckFailed: the metric is not one number.
        """
        score = scores[self.test_set]
        value: Any = score.loss
        if self.metric == "accuracy" and isinstance(score, Certificate):
            value = score.accuracy
        elif self.metric != "loss" and isinstance(score, LossCertificate):
            value = score.metrics[self.metric]
        if not isinstance(value, int | float):
            raise CheckFailed(f"--best {self.metric}: is a {type(value).__name__}, not a number")
        value = float(value)  # a user's may be numpy's, which no checkpoint can hold
        return self.sign * value if math.isfinite(score.loss) and math.isfinite(value) else -math.inf

    def in_words(self, merit: float) -> str:
        """Return a merit as it is shown: `91.73%`, `loss 0.3012`, `ood/mae 0.25`."""
        value, where = self.sign * merit, f"{self.test_set}/" * bool(self.test_set)
        if self.metric == "accuracy":
            return f"{where and f'{where}accuracy '}{value:.2%}"
        return f"{where}{self.metric} {value:{'.4f' if self.metric == 'loss' else '.4g'}}"


def selection(best: str | None, task: Task, test_sets: tuple[str, ...] = ()) -> Selection:
    """Return what `--best` says, as `[TEST SET/]METRIC[:min|:max]`.

    Args:
        test_sets: the names of those besides --data's own.

    Raises:
        UsageFault: there is no such metric or test set, or nothing says whether more of it is better.
    """
    has_classes = isinstance(task, Classification)
    if best is None:
        return Selection(OWN, "accuracy", 1) if has_classes else Selection(OWN, "loss", -1)
    test_set, _, rest = best.rpartition("/")
    metric, _, end = rest.partition(":")
    metrics = {} if has_classes else measures(task.metrics)
    known = ["loss", *(["accuracy"] if has_classes else metrics)]
    if test_set not in (OWN, *test_sets):
        hint = f"--also-test names {', '.join(test_sets) or 'none'}"
        raise UsageFault(f"--best {best}: no test set is named '{test_set}'", hint=hint)
    if metric not in known:
        hint = f"one of {', '.join(known)}"
        raise UsageFault(f"--best {best}: --task {task.name} has no '{metric}'", hint=hint)
    more: Any = metric == "accuracy"
    if metric in metrics:
        more = getattr(metrics[metric].make(), MORE, None)
    if (end and end not in SIGNS) or (more is None and not end):
        hint = f"{metric}:min or {metric}:max"
        raise UsageFault(f"--best {best}: nothing says whether more of it is better", hint=hint)
    return Selection(test_set, metric, SIGNS[end] if end else 1 if more else -1)
