"""A task: how a model is called on a batch, what it is trained to make small, and how it is scored.

`--task` takes a name of train/tasks/builtin.py, or `file.py:factory`, whose object needs only

    def loss(self, outputs, batch):      # the sum of the batch's losses, and how many they are
        return F.l1_loss(outputs, batch[1], reduction="sum"), batch[1].numel()

    metrics = {"mae": metrics.MeanAbsoluteError}     # of ckpttool.metrics, updated with (outputs, target)

The ranks' sums and counts are added before they are divided, so the loss is the mean over all samples, tokens
or pixels, whatever each rank has of them. A metric whose `update` needs something else is given as a pair
with a function: `{"top5": (lambda: metrics.TopK(5), lambda outputs, batch: (outputs[0], batch["label"]))}`.
`forward`, `outputs`, `sample_count`, `batch_to` and `check` of `Task` may be given too;
and `collate(samples)`, which makes batches of samples of any shapes, if the data set has none of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from ckpttool.distributed import nested
from ckpttool.errors import UsageFault
from ckpttool.metrics.base import measures
from ckpttool.models import factory
from train.data.samples import kind_of

if TYPE_CHECKING:
    from train.data.data_set import Data

# The sum of a batch's losses, a scalar with a gradient, and the number or total weight of what was summed.
Loss = tuple[torch.Tensor, "float | torch.Tensor"]

PAIR = "return (sum, count): the sum of the batch's losses as a tensor, and their number or total weight"

# The names by which a batch that is a mapping may hold its target.
TARGETS = ("labels", "label", "targets", "target", "y")


# What each score has itself: in a tracker, and to --best, a metric of that name would be the same.
TAKEN = ("loss", "samples", "count")


class Task:
    """A task, with what holds for most. A user's object may be a subclass, or any object with `loss`.

    Attributes:
        name: as on the command line.
        metrics: what an evaluation computes besides the loss, as `metrics.base.measures` takes it.
        counts_samples: whether the count of `loss` is always the number of samples, which all ranks know.
        unit: what the count is of, in the plural, where the log should say how many there are in a second.
    """

    name = "task"
    metrics: Mapping[str, Any] = {}
    counts_samples = False
    unit = ""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for a batch on its device.

        Args:
            model: possibly wrapped in DDP.
            batch: (inputs, target), of which the model gets the inputs; (input, input, ..., target) likewise;
                a mapping, as keyword arguments; or anything else, as it is.
        """
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch[:-1]) if isinstance(batch, tuple | list) else model(batch)

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """Return the sum of the losses, a scalar tensor, and how many samples, tokens or pixels it is of."""
        raise NotImplementedError

    def sample_count(self, batch: Any) -> int:
        """Return the number of samples in a batch: the length of its first tensor."""
        return next((len(tensor) for tensor in nested.tensors(batch) if tensor.dim()), 0)

    def batch_to(self, batch: Any, device: torch.device) -> Any:
        """Return a batch on a device, in the same structure."""
        return nested.moved(batch, device)

    def check(self, batch: Any, indices: Sequence[int], part: str) -> None:
        """Raise CheckFailed, naming the sample, if a batch can't be trained on.

        Args:
            batch: before it is moved.
            indices: of its samples.
            part: "training" or "test".
        """

    def correct(self, outputs: Any, batch: Any) -> torch.Tensor | None:
        """Return the number of samples predicted correctly, an integer scalar; None if it means nothing."""
        return None

    def outputs(self, data: Data) -> int:
        """Return how many outputs the model needs, which a factory gets as `num_classes`; 0 if unknown."""
        return len(data.classes)


class UserTask(Task):
    """A user's object: what it returns is checked, and what it lacks is taken from `Task`."""

    def __init__(self, made: Any, name: str) -> None:
        self.name, self.made = name, made
        if not callable(getattr(made, "loss", None)):
            hint = f"give it loss(self, outputs, batch), and {PAIR}"
            raise UsageFault(f"--task {name}: {kind_of(made)} has no method loss", hint=hint)
        if isinstance(made, nn.Module) and any(parameter.requires_grad for parameter in made.parameters()):
            hint = "make them part of the model"
            raise UsageFault(f"--task {name}: has parameters, which are not trained", hint=hint)
        for method in ("forward", "outputs", "sample_count", "batch_to", "check"):
            given = getattr(made, method, None)
            # nn.Module has a `forward`, which means something else.
            if callable(given) and not (method == "forward" and isinstance(made, nn.Module)):
                setattr(self, method, given)
        self.unit = str(getattr(made, "unit", ""))
        measured = getattr(made, "metrics", {})
        if isinstance(measured, ModuleType):  # of a task that is a module itself, which has imported ours
            measured = {}
        try:
            self.metrics = measured() if callable(measured) else measured
            names = measures(self.metrics)
        except Exception as error:
            hint = "for example metrics = {'mae': MeanAbsoluteError}, of ckpttool.metrics"
            raise UsageFault(f"--task {name}: {factory.described(error)}", hint=hint) from error
        for each in TAKEN:
            if each in names:
                what = f"--task {name}: a metric is named '{each}', as a part of each score is"
                raise UsageFault(what, hint="name it otherwise")

    def loss(self, outputs: Any, batch: Any) -> Loss:
        returned = self.made.loss(outputs, batch)
        wrong = wrong_pair(returned)
        if wrong:
            raise UsageFault(f"--task {self.name}: loss returned {wrong}", hint=PAIR)
        total, count = returned
        if isinstance(count, torch.Tensor):  # the ranks' weights are added in float64
            return total.reshape(()), count.detach().double() if count.is_floating_point() else count
        return total.reshape(()), float(count) if isinstance(count, float | numpy.floating) else int(count)


def wrong_pair(returned: Any) -> str | None:
    """Return what is wrong with a loss that should be (sum, count); None if it is one."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        return f"{kind_of(returned)}, not (sum, count)"
    total, count = returned
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        return f"{kind_of(total)} as its sum, not a tensor of one number"
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_complex() or count.dtype == torch.bool:
            return f"{kind_of(count)} as its count, not a number"
        if count.device.type != "cpu":  # looking at it would wait for the device
            return None
    elif isinstance(count, bool) or not isinstance(count, int | float | numpy.integer | numpy.floating):
        return f"{kind_of(count)} as its count, not a number"
    number = count.item() if isinstance(count, torch.Tensor) else count
    if not 0 <= number < 2**63:  # NaN neither
        return f"a count of {number}"
    if number == 0 and total.device.type == "cpu" and float(total.detach()) != 0:
        return f"a count of 0 for a sum of {float(total.detach()):g}"
    return None


# ---- what is in a batch, and in what a model returned --------------------------------------------------


def target_of(batch: Any) -> Any:
    """Return the target of a batch or a sample: the last of a tuple, or a mapping's labels; else itself."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in TARGETS if name in batch), None)
    return batch[-1] if isinstance(batch, tuple | list) else batch


def numbers_of(target: Any) -> int:
    return target.numel() if isinstance(target, torch.Tensor) else int(numpy.size(target))


def scores_in(outputs: Any) -> torch.Tensor:
    """Return outputs that are a tensor, or have one as `logits`; those of 16 bits as float32."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(f"the model returned {kind_of(outputs)}, not a tensor")
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without the axes of length 1 at its end, apart from the first."""
    axes = list(shape)
    while len(axes) > 1 and axes[-1] == 1:
        axes.pop()
    return tuple(axes)
