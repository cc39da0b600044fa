"""When the checkpoints of a run are written, and what happens if they can't be. Imports torch.

Only rank 0 writes. With `--save async` training waits only while the state is copied; a thread of each rank
then computes the digests of its copy, and rank 0's writes the file. The threads send nothing: what they have
done the ranks tell each other in later steps (`word`, `advance`). A save passes through these states:

    save()                captured, and copied
      |  digests          on each rank: computed, or why the state must not be saved
      |  agreed           all ranks hold the same; else RanksDiffer, and no file changes
      |  allowed          rank 0's file, complete on the disk by now, may take its name
      |  placed           it has its name, and the others of the same save
    finish_save()         written; or the disk has refused, which the next save makes good
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from ckpttool.distributed import collectives, heartbeat
from ckpttool.errors import FileError
from train.checkpoint.files import BEST, LAST, numbered
from train.checkpoint.format import capture
from train.checkpoint.parts import Parts, split
from train.checkpoint.pending_save import Save, Staging, tensors_of
from train.trainer.trainer import Trainer

ON_SOME_RANKS = "look for code that changes weights, buffers or the optimizer on only some ranks"

# What the other ranks look at of a state.
COMPARED = ("model", "optimizer", "ema", "progress", "config")

# Seconds of waiting for a save that is still being written, from which on the report says so.
NOTICEABLE = 1.0


class Saver:
    """Writes the checkpoints of a run: last.pt, and best.pt for the best model so far.

    A disk that is full, or fails, does not end the run: the failure is reported, the old file stays, and the
    next save tries again. `finish` raises it if no later save of that file succeeded.
    """

    def __init__(
        self, trainer: Trainer, folder: str, tell: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self.trainer, self.folder, self._tell = trainer, folder, tell
        self._staging = Staging()
        self._pending: Save | None = None
        self._failed: dict[str, FileError] = {}
        self._best_on_disk = trainer.progress.best

    def save(self, *, last: bool, best: bool, kept: bool = False, in_haste: bool = False) -> None:
        """Write last.pt (with `--keep` under its number too) and best.pt, or begin to. A collective.

        `kept` is of `--keep-best`. `in_haste` makes no delta with `--keep-deltas`, which takes time.

        It waits for the save before, which is still being written if the disk is slow.

        Raises:
            CheckFailed: on the rank where a parameter or running statistic is NaN or infinite; the others
                raise RankFailed. Earlier checkpoints stay. With `--save async` a later call raises it.
            RanksDiffer: likewise, on every rank, if their states are not equal.
        """
        if not (last or best or kept):
            return
        heartbeat.phase("save")
        trainer, config = self.trainer, self.trainer.config
        self._wait_for_last()
        names, step = [LAST] * last + [BEST] * best, trainer.progress.global_step
        names += [numbered(step)] * bool(last and (config.keep or config.keep_deltas))
        names += [numbered(step, "best")] * kept
        model = trainer.ddp.module
        # Copies, as the buffers become rank 0's. Others may be infinite on purpose: masks are.
        norms = ((path, layer) for path, layer in model.named_modules() if isinstance(layer, _NormBase))
        statistics = {
            name: buffer.clone() for path, layer in norms for name, buffer in layer.named_buffers(path, False)
        }
        state = capture(trainer)
        if collectives.rank() != 0:  # the others only compare
            state = {part: state[part] for part in COMPARED if part in state}
        parts = None
        if config.save_parts:
            state, tensors = split(state)
            parts = Parts(tensors, self.folder, trainer.progress.global_step)
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_of(state))
        if not config.shard and (config.save == "async" or not on_cpu):  # else it is a copy already
            state, statistics = self._staging.copy((state, statistics))
        own = parts.local() if parts else state["model"]
        finite = {name: own.get(f"module.{name}") for name, _ in model.named_parameters()}
        self._pending = save = Save(state, self.folder, names, finite | statistics, trainer, parts, in_haste)
        if config.save == "async":
            save.begin()
        else:
            save.look()
            self.finish_save()

    def _wait_for_last(self) -> None:
        """Wait for the pending save, and say so if it takes long. A collective."""
        save, began = self._pending, time.monotonic()
        if save is None:
            return
        self.finish_save()
        waited = collectives.from_rank_zero(lambda: time.monotonic() - began)
        if waited > NOTICEABLE:
            step = self.trainer.progress.global_step
            text = f"training waited {waited:.1f} s in step {step} for the save of step {save.step}"
            self._say("save waited", f"{text}: saves come faster than they are written", seconds=waited)

    def word(self) -> tuple[int, int]:
        """Return what this rank tells the others: whether it still computes digests, and has written."""
        save = self._pending
        return (0, 0) if save is None else (int(not save.digests.done()), int(save.written.done()))

    def advance(self, computing: int, written: int) -> None:
        """Take the pending save a step further, by the largest of the ranks' `word`s. A collective.

        It does not wait. Raises as `save`.
        """
        if self._pending is not None and not computing:
            self._agree(self._pending)
        if written:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait for the pending save, if any; report its failure. A collective. Raises as `save`."""
        save = self._pending
        if save is None:
            return
        self._agree(save)
        if self.trainer.config.save == "sync":
            save.write()
        failure, placed, remarks = collectives.from_rank_zero(
            lambda: (_failure(save), save.placed, save.remarks)
        )
        self._pending = None
        for name in placed:
            self._failed.pop(name, None)
        self._best_on_disk = save.best if BEST in placed else self._best_on_disk
        for event, text in remarks:
            self._say(event, text)
        if failure is not None:
            self._note_failure(save, failure, placed)

    def _note_failure(self, save: Save, failure: FileError, placed: list[str]) -> None:
        missing = {*save.names} - {*placed}
        for name in {LAST, BEST} & missing:  # no later save is of a numbered one
            self._failed[name] = failure
        if BEST in missing and self.trainer.progress.best == save.best:
            self.trainer.progress.best = self._best_on_disk  # so that the next better one is written
        if (best := numbered(save.step, "best")) in missing:
            top = self.trainer.progress.top
            self.trainer.progress.top = [one for one in top if one[1] != save.step]
        text = f"the save of step {save.step} failed: {failure.message}; the next save tries again"
        if placed and missing <= {numbered(save.step), best}:
            text = f"step {save.step} has no numbered checkpoint: {failure.message}"
        self._say("save failed", text, error=failure.message)

    def _agree(self, save: Save) -> None:
        """Compare the ranks if they have not been, and let the file take its place. A collective."""
        if save.allowed.done():
            return
        try:
            collectives.compare_digests(save.digests.result, "before saving", hint=ON_SOME_RANKS)
        except BaseException:
            save.leave()
            self._pending = None
            raise
        refused = save.parts.agree() if save.parts else None
        if refused is not None:  # by one rank's disk: the save fails, and training goes on
            save.allowed.set_exception(refused)
        else:
            save.allowed.set_result(None)

    def finish(self) -> None:
        """Wait until everything is written. A collective; FileError if the last save of a file failed."""
        self.finish_save()
        collectives.report_once(self._raise_failure)

    def _raise_failure(self) -> None:
        for failure in self._failed.values():
            raise failure

    def leave(self) -> None:
        """Leave a run that has failed: wait for a file that is being written; send nothing."""
        if self._pending is not None:
            self._pending.leave(patience=self.trainer.config.grace)

    def _say(self, event: str, text: str, **fields: Any) -> None:
        self._tell(event, text, self.trainer.progress.global_step, **fields)


def _failure(save: Save) -> FileError | None:
    """Wait for the file on rank 0. Return the error with which the disk refused it."""
    error = save.written.exception()
    if error is not None and not isinstance(error, FileError):
        raise error
    return error
