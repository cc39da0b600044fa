"""torch tensors that view files. Imports torch when it is called."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from ..errors import Unsupported
from .dtypes import DTYPES
from .ref import ByteRange, Computed, TensorRef
from .values import require_bounded, stream

if TYPE_CHECKING:
    import torch


def live_tensors(tensors: Mapping[str, TensorRef]) -> dict[str, torch.Tensor]:
    """Return torch tensors that view the file through a private mapping: nothing is read until it is used.

    Tensors that share a storage in the file share memory here. Values that are not plain bytes of the file
    (lazy bits, big-endian, computed, misaligned) are read at once.

    Args:
        tensors: name -> tensor, any layout.

    Returns:
        name -> torch tensor of the same dtype, shape and stride, on the CPU.

    Raises:
        Unsupported: an element type that this torch does not have.
        Refused: a tensor that must be read expands its storage by more than 1 GiB.
        Damaged: a file that must be read ends early.
    """
    import torch

    maps: dict[int, mmap.mmap] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        dtype = _torch_dtype(name, tensor)
        data = tensor.storage.data
        if not tensor.numel:
            made[name] = torch.empty(tensor.shape, dtype=dtype)
        elif tensor.conj or tensor.neg or tensor.is_swapped or not _mappable(data, tensor):
            require_bounded(name, tensor)
            raw = b"".join(bytes(chunk) for chunk in stream(tensor))
            made[name] = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tensor.shape)
        else:
            key = id(tensor.storage)
            if key not in storages:
                storages[key] = _mapped(data, maps)
            empty = torch.empty(0, dtype=dtype)
            made[name] = empty.set_(storages[key], tensor.offset, tensor.shape, tensor.stride)
    return made


def _torch_dtype(name: str, tensor: TensorRef) -> torch.dtype:
    import torch

    dtype = getattr(torch, tensor.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or tensor.dtype.name not in DTYPES:
        raise Unsupported(
            tensor.storage.data.path, f"this torch has no type {tensor.dtype.name}, which '{name}' has"
        )
    return dtype


def _mappable(data: ByteRange | Computed, tensor: TensorRef) -> TypeGuard[ByteRange]:
    """Return whether the file can be mapped as the tensor: its bytes are there, aligned to the elements."""
    return isinstance(data, ByteRange) and data.offset % tensor.dtype.part == 0


def _mapped(data: ByteRange, maps: dict[int, mmap.mmap]) -> torch.UntypedStorage:
    """Return a storage over a mapping of its file; writing to it changes memory, never the file."""
    import torch

    if id(data.source) not in maps:
        maps[id(data.source)] = mmap.mmap(data.source.fd, 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(maps[id(data.source)], dtype=torch.uint8, count=data.nbytes, offset=data.offset)
    return whole.untyped_storage()
