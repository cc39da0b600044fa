"""Batches of given samples, loaded in this process or ahead of time by other processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from ckpttool.distributed.group import Place
from ckpttool.distributed.observer import end_with_parent
from ckpttool.errors import CkptToolError, FileError
from train.data.samples import Collation, Samples, count
from train.data.stream import Read

PATIENCE = 5.0  # seconds that all loading processes together have to end the samples that they are at

_started: weakref.WeakSet[Any] = weakref.WeakSet()  # what holds the loading processes of this process


@contextlib.contextmanager
def processes_ended() -> Iterator[None]:
    """End the loading processes that were started in the block, however it ends."""
    # The garbage collector would do it too late: it closes the queue to such a process before torch says in
    # it that the process shall end. torch then waits for ten seconds and leaves it running (torch 2.15).
    try:
        yield
    finally:
        _end(list(_started))


def _end(loaders: list[Any]) -> None:
    """End all loading processes at once."""
    # torch would wait for one after the other, ten seconds for each that is stuck in a sample, and leave
    # those alive, as they ignore the signal that it then sends.
    for loader in loaders:
        if loader._worker_pids_set:  # else the kill below would be raised as a loading process's failure
            signal_handling._remove_worker_pids(id(loader))  # type: ignore[attr-defined]
            loader._worker_pids_set = False
    ends = [threading.Thread(target=loader._shutdown_workers, daemon=True) for loader in loaders]
    for end in ends:
        end.start()
    deadline = time.monotonic() + PATIENCE
    for end in ends:
        end.join(max(0.0, deadline - time.monotonic()))
    for process in (process for loader in loaders for process in loader._workers):
        process.kill()
    for end in ends:  # those that still wait, say for the thread that pins memory, end with the process
        end.join(PATIENCE)


class Batches:
    """The batches of a loader, in order. Raises a CkptToolError of a sample as it was, from any process."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self.loader.num_workers:
            _started.add(batches)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (ConnectionError, EOFError) as error:
                if not self.loader.num_workers or str(error).startswith("Caught "):
                    raise  # a sample raised it
                # It died while it handed a batch over, which torch does not expect.
                raise RuntimeError("DataLoader worker (pid 0) has died") from error
            if isinstance(batch, Failure):
                raise batch.error
            yield batch


class Loader(DataLoader[Any]):
    """A DataLoader that takes any number of processes: torch warns of more than cores, once in each pass."""

    def check_worker_number_rationality(self) -> None:
        pass


def load(
    samples: Samples,
    batches: Iterable[list[int]],
    place: Place,
    workers: int,
    *,
    collation: Collation | None = None,
    seed: int = 0,
    again: bool = False,
) -> Batches:
    """Return these batches of samples, in order; each as a `Read` if some samples may be missing.

    Args:
        batches: the indices of the samples of each batch.
        collation: how samples become a batch; as torch's by default.
        workers: loading processes; 0 to load in this process.
        seed: with the process's number, determines the random numbers that it draws.
        again: keep the processes, because the same batches will be loaded again.
    """
    loader = Loader(
        Collated(samples, collation or Collation(), careful=workers > 0),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=_as_it_is,
        persistent_workers=again and workers > 0,
        worker_init_fn=outlive_signals,
        # Forked where that is safe: then data sets from a user's file need not be picklable.
        multiprocessing_context=("fork" if sys.platform == "linux" else None) if workers else None,
        pin_memory=place.device.type == "cuda",
        # Without a generator of its own, each pass would draw from the global one and shift dropout.
        generator=torch.Generator().manual_seed(seed),
    )
    return Batches(loader)


@dataclass(frozen=True)
class Failure:
    """An expected error on its way to the process that reports it."""

    # torch makes a new error of one from another process, with the traceback as its only argument: the
    # class, the hint and the exit code would be lost.

    error: CkptToolError


class Collated(Dataset[Any]):
    """A data set that returns whole batches, made here because here it is known of which samples they are.

    If it is `careful`, it returns expected errors as values.
    """

    def __init__(self, samples: Samples, collation: Collation, *, careful: bool = False) -> None:
        self.samples, self.collation, self.careful = samples, collation, careful

    def __len__(self) -> int:
        return count(self.samples)

    def __getitems__(self, indices: list[int]) -> Any:
        try:
            return batch_of(self.samples, self.collation, indices)
        except CkptToolError as error:
            if not self.careful:
                raise
            return Failure(error)


def batch_of(samples: Any, collation: Collation, indices: list[int]) -> Any:
    """Return samples as one batch, loaded in this process; as a `Read` if some may be missing."""
    several = getattr(samples, "__getitems__", None)
    chosen = several(indices) if several is not None else [samples[index] for index in indices]
    if not isinstance(chosen, Read):
        return collation.batch(chosen, indices, getattr(samples, "epoch", 0))
    if not chosen.samples:
        return chosen._replace(samples=None)
    return chosen._replace(samples=collation.batch(chosen.samples, chosen.taken, samples.epoch))


def trial_batch(samples: Any, collation: Collation, indices: list[int]) -> Any:
    """Return samples as one batch to try something on; of a stream its first, which stays where it is."""
    return collation.batch([samples[index] for index in indices], indices)


class Undamaged(Dataset[Any]):
    """A data set without the samples that can't be read."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.epoch = samples, 0

    def __len__(self) -> int:
        return count(self.samples)

    def __getitem__(self, index: int) -> Any:
        """Return a sample to try something on: this one, or the next that can be read."""
        for place in range(index, len(self) - 1):
            with contextlib.suppress(FileError):
                return self.samples[place]
        return self.samples[len(self) - 1]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)

    def __getitems__(self, indices: list[int]) -> Read:
        samples: list[Any] = []
        taken: list[int] = []
        skipped: list[tuple[int, str]] = []
        for index in indices:
            try:
                samples.append(self.samples[index])
                taken.append(index)
            except FileError as error:  # noqa: PERF203
                skipped.append((index, f"training sample {index}: {error.message}"))
        return Read(samples, taken, skipped=skipped)


def _as_it_is(batch: Any) -> Any:
    return batch


def outlive_signals(_: int) -> None:
    """Let a process that loads data ignore the signals that end a run, and end with its rank."""
    # A terminal and a scheduler send them to all processes, and the rank needs batches to end its step.
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        with contextlib.suppress(AttributeError):  # a system without it
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if end_with_parent(signal.SIGKILL) and rank is not None and rank.pid != os.getppid():
        os._exit(1)
