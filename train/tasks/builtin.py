"""Tasks: what outputs are compared with, and how they are scored. Imports torch.

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

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeGuard

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from ckpttool import metrics as exact
from ckpttool.distributed import transport
from ckpttool.distributed.randomness import seeded
from ckpttool.errors import UsageFault
from ckpttool.metrics.base import measures
from ckpttool.models import factory
from train.config.flags import Sections
from train.data.data_set import Data
from train.data.samples import IGNORED, Given, kind_of

# The sum of a batch's losses, a scalar with a gradient, and the number or total weight of what was summed.
Loss = tuple[torch.Tensor, "float | torch.Tensor"]

PAIR = "return (sum, count): the sum of the batch's losses as a tensor, and their number or total weight"

# The names by which a batch that is a mapping may hold its target.
TARGETS = ("labels", "label", "targets", "target", "y")


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
        return next((len(tensor) for tensor in transport.tensors(batch) if tensor.dim()), 0)

    def batch_to(self, batch: Any, device: torch.device) -> Any:
        """Return a batch on a device, in the same structure."""
        return transport.moved(batch, device)

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
        # Each score has these itself: in a tracker, and to --best, a metric of that name would be the same.
        for each in ("loss", "samples", "count"):
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


def logits_of(outputs: Any) -> Any:
    """Return what outputs have as `logits`, of an object or a mapping; else themselves."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def scores_in(outputs: Any) -> torch.Tensor:
    """Return outputs that are a tensor, or have one as `logits`; those of 16 bits as float32."""
    outputs = logits_of(outputs)
    if not isinstance(outputs, torch.Tensor):
        raise TypeError(f"the model returned {kind_of(outputs)}, not a tensor")
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def trimmed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without the axes of length 1 at its end, apart from the first."""
    axes = list(shape)
    while len(axes) > 1 and axes[-1] == 1:
        axes.pop()
    return tuple(axes)


# ---- built in ----------------------------------------------------------------------------------------


class Classification(Task):
    """One class per sample: cross entropy of scores [n, classes]; labels are int [n], or soft [n, classes].

    The loss is a mean over samples, weighted by their classes if `weights` has one for each class.
    """

    name = "classification"

    def __init__(self, data: Data, label_smoothing: float = 0.0, weights: Sequence[float] = ()) -> None:
        self.data, self.label_smoothing = data, label_smoothing
        self.weights = torch.tensor(weights, dtype=torch.float64) if weights else None
        self.counts_samples = not weights

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return logits_of(super().forward(model, batch))

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
            found = f"a batch of {part} samples is {kind_of(batch)}, not (inputs, ..., labels)"
            if labels is not None:
                ends = f"a batch of {len(indices)} {part} samples ends in {kind_of(labels)}"
                found = f"{ends}, not a label for each"
            hint = "collate(samples) makes (inputs, ..., labels)"
            raise UsageFault(f"--task {self.name}: {found}", hint=hint)
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


TASKS: dict[str, Callable[[Data, Mapping[str, Any]], Task]] = {
    "classification": lambda data, given: Classification(data, _smoothing(given), _weights(given, data)),
    "regression": lambda data, _: Regression(_numbers(data)),
    "language-model": lambda data, given: LanguageModel(data, _smoothing(given)),
    "model-loss": lambda *_: ModelLoss(),
}
NAMES = f"{', '.join(TASKS)} or file.py:factory"


def users(name: str) -> Any:
    """Return the object that `--task file.py:factory` makes, an instance; None for a task known by name.

    It comes before the data, as it may say how samples become batches.
    """
    if ":" not in name:
        return None
    with seeded("task"):
        return _instance(factory.build(name), name)


def collate_of(made: Any, name: str) -> Given | None:
    """Return a user's task's own `collate`, with the flag that names the task; None if it has none."""
    given = getattr(made, "collate", None)
    return None if given is None else (given, f"--task {name}")


def build(config: Sections, data: Data, own: Any = None) -> Task:
    """Return the task that `--task` names, of a training run or an evaluation; `own` is what `users` made."""
    settings = config.plain()  # those of an evaluation are fewer
    name: str = settings["task"]
    for setting in ("label_smoothing", "mixup", "cutmix", "class_weights"):
        labelled = ("classification", "language-model")[: 1 + (setting == "label_smoothing")]
        if settings.get(setting) and name not in labelled:
            flag = f"--{setting.replace('_', '-')}"
            raise UsageFault(f"{flag}: --task {name} has no labels to change", hint="leave it out")
    if name in TASKS:
        return TASKS[name](data, settings)
    if ":" not in name:
        raise UsageFault(f"--task {name}: no such task", hint=f"one of {NAMES}")
    return adapt(users(name) if own is None else own, name)


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
    target = target_of((data.train if data.test is None else data.test)[0])
    return target.numel() if isinstance(target, torch.Tensor) else int(numpy.size(target))


def _smoothing(given: Mapping[str, Any]) -> float:
    return float(given.get("label_smoothing", 0.0))


def _weights(given: Mapping[str, Any], data: Data) -> tuple[float, ...]:
    weights: tuple[float, ...] = given.get("class_weights") or ()
    if weights and len(weights) != len(data.classes):
        raise UsageFault(f"--class-weights: {len(weights)} numbers for {len(data.classes)} classes")
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise UsageFault(f"--class-weights: {weight:g} is not a weight", hint="give 0 or more")
    if weights and not any(weights):
        raise UsageFault("--class-weights: all are 0", hint="give some class a weight above 0")
    return weights
