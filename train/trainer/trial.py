"""A dry run of a model and its task on copies of samples, in this process alone. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpttool.errors import CkptToolError, UsageFault
from ckpttool.metrics.base import measures, update
from ckpttool.models import factory
from train.data.batches import trial_batch
from train.data.data_set import Data
from train.data.samples import Samples
from train.tasks.builtin import Classification, Task


@dataclass(frozen=True)
class Trial:
    """A dry run on copies of one sample."""

    model: str  # as on the command line
    data: Data
    task: Task
    part: str  # "training" or "test"

    @property
    def samples(self) -> Samples:
        samples = self.data.train if self.part == "training" else self.data.test
        assert samples is not None
        return samples

    def forward(self, model: nn.Module, size: int, sample: int = 0) -> tuple[Any, Any]:
        """Return the model's outputs for a batch of `size` copies, in its current mode; and the batch."""
        batch = self.batch(size, sample)
        has_classes = isinstance(self.task, Classification)
        if not has_classes or self.data.collation(self.part).is_own:
            self.task.check(batch, [sample] * size, self.part)
        outputs = self.task.forward(model, batch)
        if has_classes:
            self._check_scores(outputs, size)
        return outputs, batch

    def batch(self, size: int, sample: int = 0) -> Any:
        return self.batch_of([sample] * size)

    def batch_of(self, samples: list[int]) -> Any:
        return trial_batch(self.samples, self.data.collation(self.part), samples)

    def _check_scores(self, outputs: Any, size: int) -> None:
        """Refuse outputs that are not one row of scores for each sample, or too few for the classes."""
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != (size,) or outputs.dim() != 2:
            raise TypeError("its output is not one row of class scores per sample")
        if outputs.shape[1] < len(self.data.classes):
            classes = f"{self.data.name} has {len(self.data.classes)} classes"
            raise UsageFault(f"--model {self.model}: has {outputs.shape[1]} outputs, but {classes}")

    def loss(self, outputs: Any, batch: Any, size: int, sample: int = 0) -> tuple[torch.Tensor, float]:
        """Return the loss of a batch of `size` copies, as (sum, count)."""
        self.task.check(batch, [sample] * size, self.part)
        try:
            total, count = self.task.loss(outputs, batch)
        except CkptToolError:
            raise
        except Exception as error:
            which = f"the loss of {self.part} sample {sample} of {self.data.name}"
            what = f"--task {self.task.name}: {which}: {factory.described(error)}"
            raise UsageFault(what) from error
        return total, float(count)

    def measure(self, outputs: Any, batch: Any) -> None:
        """Raise UsageFault if a metric does not take the outputs."""
        try:
            for name, measure in measures(self.task.metrics).items():
                update(name, measure.make(), measure.arguments, outputs, batch)
        except CkptToolError as fault:
            raise UsageFault(f"--task {self.task.name}: {fault.message}", hint=fault.hint) from fault

    def unfit(self, error: Exception) -> CkptToolError:
        """Return the error for a model that failed."""
        if isinstance(error, CkptToolError):
            return error
        samples = " ".join(["×".join(map(str, self.data.shape)), "samples"]).strip()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return UsageFault(f"--model {self.model}: does not take the {samples} of {self.data.name}: {reason}")
