"""One checkpoint on its way to the disk: its copy in memory, its digests, and its file. Imports torch."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ckpttool.distributed import collectives, divided, nested
from ckpttool.errors import CheckFailed
from train.checkpoint import deltas
from train.checkpoint import files as checkpoint_files
from train.checkpoint.format import SETTINGS, digest_of_run, named_optimizer, same_on_ranks
from train.checkpoint.parts import Parts, remove_unnamed
from train.trainer.trainer import Trainer

T = TypeVar("T")

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
        self.divided = _divided(trainer) if self.config.shard else set()
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
        of_optimizer = parts["optimizer"].items()
        shared |= {name: d for name, d in of_optimizer if not self.config.zero or name.startswith(SETTINGS)}
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
        checkpoint_files.write(self.state, self.folder, self.names, placing=self._placing, placed=self.placed)
        if self.config.keep_deltas and self._numbered in self.placed:
            self._keep_delta()
        if self.config.keep:
            checkpoint_files.drop_old(self.folder, self.config.keep, self.state["training"])
        if self.config.keep_best:
            best = [int(step) for _, step in self.state["progress"]["top"]]
            checkpoint_files.drop_worse(self.folder, best, self.state["training"])

    def _keep_delta(self) -> None:
        training, every = self.state["training"], self.config.keep_deltas
        if not self.in_haste and (failure := deltas.keep_delta(self.folder, self.step, every, training)):
            text = f"step {self.step} is kept whole, as its delta could not be made: {failure}"
            self.remarks.append(("delta failed", text))
        deltas.drop_wholes(self.folder, self.step, training)

    @property
    def _numbered(self) -> str:
        return checkpoint_files.numbered(self.step)

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        self.allowed.result()
        with self.recorded(self.state):
            if self._numbered in self.names:
                gone = deltas.drop_built_on(self.folder, self.step, self.state["training"])
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
                last = os.path.join(self.folder, checkpoint_files.LAST)
                before = f"; {last} is from before that" if os.path.exists(last) else ""
                than = "" if self.config.lr is None else f" than {self.config.lr:g}"
                lower = f"give a smaller --lr{than}, or --warmup"
                hint = f"{lower}, or look for NaN in the samples and in the loss{before}"
                what = f"after step {self.step} {name} is NaN or infinite: training has diverged"
                raise CheckFailed(what, hint=hint)


def _divided(trainer: Trainer) -> set[str]:
    """Return the names of what each rank has its own part of: of the model, and of the optimizer's state."""
    optimizer = named_optimizer(trainer.updater.optimizer.state_dict())
    names = {name for name, _ in trainer.ddp.named_parameters(remove_duplicate=False)}
    return names | {name for name, value in optimizer.items() if divided.holds_parts(value)}


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
    strided = (t for t in nested.tensors(value) if type(t) is torch.Tensor and t.layout == torch.strided)
    return (tensor for tensor in strided if not tensor.is_quantized and not tensor.is_meta)


def _as(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor that lies in a storage as `tensor` lies in its own."""
    view = torch.empty(0, dtype=tensor.dtype)
    view = view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = view.requires_grad_(tensor.requires_grad)
    view = view.conj() if tensor.is_conj() else view
    return view._neg_view() if tensor.is_neg() else view
