"""Data sets by name, each as (training samples, test samples).

A sample of the data sets known by name is (image, label): a float32 tensor of channels × height × width, and
an int. One of a user's own can be any structure of tensors that its task takes. Nothing here is random,
except in a user's own data set; that is keyed by (seed, epoch, sample).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ckpttool.distributed import collectives
from ckpttool.distributed.randomness import seeded
from ckpttool.errors import CheckFailed, RanksDiffer, UsageFault
from train.config.shared import DataConfig
from train.data import builtin as builtin_data
from train.data import fingerprint as contents
from train.data import from_factory as user_data
from train.data import image_folder as pictures
from train.data.fingerprint import CLASSIFICATION, Contents
from train.data.samples import Parts, Samples, count, leaves

NAMES = "digits, cifar10, mnist, folder:PATH, fake:N or file.py:factory"


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        name: as on the command line.
        train, test: map-style data sets.
        classes: their names, by label; none where the task has none.
        shape: of the first tensor in a sample: channels, height and width of an image.
        fingerprint: differs between data sets with different samples, as far as known without reading them.
        contents: digests of some samples and of the labels.
        task: what the data is for; classification has a label per sample.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    fingerprint: str
    contents: Contents = field(default_factory=dict)
    task: str = CLASSIFICATION

    def redrawn(self) -> set[str]:
        """Return the kinds of `contents` that are others each time they are read; see `contents.redrawn`."""
        parts = (("training", self.train), ("test", self.test))
        return set[str]().union(
            *(contents.redrawn(part, samples, self.contents, self.name, self.task) for part, samples in parts)
        )

    def check_labels(self, labels: torch.Tensor, samples: Sequence[int], part: str) -> None:
        """Check labels, as the loss would end in a traceback, or skip a label equal to its `ignore_index`.

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

    def check_tokens(self, targets: torch.Tensor, samples: Sequence[int], part: str, *, ignored: int) -> None:
        """Check the target tokens of sequences, as `check_labels` does labels.

        Args:
            targets: integers [n, ...], of the samples with the indices `samples` in `part`.
            ignored: a target that stands for no token.

        Raises:
            CheckFailed: a target is not `ignored`, and none of the tokens, which are the data set's classes;
                of a data set without classes, if it is negative.
        """
        known = len(self.classes)
        wrong = (targets < 0) | (targets >= known) if known else targets < 0
        wrong = (wrong & (targets != ignored)).flatten(1)
        if wrong.any():
            row = int(wrong.any(dim=1).nonzero()[0])
            token = int(targets.flatten(1)[row][wrong[row]][0])
            tokens = (
                f"one of the {known} tokens (0 to {known - 1})" if known else "a token, which is 0 or more"
            )
            raise CheckFailed(
                f"{part} sample {samples[row]} has the target {token}, which is not {tokens}",
                hint=f"check the targets of --data {self.name}; {ignored} stands for none",
            )


def load(config: DataConfig, *, seed: int = 0) -> Data:
    """Return the data set that `--data` names.

    Args:
        seed: with the epoch and the sample, determines the random numbers that a user's data set draws.

    Raises:
        UsageFault: there is no such data set, its files are missing, or a flag does not fit it; names the
            path that was searched and the flag to give.
        Unreadable, Damaged: an image of a folder can't be read.
        CkptToolError: `--download` failed.
    """
    parts = load_parts(config, seed=seed)
    # The shuffle depends on the number of samples, so other sizes are other data.
    return _data(config, parts, f" {count(parts.train)}/{count(parts.test)}")


def load_parts(config: DataConfig, *, seed: int = 0) -> Parts:
    """Return both parts of a data set, none of them empty, without reading a sample. Raises as `load`."""
    # What a factory draws, as for random_split, must be the same on every rank, in each run, and in an
    # evaluation, which has no --seed: else samples that were trained on would be tested with.
    with seeded("data"):
        parts = _parts(config, seed)
    for part, samples in (("training", parts.train), ("test", parts.test)):
        if not count(samples):
            raise UsageFault(f"--data {config.data}: there are no {part} samples")
    return parts


def load_test(config: DataConfig) -> Data:
    """Return the data set for an evaluation: a folder with one level of classes is the test set itself.

    Raises:
        as `load`.
    """
    path = config.data.removeprefix("folder:")
    divided = all(os.path.isdir(os.path.join(path, part)) for part in ("train", "test"))
    if path == config.data or divided or not os.path.isdir(path):
        return load(config)
    return _data(config, pictures.load_test(config, path), "")


def _parts(config: DataConfig, seed: int) -> Parts:
    name, _, argument = config.data.partition(":")
    if config.data == "digits":
        return builtin_data.digits(config)
    if config.data in ("cifar10", "mnist"):
        return builtin_data.torchvision(config)
    if name == "folder" and argument:
        return pictures.load(config, argument)
    if name == "fake":
        return builtin_data.fake(config, argument)
    if argument:
        return user_data.load(config, seed)
    raise UsageFault(f"--data {config.data}: no such data set", hint=f"one of {NAMES}")


def _data(config: DataConfig, parts: Parts, sizes: str) -> Data:
    fingerprint = f"{parts.source}{sizes}{_preparation(config)}"
    found: dict[str, dict[str, str]] = {}
    for part, samples in {"test": parts.test, "training": parts.train}.items():
        if part == "test" or samples is not parts.test:
            for kind, digests in contents.describe(part, samples, config.data, config.task).items():
                found.setdefault(kind, {}).update(digests)
    parts_of_first = leaves(parts.test[0], f"--data {config.data}: test sample 0").values()
    shape = next((tuple(one.shape) for one in parts_of_first if isinstance(one, torch.Tensor)), ())
    return Data(config.data, parts.train, parts.test, parts.classes, shape, fingerprint, found, config.task)


def compare(data: Data, when: str) -> None:
    """Check that all ranks have loaded the same data. A collective.

    Args:
        when: ends the message.

    Raises:
        RanksDiffer: on every rank, if they haven't.
    """
    hint = "the files of --data must be the same on every machine, and a factory must seed its own generators"
    whole = {"--data": (data.fingerprint, data.classes)}
    try:
        collectives.compare({**whole, **contents.flat(data.contents)}, when, hint=hint)
    except RanksDiffer:
        with collectives.fail_together():
            own = data.redrawn()
        changing = set[str]().union(*collectives.gather(own))
        if not changing:
            raise
        collectives.compare({**whole, **contents.flat(data.contents, changing)}, when, hint=hint)


def _preparation(config: DataConfig) -> str:
    """Return the flags for turning images into numbers: other numbers are another data set."""
    given = {"mean": config.mean, "std": config.std, "resize": config.resize}
    return "".join(f", {name} {value}" for name, value in given.items() if value is not None)
