"""How far a training run has come, and whom the trainer tells of its steps. Imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpttool.distributed import collectives
from train.trainer.scoring import Score, selection_score


class Sums:
    """This rank's sums over some forward passes: of losses, and of what was counted, predicted and used."""

    NAMES = ("loss", "correct", "samples", "count")

    def __init__(self) -> None:
        # What lies on the device stays there: reading it would wait.
        self.loss: torch.Tensor | float = 0.0
        self.correct: torch.Tensor | float = 0
        self.samples: int | float = 0
        self.count: torch.Tensor | float = 0

    def add(
        self, loss: torch.Tensor, count: float | torch.Tensor, correct: torch.Tensor | None, *, samples: int
    ) -> None:
        """Add what one forward pass gave."""
        self.loss = self.loss + loss.detach().double()
        self.correct = self.correct + (0 if correct is None else correct.detach())
        self.samples += samples
        self.count = self.count + count

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
    best: float = -math.inf  # the `selection_score` of the best score on the test set
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

    def end_epoch(self, *, counts_correct: bool) -> TrainScore:
        """Begin the next epoch; return the score on this one's samples, as they were used. A collective."""
        own = torch.tensor(self.sums.values(), dtype=torch.float64)
        loss, correct, samples, counted = collectives.total(own).tolist()
        self.sums = Sums()
        self.epoch += 1
        self.step = 0
        return TrainScore(
            loss / counted if counted else math.nan, int(correct) if counts_correct else None, int(samples)
        )

    def note_best(self, score: Score) -> bool:
        """Return whether this is the best score so far, and if so remember it. One of NaN never is."""
        is_best = selection_score(score) > self.best
        if is_best:
            self.best = selection_score(score)
        return is_best


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
