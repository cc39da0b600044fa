"""torch tensors that view files. Imports torch when it is called."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import Unsupported
from .. import system
from .ref import DTYPES, ByteRange, Computed, TensorRef
from .values import require_bounded, stream

if TYPE_CHECKING:
    import torch


def live_tensors(tensors: Mapping[str, TensorRef], *, mapped: bool = True) -> dict[str, torch.Tensor]:
    """Return torch tensors that view the file through a private mapping; bytes are read on first use.

    If the file becomes shorter, SIGBUS kills a process that uses the mapping. Not `mapped`, the bytes are
    read at once, and so are values that must be computed or lie at an odd place. Tensors that share a storage
    in the file share memory here. Raises Unsupported, Refused and Damaged as `loaded_tensor` does.
    """
    import torch

    maps: dict[int, mmap.mmap] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        dtype = torch_dtype(name, tensor)
        data = tensor.storage.data
        if not tensor.numel:
            made[name] = torch.empty(tensor.shape, dtype=dtype)
        elif not isinstance(data, ByteRange) or has_to_be_made(tensor) or data.offset % tensor.dtype.part:
            made[name] = loaded_tensor(name, tensor)
        else:
            key = id(tensor.storage)
            if key not in storages:
                can_be = mapped and data.source.is_local and system.REPLACES_MAPPED
                storages[key] = _mapped(data, maps) if can_be else _read(data)
            empty = torch.empty(0, dtype=dtype)
            made[name] = empty.set_(storages[key], tensor.offset, tensor.shape, tensor.stride)
    return made


def loaded_tensor(name: str, tensor: TensorRef) -> torch.Tensor:
    """Return a torch tensor read into new memory, with the same strides where it can be.

    Raises Unsupported for a type that this torch lacks, Refused for a view that repeats its storage by more
    than 1 GiB, Damaged for a file that ends early.
    """
    import torch

    dtype = torch_dtype(name, tensor)
    if not tensor.numel:
        return torch.empty(tensor.shape, dtype=dtype)
    if has_to_be_made(tensor):
        require_bounded(name, tensor)
        raw, at = bytearray(tensor.nbytes), 0
        for chunk in stream(tensor):  # of bounded size, as each is made in memory of its own
            raw[at : at + len(chunk)] = chunk
            at += len(chunk)
        return torch.frombuffer(raw, dtype=dtype).reshape(tensor.shape)
    data = tensor.storage.data
    assert isinstance(data, ByteRange)
    begin, end = tensor.span
    storage = _read(data.part(begin, end - begin))
    return torch.empty(0, dtype=dtype).set_(storage, 0, tensor.shape, tensor.stride)


def has_to_be_made(tensor: TensorRef) -> bool:
    """Return whether a tensor's values must be computed; once made, they have no gaps."""
    return tensor.conj or tensor.neg or tensor.is_swapped or isinstance(tensor.storage.data, Computed)


def torch_dtype(name: str, tensor: TensorRef) -> torch.dtype:
    """Return torch's element type of a tensor."""
    import torch

    dtype = getattr(torch, tensor.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or tensor.dtype.name not in DTYPES:
        reason = f"this torch has no type {tensor.dtype.name}, which '{name}' has"
        raise Unsupported(tensor.storage.data.path, reason)
    return dtype


def _mapped(data: ByteRange, maps: dict[int, mmap.mmap]) -> torch.UntypedStorage:
    """Return a storage over a mapping of its file; writing to it changes memory, never the file."""
    import torch

    if id(data.source) not in maps:
        maps[id(data.source)] = mmap.mmap(data.source.fd, 0, access=mmap.ACCESS_COPY)
    mapping = maps[id(data.source)]
    data_bytes = torch.frombuffer(mapping, dtype=torch.uint8, count=data.nbytes, offset=data.offset)
    return data_bytes.untyped_storage()


def _read(data: ByteRange) -> torch.UntypedStorage:
    import torch

    raw = bytearray(data.nbytes)
    data.source.fill(data.offset, memoryview(raw))
    return torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
