"""Samples, and how several become a batch. Imports torch."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, timedelta
from numbers import Number
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CheckFailed, CkptToolError, UsageFault, install
from ckpttool.models import factory
from train.config.sections import DataConfig

# Map-style. A sample is (tensor, label) for classification, else what default_collate takes.
Samples = Dataset[Any]

CLASSIFICATION = "classification"  # the task whose samples are pairs of a tensor and a label
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
    if value is None:
        return "None"
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


def scale_of(settings: DataConfig, channels: int, usual: Scale | None = None) -> Scale:
    """Return the normalisation that the flags give, or else `usual`: ImageNet's for three channels."""
    if usual is None:
        usual = COLOUR if channels == 3 else Scale()
    for flag, values in (("--mean", settings.mean), ("--std", settings.std)):
        if values is not None and len(values) not in (1, channels):
            raise UsageFault(f"{flag}: {len(values)} numbers for images of {channels} channels")
    return Scale(settings.mean or usual.mean, settings.std or usual.std)


# ---- batches -----------------------------------------------------------------------------------------

# A data set's own comes first, then its task's. It may return any nesting of tensors, of any shapes: padded
# texts, lists of boxes. A sample is then whatever it takes. What it draws at random is keyed by (seed, epoch,
# samples of the batch), so it is the same after a resume and in any loading process. Another number of ranks
# has other batches, and other draws.


Collate = Callable[[list[Any]], Any]
Given = tuple[Collate, str]  # a function, and the flag that names who has given it

# What is compared as it is: its `repr` says all of it.
PLAIN = (torch.Tensor, str, bytes, Number, date, timedelta, PurePath)

CONTAINERS = (tuple, list, Mapping, set, frozenset)

NAMED = 6  # samples of a batch that an error names


@dataclass(frozen=True)
class Collation:
    """Makes batches of the samples of one part of a data set.

    Attributes:
        function: samples -> batch.
        whose: the flag that names who has given the function, `--data own.py:data`; empty for torch's own.
        part: "training" or "test".
    """

    function: Collate = default_collate
    whose: str = ""
    part: str = "training"
    seed: int = 0

    @property
    def is_own(self) -> bool:
        return bool(self.whose)

    def batch(self, samples: list[Any], indices: Sequence[int] = (), epoch: int = 0) -> Any:
        """Return samples as one batch; CheckFailed names those on which it fails."""
        try:
            if not self.is_own:
                return self.function(samples)
            with seeded(self.seed, "collate", epoch, *indices):
                return self.function(samples)
        except CkptToolError:
            raise
        except Exception as error:  # torch's own does not say of which sample it speaks
            raise self._failure(samples, indices, error) from error

    def _failure(self, samples: Sequence[Any], indices: Sequence[int], error: Exception) -> CheckFailed:
        kinds = [] if self.is_own else [_kinds(sample) for sample in samples]
        if len({*kinds}) > 1 and len(kinds) == len(indices):
            (usual, _), *_ = Counter(kinds).most_common(1)
            odd = next(at for at, kind in enumerate(kinds) if kind != usual)
            own, others = dict(kinds[odd]), dict(usual)
            place = next(place for place in own | others if own.get(place) != others.get(place))
            alike = kinds.index(usual)
            said = [
                f"{indices[at]}{place} is {leaves.get(place, 'missing' if place else kind_of(samples[at]))}"
                for at, leaves in ((odd, own), (alike, others))
            ]
            what = f"{self.part} sample {', and '.join(said)}"
            hint = "make them alike in the data set, or give it collate(samples); to leave some out with "
            return CheckFailed(what, hint=f"{hint}--skip-damaged, let it raise an exception for them")
        more = f" and {len(indices) - NAMED} more" * (len(indices) > NAMED)
        which = f"{self.part} samples {', '.join(map(str, indices[:NAMED]))}{more}"
        what, hint = f"{which} can't be put into a batch: {factory.described(error)}", PARTS
        if self.is_own:
            what = f"{self.whose}: collate fails on {which}: {factory.described(error)}"
            hint = "collate(samples) gets a list, and returns a batch"
        return CheckFailed(what, hint=hint)


def _kinds(sample: Any) -> tuple[tuple[str, str], ...]:
    """Return what the parts of a sample are, each with its place."""
    return tuple((place, kind_of(leaf)) for place, leaf in leaves_of(sample))


def collation_of(samples: Any, data: str, of_task: Given | None, part: str, seed: int) -> Collation:
    """Return how a part of `--data` becomes batches; `of_task` is a task's own function, and its flag."""
    given = getattr(samples, "collate", None)
    function, whose = (given, f"--data {data}") if given is not None else of_task or (default_collate, "")
    if not callable(function):
        what = f"{whose}: collate is a {type(function).__name__}, not a function"
        raise UsageFault(what, hint="give it collate(samples), which returns a batch")
    return Collation(function, whose, part, seed)


def digest_of(value: Any) -> str:
    """Return a digest of a sample, or of another value: of its `leaves`, and of where they are in it."""
    parts = (f"{place} ".encode() + collectives.digest(leaf) for place, leaf in leaves_of(value))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def leaves_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a sample or a batch is made of, each with its place: `[1][0]['boxes']`.

    These are tensors, arrays and plain values. What gives itself as an array, as pictures of Pillow do, is
    one; of any other object that is no container, the parts are what pickle would keep of it.
    """
    return _leaves(value, "", {})


def _leaves(value: Any, place: str, known: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    inner = _parts(value)
    if inner is None:
        yield place, _leaf(value)
    elif id(value) in known:  # it holds itself, or others do: a data set that each sample refers to
        yield place, f"as {known[id(value)][0]}"
    else:
        known[id(value)] = place, value  # which keeps it, so no other gets its id
        parts = [leaf for where, part in inner for leaf in _leaves(part, f"{place}{where}", known)]
        yield from parts or [(place, type(value).__qualname__)]
        if isinstance(value, CONTAINERS):  # the same one twice, and two that are equal, are told alike
            del known[id(value)]


def _parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the parts of a value, each with its place in it; None if it is a leaf."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return _numbered(value.unbind())
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        whole = value.to_sparse_coo().coalesce()
        return ((".indices", whole.indices()), (".values", whole.values()))
    if isinstance(value, numpy.ma.MaskedArray):
        return ((".data", value.data), (".mask", value.mask))
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, tuple | list):
        return _numbered(value)
    if isinstance(value, set | frozenset):
        return _numbered(sorted(value, key=repr))
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    if value is None or isinstance(value, PLAIN) or callable(value):
        return None
    if hasattr(value, "__array_interface__"):
        return _of_picture(value) if callable(getattr(value, "getpalette", None)) else None
    if attributes := getattr(value, "__dict__", None):
        return ((f".{name}", part) for name, part in attributes.items())
    return _pickled(value)


def _numbered(parts: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"[{number}]", part) for number, part in enumerate(parts))


def _of_picture(picture: Any) -> Iterable[tuple[str, Any]]:
    """Return the parts of a picture of Pillow: with a palette, its numbers alone are no colours."""
    colours = picture.mode, picture.getpalette(None), picture.info.get("transparency")
    return ((".pixels", numpy.asarray(picture)), (".colours", colours))


def _pickled(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return what pickle would keep of an object without a dict, such as a deque; None if it refuses."""
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # each class refuses in its own way
        return None
    if isinstance(made, str):  # it is known by its name
        return None
    # Its class comes first if it is made by that.
    arguments = tuple(part for part in made[1] if part is not type(value))
    parts = [arguments or None, *made[2:3], *(each and [*each] for each in made[3:5])]
    return None if all(part is None for part in parts) else _numbered(parts)


def _leaf(value: Any) -> Any:
    if value is None or isinstance(value, PLAIN):
        return value
    if hasattr(value, "__array_interface__"):
        return numpy.asarray(value)
    return type(value).__qualname__  # its `repr` may hold its address, which is another on each rank
