"""Data sets that a user's factory makes: `--data file.py:factory`."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import TensorDataset

from ckpttool.distributed.randomness import Keyed
from ckpttool.errors import Unreadable, UsageFault
from ckpttool.models import factory
from train.config.shared import DataConfig
from train.data.fingerprint import CLASSIFICATION
from train.data.samples import Parts, Samples, count


def load(config: DataConfig, seed: int) -> Parts:
    """Return the data sets that the user's function makes.

    Args:
        seed: with the epoch and the sample, determines the random numbers that a sample is drawn with.

    Raises:
        UsageFault: the function can't be called, does not return two map-style data sets, or the first does
            not know its classes, which classification needs; or a flag does not fit.
    """
    if config.mean or config.std:
        raise UsageFault(f"--mean, --std: {config.data} makes its own images", hint="leave them out")
    made = factory.build(config.data)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageFault(f"--data {config.data}: must return (train, test), two data sets")
    train, test = made
    for samples in made:
        count(samples)
    return Parts(
        Named(train, seed, "training", config.data),
        Named(test, seed, "test", config.data),
        _classes(train, config),
        config.data,
    )


class Named(Keyed):
    """A data set of a user's, whose sample is named when its file can't be read.

    Args:
        samples: the data set.
        seed: as `load`.
        part: `training` or `test`.
        data: what `--data` names.
    """

    def __init__(self, samples: Samples, seed: int, part: str, data: str) -> None:
        super().__init__(samples, seed)
        self.part, self.data = part, data

    def drawn(self, index: int) -> Any:
        """Return a sample.

        Raises:
            Unreadable: the data set raised an OSError.
        """
        try:
            return super().drawn(index)
        except OSError as error:
            sample = f"{self.part} sample {index}"
            reason = (error.strerror or str(error) or type(error).__name__).lower()
            if error.filename is None:
                raise Unreadable(f"--data {self.data}", f"{sample} can't be read: {reason}") from error
            raise Unreadable(
                os.fsdecode(error.filename), f"{reason}: {sample} of --data {self.data}"
            ) from error


def _classes(samples: Any, config: DataConfig) -> tuple[str, ...]:
    """Return the names of the classes; those of another task than classification only if they are named."""
    known = getattr(samples, "classes", None)
    if known is not None:
        return tuple(str(one) for one in known)
    if config.task != CLASSIFICATION:
        return ()
    labels = getattr(samples, "targets", None)
    if labels is None and isinstance(samples, TensorDataset):
        labels = samples.tensors[-1]
    if labels is None:
        raise UsageFault(
            f"--data {config.data}: the training data set does not say its classes",
            hint="give it an attribute: classes = ['cat', 'dog']",
        )
    return tuple(str(label) for label in range(int(max(labels)) + 1))
