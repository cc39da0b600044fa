"""Writing DCP folders with torch's own library, each tensor read from its file when it is written.

A file that is mapped would kill the process with SIGBUS if another one cut it short meanwhile. Imports torch.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from io import BytesIO
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.dotted_names import dotted
from ..core.inert_pickle.values import Global, OrderedDict_, Record, tensor_of, walk
from ..core.tensors.ref import TensorRef, contiguous_stride
from ..core.tensors.values import has_to_be_made, live_tensors, loaded_tensor, torch_dtype
from ..errors import Refused
from .reading import check, inside, name_of, torch_size

PICKLED = (tuple, set, frozenset)


def write(checkpoint: Checkpoint, folder: str) -> None:
    """Write the whole tree with torch's own library."""
    check(checkpoint)
    assert isinstance(checkpoint.tree, dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without a process group, and of experimental types
        planner = _TensorsRead()
        live = _Live(checkpoint, planner)
        state = {name_of(key): live.value(item) for key, item in checkpoint.tree.items()}
        try:
            save(state, storage_writer=_OneFile(folder), planner=planner, no_dist=True)
        except CheckpointException as failed:
            fault = next(fault for fault, _ in failed.failures.values())
            if isinstance(fault, RuntimeError):  # of torch: it has no memory left, say
                said = f"torch could not write it as DCP: {str(fault).splitlines()[0]}"
                raise Refused(checkpoint.path, said) from None
            if isinstance(fault, ValueError):  # two paths that are one when they are joined with dots
                raise Refused(checkpoint.path, str(fault), hint="write a .pt file instead") from None
            raise fault from None


class _Live:
    """Makes of inert values what torch's library takes, of a tensor that it names one without values."""

    def __init__(self, checkpoint: Checkpoint, planner: _TensorsRead) -> None:
        self.named = {id(tensor): planner.placeholder(name, tensor) for name, tensor in checkpoint.tensors()}
        # DCP pickles tuples and sets whole.
        whole = [
            (dotted(path), value) for path, value in checkpoint.named(inside) if isinstance(value, PICKLED)
        ]
        within = [(name, tensor_of(item)) for name, value in whole for item in walk([value])]
        pickled = {f"{name} ({number})": tensor for number, (name, tensor) in enumerate(within) if tensor}
        made = live_tensors(pickled, mapped=False)
        self.pickled = {id(tensor): made[name] for name, tensor in pickled.items()}

    def value(self, value: object, *, pickled: bool = False) -> object:
        tensor = tensor_of(value)
        if tensor is not None:
            return (self.pickled if pickled else self.named)[id(tensor)]
        pickled = pickled or isinstance(value, PICKLED)
        if isinstance(value, dict):
            made = {key: self.value(item, pickled=pickled) for key, item in value.items()}
            return OrderedDict(made) if isinstance(value, OrderedDict_) else made
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(self.value(item, pickled=pickled) for item in value)
        if isinstance(value, Global):  # an element type or a size: `check` lets nothing else pass
            return getattr(torch, value.name)
        return torch.Size(torch_size(value)) if isinstance(value, Record) else value


class _TensorsRead(DefaultSavePlanner):
    """A plan of what is saved, whose tensors have their values only while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[str, TensorRef]] = {}

    def placeholder(self, name: str, tensor: TensorRef) -> torch.Tensor:
        """Return a tensor without values, to be saved in the place of this one."""
        dtype = torch_dtype(name, tensor)
        made = has_to_be_made(tensor) or not tensor.numel
        stride = contiguous_stride(tensor.shape) if made else tensor.stride
        empty = torch.empty_strided(tensor.shape, stride, dtype=dtype, device="meta")
        self._tensors[id(empty)] = name, tensor
        return empty

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return an object that is saved; a tensor with its values."""
        found = super().lookup_object(index)
        known = self._tensors.get(id(found))
        return found if known is None else loaded_tensor(*known)


class Writer(FileSystemWriter):
    """Torch's writer, but what it writes does not say where and when that was."""

    def storage_meta(self) -> StorageMeta:
        """Return nothing known, in place of the folder's path and a random number."""
        return StorageMeta()


class _OneFile(Writer):
    """Writes one file, and forgets each tensor when it is written, which torch's writer does not."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is planned as torch's writer does: what is no tensor, then the tensors without gaps."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with open(os.path.join(self.path, name), "xb") as file:
            for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                start = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, BytesIO):
                    file.write(data.getbuffer())
                else:
                    _save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)
                nbytes = file.tell() - start
                results.append(WriteResult(item.index, nbytes, _StorageInfo(name, start, nbytes)))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _KeepsError:
    """A file that keeps the first error of its writes."""

    def __init__(self, file: BinaryIO) -> None:
        self.flush = file.flush
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    """Save a tensor; raise the full disk or the signal of which torch's C++ writer says nothing."""
    target = _KeepsError(file)
    try:
        torch.save(tensor, target)  # type: ignore[arg-type]
    except RuntimeError:
        if target.error is None:
            raise
        raise target.error from None
