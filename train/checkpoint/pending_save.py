"""One checkpoint on its way to the disk: its digests, and its file. Imports torch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ckpttool.distributed import collectives
from ckpttool.errors import CheckFailed
from train.checkpoint import files as checkpoint_files
from train.checkpoint.format import digest_of_run, named_optimizer

T = TypeVar("T")

NICENESS = 10
"""What is added to the niceness of a thread that writes: training goes first where cores are few."""


def digests_of(state: dict[str, Any]) -> dict[str, dict[str, bytes]]:
    """Return the digest of each value that must be equal on all ranks, by part and by name."""
    values = {"model": state["model"]}
    if state["optimizer"] is not None:
        values["optimizer"] = named_optimizer(state["optimizer"])
    if "ema" in state:
        values["ema"] = state["ema"]["averages"]
    return {part: collectives.digest_each(each) for part, each in values.items()}


class Abandoned(Exception):
    """A file that is written must not take its place: the run failed before the ranks were compared."""


class Save:
    """One checkpoint on its way to the disk. Nothing in it is a collective.

    Attributes:
        digests: of this rank's state, or why it must not be saved.
        allowed: set once all ranks are known to hold the same; the file then takes its place.
        written: the time at which it was, on rank 0.
        agreed: whether the ranks have been compared.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: str,
        names: list[str],
        keep: int,
        finite: dict[str, Any],
        lr: float,
        recorded: Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[object]],
    ) -> None:
        """Prepare a save.

        Args:
            state: as `capture` returned it; it must not change until the file is written.
            folder: of the run.
            names: of the files to write, at least one.
            keep: how many numbered checkpoints to leave in the folder; 0 leaves all.
            finite: this rank's parameters and running statistics, which must be finite, by name.
            lr: for the hint, if they are not.
            recorded: returns a context in which the file takes its place; called with the state.
        """
        self.state, self.folder, self.names, self.keep = state, folder, names, keep
        self.placed: list[str] = []
        self.finite, self.lr, self.recorded = finite, lr, recorded
        self.step, self.best = state["progress"]["global_step"], state["progress"]["best"]
        self.digests: Future[dict[str, bytes]] = Future()
        self.allowed: Future[None] = Future()
        self.written: Future[None] = Future()
        self.agreed = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look at the state and write it, in a thread."""
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self.look()
        self.write()

    def look(self) -> None:
        """Compute the digests; refuse a training that has diverged, before a checkpoint is overwritten."""
        _settle(self.digests, self._look)

    def _look(self) -> dict[str, bytes]:
        self._check_finite()
        parts = digests_of(self.state)
        whole = {part: collectives.combined(each).hex() for part, each in parts.items()}
        self.state["digests"] = whole | {"run": digest_of_run(self.state)}
        shared = dict(parts["model"])
        if not self.state["config"]["zero"]:  # there each rank has a part of its own, and rank 0 the whole
            shared |= parts["optimizer"]
        return shared | {f"the average of {name}": one for name, one in parts.get("ema", {}).items()}

    def write(self) -> None:
        """Write the file on rank 0, if `look` found nothing wrong. It waits for `allowed`."""
        if collectives.rank() == 0 and self.digests.exception() is None:
            _settle(self.written, self._write)

    def _write(self) -> None:
        checkpoint_files.write(self.state, self.folder, self.names, placing=self._placing, placed=self.placed)
        if self.keep:
            checkpoint_files.drop_old(self.folder, self.keep)

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        self.allowed.result()
        with self.recorded(self.state):
            yield

    def allow(self) -> None:
        """Let the file take its place: all ranks hold what it holds."""
        self.agreed = True
        self.allowed.set_result(None)

    def leave(self, patience: float | None = None) -> None:
        """End the thread: let a file that may take its place do so, and remove another.

        Args:
            patience: seconds to wait for the disk; by default as long as it takes.
        """
        if not self.agreed and not self.allowed.done():
            self.allowed.set_exception(Abandoned())
        if self._thread is not None:
            self._thread.join(patience)

    def _check_finite(self) -> None:
        """Raise CheckFailed if training has diverged."""
        for name, tensor in self.finite.items():
            # The sum is much faster, and finite only if all values are; but it may overflow where they are.
            if tensor is not None and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                last = os.path.join(self.folder, checkpoint_files.LAST)
                before = f"; {last} is from before that" if os.path.exists(last) else ""
                raise CheckFailed(
                    f"after step {self.step} {name} is NaN or infinite: nothing can be learned from here on",
                    hint=f"give a smaller --lr than {self.lr:g}, or --warmup, or look for NaN in the samples "
                    f"and in the loss{before}",
                )


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Do some work, and keep its result or its error."""
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
