"""Checkpoints of a run: what is in them, when they are written, and what happens if they can't be.

A checkpoint is one dict of primitives and tensors, so `torch.load(weights_only=True)` reads it. It holds
what the next step depends on and nothing else: from it a run continues as if it had never stopped, bit for
bit on the same number of ranks. Only rank 0 writes and reads; the others send and receive.

With `--save async` training waits only while the state is copied. A thread of each rank then computes the
digests of its copy, and rank 0's writes the file. These threads send nothing: at the end of a later step,
when all of them are done, the ranks compare their digests, and only then does the file take its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

import ckpttool
from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.errors import CheckFailed, FileError
from train import run_folder
from train.checkpoints import digest_of_run, named_optimizer
from train.engine import Trainer
from train.optimizers import consolidated
from train.staging import Staging, is_on_cpu

T = TypeVar("T")

HOW_TO_SAVE = {"save", "grace"}
"""Settings that no checkpoint records: its bytes are the same however it was written."""

ON_SOME_RANKS = "look for code that changes weights, buffers or the optimizer on only some ranks"

NICENESS = 10
"""What is added to the niceness of a thread that writes: training goes first where cores are few."""

NOTICEABLE = 1.0
"""Seconds of waiting for a save that is still being written, from which on the report says so."""


def capture(trainer: Trainer) -> dict[str, Any]:
    """Return everything that the next step depends on, without digests. A collective.

    The tensors of the model and the optimizer are their own, not copies. With `--zero` the optimizer's state
    is rank 0's alone, and None on the others.
    """
    trainer.share_buffers()
    state = {
        "model": trainer.ddp.state_dict(),
        "optimizer": consolidated(trainer.optimizer),
        "scheduler": trainer.scheduler.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "progress": dataclasses.asdict(trainer.progress)
        | {"sums": collectives.gather(trainer.sums.values())},
        "plan": dataclasses.asdict(trainer.plan)
        | {"world_size": collectives.world_size(), "data": trainer.data.fingerprint}
        | {"contents": trainer.data.contents, "init": trainer.started_from},
        "rng": collectives.gather(randomness.take()),
        "config": {name: value for name, value in trainer.config.plain().items() if name not in HOW_TO_SAVE},
        "versions": versions(trainer.place.device),
        "log": collectives.gather(trainer.log.state()),
    }
    if trainer.ema:
        state["ema"] = trainer.ema.state_dict()
    if trainer.proof:
        state["chain"] = trainer.proof.head
    return state


def digests_of(state: dict[str, Any]) -> dict[str, dict[str, bytes]]:
    """Return the digest of each value that must be equal on all ranks, by part and by name."""
    values = {"model": state["model"]}
    if state["optimizer"] is not None:
        values["optimizer"] = named_optimizer(state["optimizer"])
    if "ema" in state:
        values["ema"] = state["ema"]["averages"]
    return {part: collectives.digest_each(each) for part, each in values.items()}


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, apart from the checkpoint."""
    return {
        "ckpttool": ckpttool.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


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
    ) -> None:
        """Prepare a save.

        Args:
            state: as `capture` returned it; it must not change until the file is written.
            folder: of the run.
            names: of the files to write, at least one.
            keep: how many numbered checkpoints to leave in the folder; 0 leaves all.
            finite: this rank's parameters and running statistics, which must be finite, by name.
            lr: for the hint, if they are not.
        """
        self.state, self.folder, self.names, self.keep = state, folder, names, keep
        self.placed: list[str] = []
        self.finite, self.lr = finite, lr
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
        wait = self.allowed.result
        run_folder.write(self.state, self.folder, self.names, before_it_counts=wait, placed=self.placed)
        if self.keep:
            run_folder.drop_old(self.folder, self.keep)

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
                last = os.path.join(self.folder, run_folder.LAST)
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


class Tell(Protocol):
    """Says on rank 0 what has happened to a save, and logs it. A collective."""

    def __call__(self, event: str, text: str, step: int, **fields: Any) -> None:
        """Print `text`; log `event` and the fields as an object about this step."""


class Saver:
    """Writes the checkpoints of a run: last.pt, and best.pt for the best model so far.

    A disk that is full, or fails, does not end the run: the failure is told, the old file stays, and the next
    save tries again. `finish` raises it if no later save of that file succeeded.

    Args:
        trainer: whose state is saved.
        folder: of the run; only rank 0 touches it.
        tell: is told what the user should know.
    """

    def __init__(self, trainer: Trainer, folder: str, tell: Tell | None = None) -> None:
        self.trainer, self.folder, self._tell = trainer, folder, tell
        self._staging = Staging()
        self._under_way: Save | None = None
        self._failed: dict[str, FileError] = {}
        self._best_on_disk = trainer.progress.best

    def save(self, *, last: bool, best: bool) -> None:
        """Write what is asked for, if anything, or begin to. A collective.

        It waits for the save before, which is still being written if the disk is slow.

        Args:
            last: write last.pt, and with `--keep` a numbered checkpoint.
            best: write best.pt.

        Raises:
            CheckFailed: on the rank where a parameter or running statistic is NaN or infinite; the others
                raise RankFailed. Earlier checkpoints stay. With `--save async` a later call raises it.
            RanksDiffer: likewise, on every rank, if parameters, buffers, averages or optimizer states are not
                equal on all ranks.
        """
        if not last and not best:
            return
        heartbeat.phase("save")
        trainer = self.trainer
        self._wait_for_last()
        keep, step = trainer.config.keep, trainer.progress.global_step
        numbered = [run_folder.numbered(step)] if last and keep else []
        names = [run_folder.LAST] * last + [run_folder.BEST] * best + numbered
        model = trainer.ddp.module
        own = {name: tensor.clone() for name, tensor in _running_statistics(model)}  # they become rank 0's
        state = capture(trainer)
        if collectives.rank() != 0:  # the others only compare
            state = {part: state.get(part) for part in ("model", "optimizer", "ema", "progress", "config")}
            state = {part: value for part, value in state.items() if value is not None or part == "optimizer"}
        in_background = trainer.config.save == "async"
        if in_background or not is_on_cpu(state):
            state, own = self._staging.copy((state, own))
        finite = {name: state["model"].get(f"module.{name}") for name, _ in model.named_parameters()} | own
        save = self._under_way = Save(state, self.folder, names, keep, finite, trainer.config.lr)
        if in_background:
            save.begin()
        else:
            save.look()
            self.finish_save()

    def _wait_for_last(self) -> None:
        """Wait for the save that is under way, and say so if it takes long. A collective."""
        save, began = self._under_way, time.monotonic()
        if save is None:
            return
        self.finish_save()
        waited = collectives.decide(lambda: time.monotonic() - began)
        if waited > NOTICEABLE:
            step = self.trainer.progress.global_step
            text = f"training waited {waited:.1f} s in step {step} for the save of step {save.step}"
            self._say("save waited", f"{text}: saves come faster than they are written", seconds=waited)

    # ---- a save that is under way ----------------------------------------------------------------------

    def word(self) -> tuple[int, int]:
        """Return what this rank tells the others in each step, of which `advance` takes the largest.

        Returns:
            1 if it still computes digests, else 0; 1 if the file is written, else 0.
        """
        save = self._under_way
        if save is None:
            return 0, 0
        return int(not save.digests.done()), int(save.written.done())

    def advance(self, computing: int, written: int) -> None:
        """Take the save that is under way one step further, without waiting. A collective.

        Args:
            computing, written: the largest of what the ranks' `word` returned.

        Raises:
            CheckFailed, RanksDiffer: as `save`.
        """
        if self._under_way is not None and not self._under_way.agreed and not computing:
            self._agree(self._under_way)
        if written:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the save that is under way, if any; tell its failure. A collective. Raises as `save`."""
        save = self._under_way
        if save is None:
            return
        if not save.agreed:
            self._agree(save)
        if self.trainer.config.save == "sync":
            save.write()
        failure, placed = collectives.decide(partial(_outcome, save))
        self._under_way = None
        for name in placed:
            self._failed.pop(name, None)
        self._best_on_disk = save.best if run_folder.BEST in placed else self._best_on_disk
        if failure is None:
            return
        missing = {*save.names} - {*placed}
        for name in {run_folder.LAST, run_folder.BEST} & missing:  # no later save is of a numbered one
            self._failed[name] = failure
        if run_folder.BEST in missing and self.trainer.progress.best == save.best:
            self.trainer.progress.best = self._best_on_disk  # so that the next better one is written
        again = "the next save tries again"
        self._say(
            "save failed", f"the save of step {save.step} failed: {failure}; {again}", error=str(failure)
        )

    def _agree(self, save: Save) -> None:
        """Compare the ranks, and let the file take its place. A collective."""
        try:
            collectives.compare_digests(save.digests.result, "before saving", hint=ON_SOME_RANKS)
        except BaseException:
            save.leave()
            self._under_way = None
            raise
        if self.trainer.proof:
            self.trainer.proof.checkpoint(save.state)
        save.allow()

    def finish(self) -> None:
        """Wait until everything is written. A collective.

        Raises:
            FileError: the last save of a file failed. RankFailed on all ranks but 0.
            CheckFailed, RanksDiffer: as `save`.
        """
        self.finish_save()
        collectives.alike(self._raise_failure)

    def _raise_failure(self) -> None:
        for failure in self._failed.values():
            raise failure

    def leave(self) -> None:
        """Leave a run that has failed: wait for a file that is being written; send nothing."""
        if self._under_way is not None:
            self._under_way.leave(patience=self.trainer.config.grace)

    def _say(self, event: str, text: str, **fields: Any) -> None:
        if self._tell is not None:
            self._tell(event, text, self.trainer.progress.global_step, **fields)


def _outcome(save: Save) -> tuple[FileError | None, list[str]]:
    """Wait for the file on rank 0. Return the error with which the disk refused something, and the names that
    are the new file's; raise any other error."""
    try:
        save.written.result()
    except FileError as error:
        return error, save.placed
    return None, save.placed


def _running_statistics(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those of normalisation layers, by name. Other buffers may be infinite on purpose: masks are."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            yield from layer.named_buffers(path, recurse=False)
