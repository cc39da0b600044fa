"""Data sets by name, each as (training samples, test samples).

A sample is (image, label): a float32 tensor of channels × height × width, and an int. Nothing here is
random, except in a user's own data set; that is keyed by (seed, epoch, sample).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ckpttool.distributed import collectives
from ckpttool.errors import CheckFailed, CkptToolError, UsageFault
from ckpttool.models import factory
from train.config import DataConfig
from train.pictures import Folder, Scale, find_pictures
from train.random_state import Keyed

COLOUR = Scale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""How colour images are normalised: the usual mean and standard deviation of ImageNet."""

NAMES = "digits, cifar10, mnist, folder:PATH, fake:N or file.py:factory"
FAKE_SHAPE = (3, 32, 32)
HELD_OUT = 5
"""If a data set has no test set, every fifth sample of a class becomes a test sample."""

Samples = Dataset[tuple[torch.Tensor, int]]


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        name: as on the command line.
        train, test: map-style data sets.
        classes: their names, by label.
        shape: channels, height and width of the first image.
        fingerprint: differs between data sets with different samples, as far as known without reading them.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    fingerprint: str

    def check_labels(self, labels: torch.Tensor, samples: Sequence[int], part: str) -> None:
        """Checks labels; the loss would end in a traceback, or skip a label equal to its `ignore_index`.

        Args:
            labels: int64 [n], of the samples with the indices `samples` in `part`, "training" or "test".

        Raises:
            CheckFailed: a label is not one of the classes.
        """
        classes = len(self.classes)
        for sample, label in zip(samples, labels.tolist(), strict=True):
            if not 0 <= label < classes:
                raise CheckFailed(
                    f"{part} sample {sample} has the label {label}, which is not one of the {classes} "
                    f"classes (0 to {classes - 1})",
                    hint=f"check the labels of --data {self.name}",
                )


def load(config: DataConfig, *, seed: int = 0) -> Data:
    """The data set that `--data` names.

    Raises:
        UsageFault: there is no such data set, its files are missing, or a flag does not fit it; names the
            path that was searched and the flag to give.
    """
    name, _, argument = config.data.partition(":")
    if config.data == "digits":
        made = _digits(config)
    elif config.data in ("cifar10", "mnist"):
        made = _torchvision(config)
    elif name == "folder" and argument:
        made = _folder(config, argument)
    elif name == "fake":
        made = _fake(config, argument)
    elif argument:
        made = _factory(config, seed)
    else:
        raise UsageFault(f"--data {config.data}: no such data set", hint=f"one of {NAMES}")
    train, test, classes, fingerprint = made
    for part, samples in (("training", train), ("test", test)):
        if not count(samples):
            raise UsageFault(f"--data {config.data}: there are no {part} samples")
    shape = tuple(first_sample(test, config.data)[0].shape)
    # The shuffle depends on the number of samples, so other sizes are other data.
    sizes = f"{count(train)}/{count(test)}"
    return Data(config.data, train, test, classes, shape, f"{fingerprint} {sizes}{_preparation(config)}")


def compare(data: Data, when: str) -> None:
    """Checks that all ranks have loaded the same data. A collective. Raises RanksDiffer."""
    hint = "make sure that the files of --data are the same on every machine"
    collectives.compare({"--data": (data.fingerprint, data.classes)}, when, hint=hint)


def count(samples: Samples) -> int:
    return len(cast(Sized, samples))


def first_sample(samples: Samples, name: str) -> tuple[torch.Tensor, int]:
    """The first sample, checked to be an image and its label."""
    sample = samples[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2 or not isinstance(sample[0], torch.Tensor):
        raise UsageFault(f"--data {name}: a sample is {type(sample).__name__}, not (tensor, label)")
    return sample[0], int(sample[1])


def _digits(config: DataConfig) -> tuple[Samples, Samples, tuple[str, ...], str]:
    """scikit-learn's handwritten digits, 1,797 of 1×8×8, included in the package: no download."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageFault("--data digits: needs scikit-learn", hint="pip install 'ckpttool[train]'") from None
    loaded = load_digits()
    pictures = torch.tensor(loaded.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(loaded.target, dtype=torch.int64)
    all_of_them = TensorDataset(_scale(config, channels=1).apply(pictures), labels)
    train, test = _split(all_of_them, labels.tolist())
    return train, test, tuple("0123456789"), "digits"


def _torchvision(config: DataConfig) -> tuple[Samples, Samples, tuple[str, ...], str]:
    """CIFAR-10 and MNIST, downloaded and read by torchvision."""
    try:
        from torchvision import datasets
    except ImportError:
        raise UsageFault(
            f"--data {config.data}: needs torchvision", hint="pip install 'ckpttool[train]'"
        ) from None
    kind = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}[config.data]
    folder = {"cifar10": "cifar-10-batches-py", "mnist": os.path.join("MNIST", "raw")}[config.data]
    if config.download:
        _download(kind, config)
    parts = []
    for train in (True, False):
        try:
            found = kind(config.data_root, train=train)
        except RuntimeError:
            raise UsageFault(
                f"--data {config.data}: not found in {os.path.join(config.data_root, folder)}",
                hint="--download downloads it, --data-root names another folder",
            ) from None
        pictures = torch.as_tensor(found.data)
        pictures = pictures.unsqueeze(1) if pictures.dim() == 3 else pictures.permute(0, 3, 1, 2)
        labels = torch.as_tensor(found.targets, dtype=torch.int64)
        parts.append(_Bytes(pictures, labels, _scale(config, pictures.shape[1])))
    return parts[0], parts[1], tuple(found.classes), config.data


def _download(kind: Any, config: DataConfig) -> None:
    """Called by every rank; one per machine downloads, the others wait and find the files."""
    os.makedirs(config.data_root, exist_ok=True)
    with _lock(os.path.join(config.data_root, f".{config.data}.lock")):
        try:
            kind(config.data_root, download=True)
        except (OSError, RuntimeError) as error:
            raise CkptToolError(
                f"--download: {config.data} could not be downloaded: {error}",
                hint=f"put its files into {config.data_root}, or give --data-root",
            ) from error


@contextmanager
def _lock(path: str) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Bytes(Dataset[tuple[torch.Tensor, int]]):
    """Images held as bytes, scaled on access."""

    def __init__(self, pictures: torch.Tensor, labels: torch.Tensor, scale: Scale) -> None:
        self.pictures, self.labels, self.scale = pictures, labels.tolist(), scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.scale.apply(self.pictures[index].float().div(255)), self.labels[index]


def _folder(config: DataConfig, path: str) -> tuple[Samples, Samples, tuple[str, ...], str]:
    """PATH/train/<class>/* and PATH/test/<class>/*; or PATH/<class>/*, without a test set."""
    if not os.path.isdir(path):
        raise UsageFault(f"--data folder:{path}: no such folder", hint="give folder:PATH")
    scale = _scale(config, channels=3)
    divided = all(os.path.isdir(os.path.join(path, part)) for part in ("train", "test"))
    if not divided:
        files, labels, classes = find_pictures(path)
        everything = Folder(files, labels, scale, config.resize)
        train, test = _split(everything, labels)
        return train, test, classes, _fingerprint(path, files)
    files, labels, classes = find_pictures(os.path.join(path, "train"))
    test_files, test_labels, _ = find_pictures(os.path.join(path, "test"), classes)
    train = Folder(files, labels, scale, config.resize)
    test = Folder(test_files, test_labels, scale, config.resize)
    return train, test, classes, _fingerprint(path, files + test_files)


def load_test(config: DataConfig) -> Data:
    """For evaluation: like `load`, but a folder with one level of classes is the test set itself."""
    path = config.data.removeprefix("folder:")
    inner = [os.path.isdir(os.path.join(path, part)) for part in ("train", "test")]
    if path == config.data or all(inner) or not os.path.isdir(path):
        return load(config)
    if inner[1]:
        path = os.path.join(path, "test")
    files, labels, classes = find_pictures(path)
    samples = Folder(files, labels, _scale(config, channels=3), config.resize)
    fingerprint = _fingerprint(path, files) + _preparation(config)
    return Data(config.data, samples, samples, classes, tuple(samples[0][0].shape), fingerprint)


def _preparation(config: DataConfig) -> str:
    """The flags for turning images into numbers: other numbers are another data set."""
    given = {"mean": config.mean, "std": config.std, "resize": config.resize}
    return "".join(f", {name} {value}" for name, value in given.items() if value is not None)


def _fingerprint(root: str, files: Sequence[str]) -> str:
    names = "\n".join(os.path.relpath(file, root) for file in files)
    return f"folder {hashlib.sha256(names.encode(errors='surrogateescape')).hexdigest()[:16]}"


def _fake(config: DataConfig, argument: str) -> tuple[Samples, Samples, tuple[str, ...], str]:
    """Noise of CIFAR's shape, for trying things out: N training samples, and a fifth as many test samples."""
    if not argument.isdecimal() or not int(argument):
        raise UsageFault(f"--data {config.data}: needs a number of samples", hint="for example fake:64")
    number, scale = int(argument), _scale(config, FAKE_SHAPE[0], usual=Scale())
    train = _Noise(0, number, scale)
    test = _Noise(number, max(1, number // HELD_OUT), scale)
    return train, test, tuple("0123456789"), "fake"


class _Noise(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, first: int, size: int, scale: Scale) -> None:
        self.first, self.size, self.scale = first, size, scale

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        number = self.first + index
        noise = torch.rand(FAKE_SHAPE, generator=torch.Generator().manual_seed(number))
        return self.scale.apply(noise), number % 10


def _factory(config: DataConfig, seed: int) -> tuple[Samples, Samples, tuple[str, ...], str]:
    """What a user's function returns: two data sets, of which the first knows its classes."""
    if config.mean or config.std:
        raise UsageFault(f"--mean, --std: {config.data} makes its own images", hint="leave them out")
    made = factory.build(config.data)
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageFault(f"--data {config.data}: must return (train, test), two data sets")
    train, test = made
    return Keyed(train, seed), Keyed(test, seed), _classes(train, config.data), config.data


def _classes(samples: Any, name: str) -> tuple[str, ...]:
    known = getattr(samples, "classes", None)
    if known is not None:
        return tuple(str(one) for one in known)
    labels = getattr(samples, "targets", None)
    if labels is None and isinstance(samples, TensorDataset):
        labels = samples.tensors[-1]
    if labels is None:
        raise UsageFault(
            f"--data {name}: the training data set does not say its classes",
            hint="give it an attribute: classes = ['cat', 'dog']",
        )
    return tuple(str(label) for label in range(int(max(labels)) + 1))


def _split(samples: Samples, labels: Sequence[int]) -> tuple[Samples, Samples]:
    """The same split every time, with the same fraction of each class in both parts."""
    seen: defaultdict[int, int] = defaultdict(int)
    train: list[int] = []
    test: list[int] = []
    for index, label in enumerate(labels):
        seen[label] += 1
        (train if seen[label] % HELD_OUT else test).append(index)
    return Subset(samples, train), Subset(samples, test)


def _scale(config: DataConfig, channels: int, usual: Scale | None = None) -> Scale:
    """The normalisation from the flags, or the default for this number of channels."""
    if usual is None:
        usual = COLOUR if channels == 3 else Scale()
    for flag, values in (("--mean", config.mean), ("--std", config.std)):
        if values is not None and len(values) not in (1, channels):
            raise UsageFault(f"{flag}: {len(values)} numbers for images of {channels} channels")
    return Scale(config.mean or usual.mean, config.std or usual.std)
