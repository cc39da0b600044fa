"""Tasks: how a model is called on a batch, what it is trained to make small, and how it is scored.

`--task` takes a name of `TASKS`, or `file.py:factory`, whose object needs only

    def loss(self, outputs, batch):      # the sum of the batch's losses, and how many they are
        return F.l1_loss(outputs, batch[1], reduction="sum"), batch[1].numel()

    metrics = {"mae": metrics.MeanAbsoluteError}     # of ckpttool.metrics, updated with (outputs, target)

The ranks' sums and counts are added before they are divided, so the loss is the mean over all samples, tokens
or pixels, whatever each rank has of them. A metric whose `update` needs something else is given as a pair
with a function: `{"top5": (lambda: metrics.TopK(5), lambda outputs, batch: (outputs[0], batch["label"]))}`.
`forward`, `outputs`, `sample_count`, `batch_to` and `check` of `Task` may be given too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from ckpttool import metrics as exact
from ckpttool.distributed import nested
from ckpttool.errors import CheckFailed, UsageFault
from ckpttool.metrics.evaluating import measures
from ckpttool.models import factory
from train.config.shared import DataConfig
from train.tasks.loss_pair import PAIR, wrong_pair
from train.tasks.outputs import kind_of, loss_in, numbers_of, scores_in, target_of, trimmed

if TYPE_CHECKING:
    from train.data.data_set import Data

Loss = tuple[torch.Tensor, "int | torch.Tensor"]
"""The sum of a batch's losses, a scalar with a gradient, and the number of what was summed."""

IGNORED = -100
"""The target of tokens that are no part of the loss: torch's `ignore_index`."""


class Task:
    """A task, with what holds for most. A user's object may be a subclass, or any object with `loss`.

    Attributes:
        name: as on the command line.
        metrics: what an evaluation computes beside the loss, as `metrics.evaluating.measures` takes it.
        counts_samples: whether the count of `loss` is always the number of samples, which all ranks know.
    """

    name = "task"
    metrics: Mapping[str, Any] = {}
    counts_samples = False

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


class Classification(Task):
    """One class per sample: cross entropy of scores [n, classes]; labels are int [n], or soft [n, classes].

    The loss is a mean over samples.
    """

    name = "classification"
    counts_samples = True

    def __init__(self, data: Data, label_smoothing: float = 0.0) -> None:
        self.data, self.label_smoothing = data, label_smoothing

    def loss(self, outputs: Any, batch: Any) -> Loss:
        labels = batch[-1]
        if labels.is_floating_point():  # a model may have more outputs than there are classes
            labels = F.pad(labels, (0, outputs.shape[1] - labels.shape[1]))
        else:
            labels = labels.to(torch.int64)
        smoothing = self.label_smoothing
        loss = F.cross_entropy(scores_in(outputs), labels, reduction="sum", label_smoothing=smoothing)
        return loss, len(labels)

    def check(self, batch: Any, indices: Sequence[int], part: str) -> None:
        if not batch[-1].is_floating_point():  # a mixture, of labels that were checked before
            self.data.check_labels(batch[-1], indices, part)

    def correct(self, outputs: Any, batch: Any) -> torch.Tensor | None:
        labels = batch[-1].argmax(dim=1) if batch[-1].is_floating_point() else batch[-1]
        right: torch.Tensor = outputs.detach().argmax(dim=1) == labels
        return right.sum()


class Regression(Task):
    """Numbers: the squared error, as a mean over all numbers of all samples (as `nn.MSELoss` of them all).

    The target is the last part of a batch, or the batch itself, for a model that reproduces its input. It has
    the shape of the outputs, apart from axes of length 1 at the end.
    """

    name = "regression"

    def __init__(self, outputs: int = 1) -> None:
        self.numbers = outputs
        self.metrics = {
            "mse": (exact.MeanSquaredError, self.compared),
            "mae": (exact.MeanAbsoluteError, self.compared),
            "r2": (lambda: exact.R2(max(outputs, 1)), self.compared),
        }

    def loss(self, outputs: Any, batch: Any) -> Loss:
        found, wanted = self.compared(outputs, batch)
        return F.mse_loss(found, wanted, reduction="sum"), found.numel()

    def compared(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets in one shape and dtype.

        Raises:
            TypeError: their shapes differ; torch would broadcast, and compare each output with each target.
        """
        found, wanted = scores_in(outputs), target_of(batch)
        if not isinstance(wanted, torch.Tensor) or trimmed(found.shape) != trimmed(wanted.shape):
            shapes = f"outputs of the shape {list(found.shape)}"
            raise TypeError(
                f"{shapes} can't be compared with targets of {list(getattr(wanted, 'shape', ()))}"
            )
        return found, wanted.to(found.dtype).reshape(found.shape)

    def outputs(self, data: Data) -> int:
        return self.numbers


class LanguageModel(Task):
    """Sequences of tokens: the cross entropy of each token, as a mean over all tokens that are not ignored.

    Outputs are scores [n, length, tokens], targets int [n, length], with -100 where a token is left out.
    The classes of the data set, if it has some, are its tokens.
    """

    name = "language-model"

    def __init__(self, data: Data, label_smoothing: float = 0.0) -> None:
        self.data, self.label_smoothing = data, label_smoothing
        self.metrics = {
            "perplexity": (exact.Perplexity, self.token_losses),
            "token_accuracy": (exact.Accuracy, self.token_predictions),
        }

    def loss(self, outputs: Any, batch: Any) -> Loss:
        scores, targets = self.tokens(outputs, batch)
        smoothing = self.label_smoothing
        loss = F.cross_entropy(scores, targets, reduction="sum", label_smoothing=smoothing)
        return loss, (targets != IGNORED).sum()

    def tokens(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n · length, tokens] and targets int64 [n · length].

        Raises:
            TypeError: the outputs are not scores for each token of the targets.
        """
        scores, targets = scores_in(outputs), target_of(batch)
        if scores.shape[:-1] != targets.shape:
            shapes = f"outputs of the shape {list(scores.shape)}"
            raise TypeError(
                f"{shapes} are not scores [..., tokens] for targets of the shape {list(targets.shape)}"
            )
        return scores.flatten(0, -2), targets.flatten().to(torch.int64)

    def token_losses(self, outputs: Any, batch: Any) -> tuple[torch.Tensor]:
        """Return the loss of each token that counts, without label smoothing."""
        scores, targets = self.tokens(outputs, batch)
        return (F.cross_entropy(scores, targets, reduction="none")[targets != IGNORED],)

    def token_predictions(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest token and the right one, of each token that counts."""
        scores, targets = self.tokens(outputs, batch)
        return scores.argmax(dim=-1)[targets != IGNORED], targets[targets != IGNORED]

    def check(self, batch: Any, indices: Sequence[int], part: str) -> None:
        targets = target_of(batch)
        if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.dim() < 2:
            raise UsageFault(
                f"--task {self.name}: the targets of {part} samples are {kind_of(targets)}, not tokens",
                hint="a sample is (inputs, targets), both int64 [length]",
            )
        self.data.check_tokens(targets, indices, part, ignored=IGNORED)


class ModelLoss(Task):
    """The model's own mean loss: a scalar, or in an attribute, key or element of what it returns.

    A model gets the whole batch, target included: as keyword arguments of a mapping, else one by one. The
    loss is taken to be a mean over the samples of the batch, unless the model returns a `count` beside its
    `loss` that says of how many tokens or pixels it is the mean.
    """

    name = "model-loss"

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)

    def loss(self, outputs: Any, batch: Any) -> Loss:
        found, count = loss_in(outputs)
        count = self.sample_count(batch) if count is None else count
        if not (isinstance(count, torch.Tensor) and count.device.type != "cpu") and not int(count):
            raise CheckFailed(
                "the model counted nothing in a forward pass, whose mean loss has no value",
                hint="give a larger --batch-size or fewer --accumulate, or a task that returns a sum",
            )
        return found.reshape(()) * count, count

    def outputs(self, data: Data) -> int:
        return len(data.classes)


class UserTask(Task):
    """A user's object: what it returns is checked, and what it lacks is taken from `Task`.

    Raises:
        UsageFault: it has no `loss`, or its metrics are none of `ckpttool.metrics`.
    """

    def __init__(self, made: Any, name: str) -> None:
        self.name, self.made = name, made
        if not callable(getattr(made, "loss", None)):
            raise UsageFault(
                f"--task {name}: {kind_of(made)} has no method loss",
                hint=f"give it loss(self, outputs, batch), and {PAIR}",
            )
        if isinstance(made, nn.Module) and any(one.requires_grad for one in made.parameters()):
            raise UsageFault(
                f"--task {name}: has parameters, which are not trained", hint="make them part of the model"
            )
        for method in ("forward", "outputs", "sample_count", "batch_to", "check"):
            own = getattr(made, method, None)
            # nn.Module has a `forward`, which means something else.
            if callable(own) and not (method == "forward" and isinstance(made, nn.Module)):
                setattr(self, method, own)
        given = getattr(made, "metrics", {})
        if isinstance(given, ModuleType):  # of a task that is a module itself, which has imported ours
            given = {}
        try:
            self.metrics = given() if callable(given) else given
            measures(self.metrics)
        except Exception as error:
            raise UsageFault(
                f"--task {name}: {factory.described(error)}",
                hint="for example metrics = {'mae': MeanAbsoluteError}, of ckpttool.metrics",
            ) from error

    def loss(self, outputs: Any, batch: Any) -> Loss:
        """Return what the user's `loss` returns.

        Raises:
            UsageFault: it is not (sum, count).
        """
        returned = self.made.loss(outputs, batch)
        wrong = wrong_pair(returned)
        if wrong:
            raise UsageFault(f"--task {self.name}: loss returned {wrong}", hint=PAIR)
        total, count = returned
        return total.reshape(()), count if isinstance(count, torch.Tensor) else int(count)


TASKS: dict[str, Callable[[Data, Any], Task]] = {
    "classification": lambda data, config: Classification(data, _smoothing(config)),
    "regression": lambda data, config: Regression(numbers_of(target_of(data.test[0]))),
    "language-model": lambda data, config: LanguageModel(data, _smoothing(config)),
    "model-loss": lambda data, config: ModelLoss(),
}
NAMES = f"{', '.join(TASKS)} or file.py:factory"


def build(config: DataConfig, data: Data) -> Task:
    """Return the task that `--task` names.

    Args:
        config: of a training or an evaluation.
        data: what it is done on.

    Raises:
        UsageFault: there is no such task, a flag has no meaning for it, or the user's factory raised an error
            or returned no object with `loss`.
    """
    for flag, tasks in (
        ("label_smoothing", ("classification", "language-model")),
        ("mixup", ("classification",)),
        ("cutmix", ("classification",)),
    ):
        if getattr(config, flag, 0) and config.task not in tasks:
            shown = f"--{flag.replace('_', '-')}"
            raise UsageFault(f"{shown}: --task {config.task} has no labels to change", hint="leave it out")
    if config.task in TASKS:
        return TASKS[config.task](data, config)
    if ":" not in config.task:
        raise UsageFault(f"--task {config.task}: no such task", hint=f"one of {NAMES}")
    return adapt(factory.build(config.task), config.task)


def adapt(made: Any, name: str) -> Task:
    """Return a user's object as a task. One of the tasks of this module stays as it is.

    Args:
        made: an instance, a class that takes no arguments, a module or a namespace.
        name: of the task, for errors.

    Raises:
        UsageFault: it is no task.
    """
    if isinstance(made, type):
        try:
            made = made()
        except Exception as error:
            raise UsageFault(
                f"--task {name}: {factory.described(error)}", hint="return an instance"
            ) from error
    return made if isinstance(made, Task) and type(made).__module__ == __name__ else UserTask(made, name)


def _smoothing(config: Any) -> float:
    return float(getattr(config, "label_smoothing", 0.0))
