"""Samples of a data set: what they may be, how a set is divided, and how images become numbers."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from ckpttool.errors import CheckFailed, UsageFault, install
from train.config.shared import DataConfig

# Map-style. A sample is (tensor, label) for classification, else what default_collate takes.
Samples = Dataset[Any]

NEEDED = "for classification a sample is (tensor, integer); --task names other tasks"
PARTS = "a sample is made of tensors, numbers, texts, and tuples, lists and dicts of these"
IGNORED = -100  # the target of tokens that are no part of the loss: torch's `ignore_index`
LABELS = (int, torch.Tensor, numpy.integer, numpy.ndarray)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

HELD_OUT = 5  # without a test set, every fifth sample of a class becomes a test sample


class Parts(NamedTuple):
    """A data set as loaded: its parts, the names of the classes if the task has some, and its source."""

    train: Samples
    test: Samples | None
    classes: tuple[str, ...]
    source: str


def by_name(train: Samples, test: Samples | None) -> dict[str, Samples]:
    """Return the parts that a data set has, by name."""
    return {"training": train} if test is None else {"training": train, "test": test}


@dataclass(frozen=True)
class Scale:
    """Normalisation of images in [0, 1]: one number for all channels, or one per channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def apply(self, pictures: torch.Tensor) -> torch.Tensor:
        """Normalise (..., channels, height, width) in float32, as torchvision's Normalize does."""
        mean, std = self._tensors()
        return (pictures - mean) / std

    def undo(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return normalised images to [0, 1], up to rounding."""
        mean, std = self._tensors()
        return pictures * std + mean

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = (torch.tensor(values, dtype=torch.float32) for values in (self.mean, self.std))
        return mean.view(-1, 1, 1), std.view(-1, 1, 1)


COLOUR = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's mean and standard deviation


def optional(module: str, needs: str, hint: str = "") -> Any:
    """Return a module of an optional package; UsageFault says who `needs` it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageFault(needs, hint=f"{install('train')}{hint}") from None


def count(samples: Samples) -> int:
    """Return the number of samples; refuse an IterableDataset, and a length that is missing or negative."""
    if isinstance(samples, IterableDataset) or not isinstance(samples, Sized):
        what = f"--data: {type(samples).__name__} has no samples by index, by which ranks share them out"
        raise UsageFault(what, hint="give it __len__ and __getitem__")
    try:
        return len(samples)
    except ValueError as error:
        raise UsageFault(f"--data: {type(samples).__name__}: {error}") from error


def checked(sample: object, where: str) -> tuple[torch.Tensor, int]:
    """Return a sample as (tensor, class number); `where` names it in the error if it is something else."""
    if not isinstance(sample, tuple | list) or len(sample) != 2 or not isinstance(sample[0], torch.Tensor):
        raise UsageFault(f"{where} is {kind_of(sample)}, not (tensor, label)", hint=NEEDED)
    label = torch.as_tensor(sample[1]) if isinstance(sample[1], LABELS) else None
    if label is None or label.dim() or label.dtype not in INTEGERS:
        raise UsageFault(f"{where} has {kind_of(sample[1])} as its label, not a class number", hint=NEEDED)
    return sample[0], int(label)


def no_class(part: str, sample: int, label: int, classes: int, data: str) -> CheckFailed:
    """Return the error for a label that is not one of the classes."""
    which = f"which is not one of the {classes} classes (0 to {classes - 1})"
    hint = f"check the labels of --data {data}"
    return CheckFailed(f"{part} sample {sample} has the label {label}, {which}", hint=hint)


def leaves(sample: object, where: str) -> dict[str, torch.Tensor | str]:
    """Return the parts of a nested sample, by their place in it: `[0]['mask']`.

    Raises UsageFault, with `where` the sample is, for a part that `default_collate` can't put into a batch.
    """
    if isinstance(sample, Mapping):
        inner: Iterable[tuple[object, object]] = sample.items()
    elif isinstance(sample, tuple | list):
        inner = enumerate(sample)
    elif isinstance(sample, str | bytes):
        return {"": repr(sample)}
    else:
        try:
            return {"": default_collate([sample])[0]}
        except (TypeError, RuntimeError, ValueError) as error:
            what = f"{where} holds {kind_of(sample)}, which can't be put into a batch"
            raise UsageFault(what, hint=PARTS) from error
    return {f"[{key!r}]{rest}": leaf for key, part in inner for rest, leaf in leaves(part, where).items()}


def kind_of(value: Any) -> str:
    """Return what a value is, for an error."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} with the shape {list(value.shape)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def split(samples: Samples, labels: Sequence[int]) -> tuple[Samples, Samples]:
    """Divide samples into training and test samples, class by class."""
    seen: defaultdict[int, int] = defaultdict(int)
    train: list[int] = []
    test: list[int] = []
    for index, label in enumerate(labels):
        seen[label] += 1
        (train if seen[label] % HELD_OUT else test).append(index)
    return Subset(samples, train), Subset(samples, test)


def scale_of(config: DataConfig, channels: int, usual: Scale | None = None) -> Scale:
    """Return the normalisation that the flags give, or else `usual`: ImageNet's for three channels."""
    if usual is None:
        usual = COLOUR if channels == 3 else Scale()
    for flag, values in (("--mean", config.mean), ("--std", config.std)):
        if values is not None and len(values) not in (1, channels):
            raise UsageFault(f"{flag}: {len(values)} numbers for images of {channels} channels")
    return Scale(config.mean or usual.mean, config.std or usual.std)
