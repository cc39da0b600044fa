"""Saving while training goes on. Imports torch."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _NormBase

from ckpttool.distributed import collectives, heartbeat, transport
from ckpttool.errors import CheckFailed, FileError
from train.checkpoint import files
from train.checkpoint.files import BEST, LAST, Parts, numbered, remove_unnamed, split_parts
from train.checkpoint.format import SETTINGS, capture, digest_of_run, named_optimizer, same_on_ranks
from train.trainer.trainer import Trainer

T = TypeVar("T")
Tell = Callable[..., None]

# What is added to the niceness of a thread that writes: training goes first where cores are few.
NICENESS = 10


class Abandoned(Exception):
    """A file that is written must not take its place: the run failed before the ranks were compared."""


class Save:
    """One checkpoint on its way to the disk. Nothing in it is a collective.

    The state must not change until the file is written. `names` are those of the files; with `--keep`, older
    numbered ones go afterwards. The trainer's recorder has a context in which the file takes its place.
    """

    def __init__(
        self,
        state: dict[str, Any],
        folder: str,
        names: list[str],
        finite: dict[str, Any],
        trainer: Trainer,
        parts: Parts | None = None,
        in_haste: bool = False,
    ) -> None:
        self.state, self.folder, self.names, self.finite = state, folder, names, finite
        self.config, self.recorded = trainer.config, trainer.recorder.checkpoint
        self.parts = parts  # the tensors, if they go into a folder
        self.in_haste = in_haste  # make no delta
        self.placed: list[str] = []
        self.remarks: list[tuple[str, str]] = []  # events, and what is to be told of them
        self.divided = _divided(trainer) if self.config.model.shard else set()
        self.step, self.best = state["progress"]["global_step"], state["progress"]["best"]
        self.digests: Future[dict[str, bytes]] = Future()  # of this rank's state, or why it can't be saved
        self.allowed: Future[None] = Future()  # all ranks are known to hold the same
        self.written: Future[None] = Future()  # on rank 0
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
        """Compute the digests; refuse a state that has diverged, before a checkpoint is overwritten."""
        _settle(self.digests, self._look)

    def _look(self) -> dict[str, bytes]:
        self._check_finite()
        values = same_on_ranks(self.state)
        parts = {part: collectives.digest_each(of_part) for part, of_part in values.items()}
        combined = {part: collectives.combined(digests).hex() for part, digests in parts.items()}
        self.state["digests"] = combined | {"run": digest_of_run(self.state)}
        # Of what is divided among the ranks, each has a part of its own, and rank 0 the whole.
        for of_part in parts.values():
            for name in self.divided & of_part.keys():
                del of_part[name]
        shared = dict(parts["model"])
        if self.parts:
            self.parts.write()
            shared |= collectives.digest_each(self.parts.shared())
        is_divided = self.config.optimizer.zero
        of_optimizer = parts["optimizer"].items()
        shared |= {name: d for name, d in of_optimizer if not is_divided or name.startswith(SETTINGS)}
        return shared | {f"the average of {name}": digest for name, digest in parts.get("ema", {}).items()}

    def write(self) -> None:
        """Write the file on rank 0, if `look` found nothing wrong. It waits for `allowed`."""
        if collectives.rank() == 0 and self.digests.exception() is None:
            _settle(self.written, self._write)

    def _write(self) -> None:
        try:
            self._place()
        finally:
            remove_unnamed(self.folder)  # also what a full disk has cut short: the next save needs the room

    def _place(self) -> None:
        if self.parts:
            self.allowed.result()
            self.state["parts"] = self.parts.finish()
        files.write(self.state, self.folder, self.names, placing=self._placing, placed=self.placed)
        saving, training = self.config.saving, self.state["training"]
        if saving.keep_deltas and numbered(self.step) in self.placed:
            self._keep_delta(saving.keep_deltas, training)
        if saving.keep:
            files.drop_old(self.folder, saving.keep, training)
        if self.config.scores.keep_best:
            best = [int(step) for _, step in self.state["progress"]["top"]]
            files.drop_worse(self.folder, best, training)

    def _keep_delta(self, every: int, training: str) -> None:
        if not self.in_haste and (failure := files.keep_delta(self.folder, self.step, every, training)):
            text = f"step {self.step} is kept whole, as its delta could not be made: {failure}"
            self.remarks.append(("delta failed", text))
        files.drop_wholes(self.folder, self.step, training)

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        self.allowed.result()
        with self.recorded(self.state):
            if numbered(self.step) in self.names:
                gone = files.drop_built_on(self.folder, self.step, self.state["training"])
                if gone:
                    text = f"removed what was built on another step {self.step}: {', '.join(gone)}"
                    self.remarks.append(("deltas removed", text))
            yield

    def leave(self, patience: float | None = None) -> None:
        """End the thread: let a file that may take its place do so, and remove another.

        It waits for the disk for `patience` seconds; by default as long as it takes.
        """
        if not self.allowed.done():
            self.allowed.set_exception(Abandoned())
        if self._thread is not None:
            self._thread.join(patience)

    def _check_finite(self) -> None:
        """Raise CheckFailed if training has diverged."""
        for name, tensor in self.finite.items():
            # The sum is much faster, and finite only if all values are; but it may overflow where they are.
            if tensor is not None and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
                last = os.path.join(self.folder, LAST)
                before = f"; {last} is from before that" if os.path.exists(last) else ""
                lr = self.config.optimizer.lr
                lower = f"give a smaller --lr{'' if lr is None else f' than {lr:g}'}, or --warmup"
                hint = f"{lower}, or look for NaN in the samples and in the loss{before}"
                what = f"after step {self.step} {name} is NaN or infinite: training has diverged"
                raise CheckFailed(what, hint=hint)


def _divided(trainer: Trainer) -> set[str]:
    """Return the names of what each rank has its own part of: of the model, and of the optimizer's state."""
    optimizer = named_optimizer(trainer.updater.optimizer.state_dict())
    names = {name for name, _ in trainer.ddp.named_parameters(remove_duplicate=False)}
    return names | {name for name, value in optimizer.items() if transport.holds_parts(value)}


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Do some work, and keep its result or its error."""
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


# ---- the copy that is written while training goes on ---------------------------------------------------


class Staging:
    """Copies of a run's state that training does not change; each overwrites the one before.

    Memory that is touched for the first time costs many times what copying into it costs, so the buffers are
    used again. For tensors on a GPU they are pinned, so that it copies at the full speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, bool]] = []  # and whether it was to be pinned

    def copy(self, state: T) -> T:
        """Return a copy of a state on the CPU, which `torch.save` writes as it would write the state there.

        Whole storages are copied, so tensors that share memory share it in the copy, and views stay views.
        Containers are new; strings and numbers are the same objects, on whose identity a pickle depends.
        """
        copies: dict[int, Any] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        on_device: set[torch.device] = set()
        with torch.no_grad():
            for tensor in tensors_of(state):
                storage = tensor.untyped_storage()
                is_new = storage._cdata not in storages
                if is_new:
                    storages[storage._cdata] = self._buffer(storage, len(storages))
                    on_device.add(tensor.device)
                copies[id(tensor)] = copied = _as(tensor, storages[storage._cdata])
                if is_new and _is_whole(tensor, storage):
                    copied.copy_(tensor, non_blocking=tensor.is_cuda)
                elif is_new:
                    _bytes(storages[storage._cdata]).copy_(_bytes(storage), non_blocking=tensor.is_cuda)
        for device in on_device:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        del self._buffers[len(storages) :]
        return copy.deepcopy(state, copies)

    def _buffer(self, storage: torch.UntypedStorage, number: int) -> torch.UntypedStorage:
        """Return memory for the copy of a storage: the buffer of this number, if that has the size."""
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        buffers = self._buffers[number : number + 1]
        if not buffers or (buffers[0][0].numel(), buffers[0][1]) != (size, pinned):
            buffers = [(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), pinned)]
            self._buffers[number : number + 1] = buffers
        return buffers[0][0].untyped_storage()


def _is_whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor's numbers are its whole storage, in order, and copied faster than bytes."""
    plain = tensor.is_floating_point() and tensor.is_contiguous() and not tensor.is_neg()
    return plain and tensor.nbytes == storage.nbytes()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as a tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Return the plain tensors of a state. Others, as parameters and sparse ones, deepcopy copies."""
    strided = (t for t in transport.tensors(value) if type(t) is torch.Tensor and t.layout == torch.strided)
    return (tensor for tensor in strided if not tensor.is_quantized and not tensor.is_meta)


def _as(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor that lies in a storage as `tensor` lies in its own."""
    view = torch.empty(0, dtype=tensor.dtype)
    view = view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = view.requires_grad_(tensor.requires_grad)
    view = view.conj() if tensor.is_conj() else view
    return view._neg_view() if tensor.is_neg() else view


# ---- the saver ---------------------------------------------------------------------------------------

# Only rank 0 writes. With `--save async` training waits only while the state is copied; a thread of each rank
# then computes the digests of its copy, and rank 0's writes the file. The threads send nothing: what they
# have done the ranks tell each other in later steps (`word`, `advance`). A save passes through these states:
#
#     save()                captured, and copied
#       |  digests          on each rank: computed, or why the state must not be saved
#       |  agreed           all ranks hold the same; else RanksDiffer, and no file changes
#       |  allowed          rank 0's file, complete on the disk by now, may take its name
#       |  placed           it has its name, and the others of the same save
#     finish_save()         written; or the disk has refused, which the next save makes good


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

    def __init__(self, trainer: Trainer, folder: str, tell: Tell = lambda *_, **__: None) -> None:
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
        trainer, saving = self.trainer, self.trainer.config.saving
        self._wait_for_last()
        names, step = [LAST] * last + [BEST] * best, trainer.progress.global_step
        names += [numbered(step)] * bool(last and (saving.keep or saving.keep_deltas))
        names += [numbered(step, "best")] * kept
        model = trainer.ddp.module
        # Copies, as the buffers become rank 0's. Others may be infinite on purpose: masks are.
        norms = ((path, layer) for path, layer in model.named_modules() if isinstance(layer, _NormBase))
        buffers = (pair for path, layer in norms for pair in layer.named_buffers(path, False))
        statistics = {name: buffer.clone() for name, buffer in buffers}
        state = capture(trainer)
        if collectives.rank() != 0:  # the others only compare
            state = {part: state[part] for part in COMPARED if part in state}
        parts = None
        if saving.save_parts:
            state, tensors = split_parts(state)
            parts = Parts(tensors, self.folder, step)
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_of(state))
        in_background = saving.save == "async"
        if not trainer.config.model.shard and (in_background or not on_cpu):  # else it is a copy already
            state, statistics = self._staging.copy((state, statistics))
        own = parts.local() if parts else state["model"]
        finite = {name: own.get(f"module.{name}") for name, _ in model.named_parameters()}
        self._pending = save = Save(state, self.folder, names, finite | statistics, trainer, parts, in_haste)
        if in_background:
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
        if self.trainer.config.saving.save == "sync":
            save.write()
        said = collectives.from_rank_zero(lambda: (_failure(save), save.placed, save.remarks))
        failure, placed, remarks = said
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
            self._pending.leave(patience=self.trainer.config.saving.grace)

    def _say(self, event: str, text: str, **fields: Any) -> None:
        self._tell(event, text, self.trainer.progress.global_step, **fields)


def _failure(save: Save) -> FileError | None:
    """Wait for the file on rank 0. Return the error with which the disk refused it."""
    error = save.written.exception()
    if error is not None and not isinstance(error, FileError):
        raise error
    return error
