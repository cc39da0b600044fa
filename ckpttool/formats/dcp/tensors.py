"""Tensors read one by one while torch's library writes a DCP folder. Imports torch."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...tensors.ref import TensorRef, contiguous_stride
from ...tensors.to_torch import has_to_be_made, loaded_tensor, torch_dtype


class TensorsRead(DefaultSavePlanner):
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


class OneFile(FileSystemWriter):
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
