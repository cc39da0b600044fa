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
import platform
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

import ckpttool
from ckpttool.distributed import collectives, heartbeat, randomness
from ckpttool.errors import FileError
from train.checkpoint import files as checkpoint_files
from train.checkpoint.files import BEST, LAST
from train.checkpoint.pending_save import Save
from train.checkpoint.staging import Staging, is_on_cpu
from train.model.optimizer import consolidated
from train.trainer.trainer import Trainer

T = TypeVar("T")

HOW_TO_SAVE = {"save", "grace"}
"""Settings that no checkpoint records: its bytes are the same however it was written."""

ON_SOME_RANKS = "look for code that changes weights, buffers or the optimizer on only some ranks"

NOTICEABLE = 1.0
"""Seconds of waiting for a save that is still being written, from which on the report says so."""


def capture(trainer: Trainer) -> dict[str, Any]:
    """Return everything that the next step depends on, without digests. A collective.

    The tensors of the model and the optimizer are their own, not copies. With `--zero` the optimizer's state
    is rank 0's alone, and None on the others.
    """
    trainer.share_buffers()
    state: dict[str, Any] = {
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


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the last bits of a result depend on, apart from the checkpoint."""
    return {
        "ckpttool": ckpttool.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


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
        numbered = [checkpoint_files.numbered(step)] if last and keep else []
        names = [LAST] * last + [BEST] * best + numbered
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
        recorded = trainer.proof.checkpoint if trainer.proof else contextlib.nullcontext
        save = Save(state, self.folder, names, keep, finite, trainer.config.lr, recorded)
        self._under_way = save
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
        waited = collectives.from_rank_zero(lambda: time.monotonic() - began)
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
        failure, placed = collectives.from_rank_zero(partial(_outcome, save))
        self._under_way = None
        for name in placed:
            self._failed.pop(name, None)
        self._best_on_disk = save.best if BEST in placed else self._best_on_disk
        if failure is None:
            return
        missing = {*save.names} - {*placed}
        for name in {LAST, BEST} & missing:  # no later save is of a numbered one
            self._failed[name] = failure
        if BEST in missing and self.trainer.progress.best == save.best:
            self.trainer.progress.best = self._best_on_disk  # so that the next better one is written
        if LAST in placed and missing == {checkpoint_files.numbered(save.step)}:
            text = f"step {save.step} has no numbered checkpoint: {failure}"
        else:
            text = f"the save of step {save.step} failed: {failure}; the next save tries again"
        self._say("save failed", text, error=str(failure))

    def _agree(self, save: Save) -> None:
        """Compare the ranks, and let the file take its place. A collective."""
        try:
            collectives.compare_digests(save.digests.result, "before saving", hint=ON_SOME_RANKS)
        except BaseException:
            save.leave()
            self._under_way = None
            raise
        save.allow()

    def finish(self) -> None:
        """Wait until everything is written. A collective.

        Raises:
            FileError: the last save of a file failed. RankFailed on all ranks but 0.
            CheckFailed, RanksDiffer: as `save`.
        """
        self.finish_save()
        collectives.report_once(self._raise_failure)

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
