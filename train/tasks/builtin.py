"""The tasks known by name: classification, regression, language-model and model-loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from ckpttool import metrics as exact
from ckpttool.distributed.randomness import seeded
from ckpttool.errors import UsageFault
from ckpttool.models import factory
from train.config.shared import DataConfig
from train.data.collate import Collate
from train.data.samples import IGNORED, kind_of
from train.tasks.task import Loss, Task, UserTask, numbers_of, scores_in, target_of, trimmed

if TYPE_CHECKING:
    from train.data.data_set import Data


class Classification(Task):
    """One class per sample: cross entropy of scores [n, classes]; labels are int [n], or soft [n, classes].

    The loss is a mean over samples, weighted by their classes if `weights` has one for each class.
    """

    name = "classification"

    def __init__(self, data: Data, label_smoothing: float = 0.0, weights: Sequence[float] = ()) -> None:
        self.data, self.label_smoothing = data, label_smoothing
        self.weights = torch.tensor(weights, dtype=torch.float64) if weights else None
        self.counts_samples = not weights

    def loss(self, outputs: Any, batch: Any) -> Loss:
        labels, scores, weights = batch[-1], scores_in(outputs), self.weights
        # A model may have more outputs than there are classes.
        if weights is not None:
            weights = F.pad(weights.to(scores), (0, outputs.shape[1] - len(weights)))
        is_mixed = labels.is_floating_point()
        labels = F.pad(labels, (0, outputs.shape[1] - labels.shape[1])) if is_mixed else labels.long()
        loss = F.cross_entropy(scores, labels, weights, reduction="sum", label_smoothing=self.label_smoothing)
        # As torch has it, a mixture counts 1, whatever the weights of its classes.
        return loss, len(labels) if weights is None or is_mixed else weights[labels].double().sum()

    def check(self, batch: Any, indices: Sequence[int], part: str) -> None:
        labels = batch[-1] if isinstance(batch, tuple | list) and batch else None
        if not isinstance(labels, torch.Tensor) or labels.shape[:1] != (len(indices),):
            found = (
                f"a batch of {len(indices)} {part} samples ends in {kind_of(labels)}, not a label for each"
            )
            if labels is None:
                found = f"a batch of {part} samples is {kind_of(batch)}, not (inputs, ..., labels)"
            raise UsageFault(
                f"--task {self.name}: {found}", hint="collate(samples) makes (inputs, ..., labels)"
            )
        if not labels.is_floating_point():  # a mixture, of labels that were checked before
            self.data.check_labels(labels, indices, part)

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
        values, targets = self.compared(outputs, batch)
        return F.mse_loss(values, targets, reduction="sum"), values.numel()

    def compared(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets in one shape and dtype."""
        values, targets = scores_in(outputs), target_of(batch)
        # torch would broadcast other shapes, and compare each output with each target.
        if not isinstance(targets, torch.Tensor) or trimmed(values.shape) != trimmed(targets.shape):
            shapes = f"outputs of the shape {list(values.shape)}"
            what = f"{shapes} can't be compared with targets of {list(getattr(targets, 'shape', ()))}"
            raise TypeError(what)
        return values, targets.to(values.dtype).reshape(values.shape)

    def outputs(self, data: Data) -> int:
        return self.numbers


class LanguageModel(Task):
    """Sequences of tokens: the cross entropy of each token, as a mean over all tokens that are not ignored.

    Outputs are scores [n, length, tokens], targets int [n, length], with -100 where a token is left out.
    The classes of the data set, if it has some, are its tokens.
    """

    name = "language-model"
    unit = "tokens"

    def __init__(self, data: Data, label_smoothing: float = 0.0) -> None:
        self.data, self.label_smoothing = data, label_smoothing
        self.metrics = {
            "perplexity": (exact.Perplexity, self.token_losses),
            "token_accuracy": (exact.Accuracy, self.token_predictions),
        }

    def loss(self, outputs: Any, batch: Any) -> Loss:
        scores, targets = self.tokens(outputs, batch)
        loss = F.cross_entropy(scores, targets, reduction="sum", label_smoothing=self.label_smoothing)
        return loss, (targets != IGNORED).sum()

    def tokens(self, outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n · length, tokens] and targets int64 [n · length]."""
        scores, targets = scores_in(outputs), target_of(batch)
        if scores.shape[:-1] != targets.shape:
            shapes = f"outputs of the shape {list(scores.shape)}"
            what = f"{shapes} are not scores [..., tokens] for targets of the shape {list(targets.shape)}"
            raise TypeError(what)
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
            what = f"--task {self.name}: the targets of {part} samples are {kind_of(targets)}, not tokens"
            raise UsageFault(what, hint="a sample is (inputs, targets), both int64 [length]")
        self.data.check_tokens(targets, indices, part, ignored=IGNORED)


class ModelLoss(Task):
    """The model's own mean loss: a scalar, or in an attribute, key or element of what it returns.

    A model gets the whole batch, target included: as keyword arguments of a mapping, else one by one. The
    loss is taken to be a mean over the samples of the batch, unless the model returns, with its `loss`,
    a `count` that says of how many tokens or pixels it is the mean.
    """

    name = "model-loss"

    def forward(self, model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple | list) else model(batch)

    def loss(self, outputs: Any, batch: Any) -> Loss:
        mean, count = loss_in(outputs)
        count = self.sample_count(batch) if count is None else count
        mean = mean.reshape(())
        # The mean of nothing is NaN, but adds nothing to the sum; without asking a GPU for the count.
        nothing = torch.as_tensor(count, device=mean.device) == 0
        return torch.where(nothing, torch.nan_to_num(mean) * 0, mean * count), count


def loss_in(outputs: Any) -> tuple[torch.Tensor, Any]:
    """Return the loss in what a model returned, and its count if there is one."""
    loss: Any = None
    count = None
    if isinstance(outputs, Mapping):
        loss, count = outputs.get("loss"), outputs.get("count")
    elif isinstance(outputs, tuple | list):
        scalars = [part for part in outputs if _is_scalar(part) and not part.dim()]
        loss = scalars[0] if len(scalars) == 1 else None
    elif isinstance(outputs, torch.Tensor):
        loss = outputs
    else:
        loss, count = getattr(outputs, "loss", None), getattr(outputs, "count", None)
    if not _is_scalar(loss):
        what = f"the model returned {kind_of(outputs)}, in which there is no loss, a tensor of one number"
        raise TypeError(what)
    return loss, count


def _is_scalar(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


TASKS: dict[str, Callable[[Data, Any], Task]] = {
    "classification": lambda data, config: Classification(data, _smoothing(config), _weights(config, data)),
    "regression": lambda data, config: Regression(_numbers(data)),
    "language-model": lambda data, config: LanguageModel(data, _smoothing(config)),
    "model-loss": lambda data, config: ModelLoss(),
}
NAMES = f"{', '.join(TASKS)} or file.py:factory"


def users(config: DataConfig) -> Any:
    """Return the object that `--task file.py:factory` makes, an instance; None for a task known by name.

    It comes before the data, as it may say how samples become batches.
    """
    if ":" not in config.task:
        return None
    with seeded("task"):
        return _instance(factory.build(config.task), config.task)


def collate_of(made: Any, config: DataConfig) -> tuple[Collate, str] | None:
    """Return a user's task's own `collate`, with the flag that names the task; None if it has none."""
    given = getattr(made, "collate", None)
    return None if given is None else (given, f"--task {config.task}")


def build(config: DataConfig, data: Data, own: Any = None) -> Task:
    """Return the task that `--task` names, of a training run or an evaluation; `own` is what `users` made."""
    for name in ("label_smoothing", "mixup", "cutmix", "class_weights"):
        labelled = ("classification", "language-model")[: 1 + (name == "label_smoothing")]
        if getattr(config, name, 0) and config.task not in labelled:
            flag = f"--{name.replace('_', '-')}"
            raise UsageFault(f"{flag}: --task {config.task} has no labels to change", hint="leave it out")
    if config.task in TASKS:
        return TASKS[config.task](data, config)
    if ":" not in config.task:
        raise UsageFault(f"--task {config.task}: no such task", hint=f"one of {NAMES}")
    return adapt(users(config) if own is None else own, config.task)


def adapt(made: Any, name: str) -> Task:
    """Return a user's object (an instance, a class without arguments, a module, a namespace) as a task."""
    made = _instance(made, name)
    # A subclass of one of these is checked as any other object of a user's.
    is_builtin = type(made) in (Classification, Regression, LanguageModel, ModelLoss)
    return made if is_builtin else UserTask(made, name)


def _instance(made: Any, name: str) -> Any:
    if not isinstance(made, type):
        return made
    try:
        return made()
    except Exception as error:
        hint = "return an instance"
        raise UsageFault(f"--task {name}: {factory.described(error)}", hint=hint) from error


def _numbers(data: Data) -> int:
    """Return how many numbers the target of a sample has."""
    return numbers_of(target_of((data.train if data.test is None else data.test)[0]))


def _smoothing(config: Any) -> float:
    return float(getattr(config, "label_smoothing", 0.0))


def _weights(config: Any, data: Data) -> tuple[float, ...]:
    """Return `--class-weights`, which an evaluation does not have."""
    weights: tuple[float, ...] = getattr(config, "class_weights", None) or ()
    if weights and len(weights) != len(data.classes):
        raise UsageFault(f"--class-weights: {len(weights)} numbers for {len(data.classes)} classes")
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise UsageFault(f"--class-weights: {weight:g} is not a weight", hint="give 0 or more")
    if weights and not any(weights):
        raise UsageFault("--class-weights: all are 0", hint="give some class a weight above 0")
    return weights
