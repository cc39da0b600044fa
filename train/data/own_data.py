"""Data sets that a user's factory makes: --data file.py:factory. Imports torch."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import TensorDataset

from ckpttool.distributed.randomness import Keyed
from ckpttool.errors import CkptToolError, Unreadable, UsageFault
from ckpttool.files.failures import reason
from ckpttool.models import factory
from train.config.shared import DataConfig
from train.data.fingerprint import CLASSIFICATION
from train.data.packing import Packed
from train.data.samples import Parts, Samples, by_name, count
from train.data.stream import Stream, is_stream


def from_factory(config: DataConfig, seed: int) -> Parts:
    """Return the data sets that a user's factory makes; what they draw is keyed by (seed, epoch, sample).

    UsageFault if it returns something else.
    """
    if config.mean or config.std:
        raise UsageFault(f"--mean, --std: {config.data} makes its own images", hint="leave them out")
    made = factory.build(config.data)
    train, test = made if isinstance(made, tuple | list) and len(made) == 2 else (made, None)
    if isinstance(train, tuple):
        raise UsageFault(f"--data {config.data}: must return (train, test), or one data set")
    named = by_name(train, test)
    of_training, *of_test = [_own(samples, part, config, seed) for part, samples in named.items()]
    return Parts(of_training, of_test[0] if of_test else None, _classes(train, config), config.data)


def _own(samples: Any, part: str, config: DataConfig, seed: int) -> Samples:
    """Return a user's data set, whose random numbers are keyed; a stream if it is only iterable."""
    if not is_stream(samples):
        count(samples)
        return Named(samples, seed, part, config.data)
    packed = Packed(samples, config.block_size) if config.block_size else samples
    window = config.shuffle_window or 1
    return Stream([packed], config.data, seed=seed, window=window, skip_damaged=config.skip_damaged)


class Named(Keyed):
    """A data set of a user's, whose sample is named when it can't be made."""

    def __init__(self, samples: Samples, seed: int, part: str, data: str) -> None:
        super().__init__(samples, seed)
        self.part, self.data = part, data

    def drawn(self, index: int) -> Any:
        try:
            return super().drawn(index)
        except OSError as error:
            sample, why = f"{self.part} sample {index}", reason(error)
            if error.filename is None:
                raise Unreadable(f"--data {self.data}", f"{sample} can't be read: {why}") from error
            raise Unreadable(os.fsdecode(error.filename), f"{why}: {sample} of --data {self.data}") from error
        except CkptToolError:
            raise
        except Exception as error:
            what = f"--data {self.data}: {self.part} sample {index}: {factory.described(error)}"
            raise UsageFault(what, hint="CKPTTOOL_DEBUG=1 with --workers 0 shows the traceback") from error


def _classes(samples: Any, config: DataConfig) -> tuple[str, ...]:
    """Return the names of the classes; those of another task than classification only if they are named."""
    named = getattr(samples, "classes", None)
    if named is not None:
        return tuple(map(str, named))
    if config.task != CLASSIFICATION:
        return ()
    labels = getattr(samples, "targets", None)
    if labels is None and isinstance(samples, TensorDataset):
        labels = samples.tensors[-1]
    if labels is None:
        hint = "give it an attribute: classes = ['cat', 'dog']"
        raise UsageFault(f"--data {config.data}: the training data set does not say its classes", hint=hint)
    return tuple(str(label) for label in range(int(max(labels)) + 1))
