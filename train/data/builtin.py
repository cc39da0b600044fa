"""The data sets known by name: digits, cifar10, mnist and fake:N."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from ckpttool.errors import CkptToolError, UsageFault
from train.config.shared import DataConfig
from train.data.samples import HELD_OUT, Parts, Scale, scale_of, split

CLASSES = tuple("0123456789")
FAKE_SHAPE = (3, 32, 32)
UNIFORM = Scale((0.5,), (12**-0.5,))
"""The mean and standard deviation of numbers drawn evenly from [0, 1)."""


def digits(config: DataConfig) -> Parts:
    """Return scikit-learn's handwritten digits: 1,797 images of 1×8×8, included in its package.

    Raises:
        UsageFault: scikit-learn is not installed, or a flag does not fit.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageFault("--data digits: needs scikit-learn", hint="pip install 'ckpttool[train]'") from None
    loaded = load_digits()
    pictures = torch.tensor(loaded.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(loaded.target, dtype=torch.int64)
    all_of_them = TensorDataset(scale_of(config, channels=1).apply(pictures), labels)
    train, test = split(all_of_them, labels.tolist())
    return Parts(train, test, CLASSES, "digits")


def torchvision(config: DataConfig) -> Parts:
    """Return CIFAR-10 or MNIST, as torchvision reads it; `--download` downloads it first.

    Raises:
        UsageFault: torchvision is not installed, or the files are not in `--data-root`.
        CkptToolError: the download failed.
    """
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
        parts.append(_Bytes(pictures, labels, scale_of(config, pictures.shape[1])))
    return Parts(parts[0], parts[1], tuple(found.classes), config.data)


def _download(kind: Any, config: DataConfig) -> None:
    """Download on the first rank of each machine to come here; the others wait and find the files."""
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


def fake(config: DataConfig, argument: str) -> Parts:
    """Return noise of CIFAR's shape, for trying things out: N training samples, a fifth as many test samples.

    It is uniform with mean 0 and standard deviation 1, as images are when they are normalised.

    Raises:
        UsageFault: `argument`, N, is not a positive number.
    """
    if not argument.isdecimal() or not int(argument):
        raise UsageFault(f"--data {config.data}: needs a number of samples", hint="for example fake:64")
    number, scale = int(argument), scale_of(config, FAKE_SHAPE[0], usual=UNIFORM)
    train = _Noise(0, number, scale)
    test = _Noise(number, max(1, number // HELD_OUT), scale)
    return Parts(train, test, CLASSES, "fake")


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
