"""Copies of a run's state that training does not change, in memory that is used again. Imports torch.

A save that is written while training goes on needs the state as it was at the end of a step. Memory that is
touched for the first time costs many times what copying into it costs, so the buffers are kept from one save
to the next. For tensors on a GPU they are pinned, so that it copies at the full speed of the bus.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Staging:
    """Buffers for copies of a state; each copy overwrites the one before."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, bool]] = []  # and whether it was to be pinned

    def copy(self, state: T) -> T:
        """Return a copy of a state on the CPU, which `torch.save` writes as it would write the state there.

        Whole storages are copied, so tensors that share memory share it in the copy, and views stay views.
        Containers are new; strings and numbers are the same objects, on whose identity a pickle depends.

        Args:
            state: dicts, lists and tuples of primitives and tensors.
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
        kept = self._buffers[number : number + 1]
        if not kept or kept[0][0].numel() != size or kept[0][1] != pinned:
            kept = [(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), pinned)]
            self._buffers[number : number + 1] = kept
        return kept[0][0].untyped_storage()


def _is_whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor's numbers are its whole storage, in order, and copied faster than bytes."""
    plain = tensor.is_floating_point() and tensor.is_contiguous() and not tensor.is_neg()
    return plain and tensor.nbytes == storage.nbytes()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as a tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_on_cpu(state: Any) -> bool:
    """Return whether all tensors of a state lie in the memory of the CPU."""
    return all(tensor.device.type == "cpu" for tensor in tensors_of(state))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a state. Others, as parameters and sparse ones, deepcopy copies."""
    if type(value) is torch.Tensor:
        if value.layout == torch.strided and not value.is_quantized and not value.is_meta:
            yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def _as(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor that lies in a storage as `tensor` lies in its own."""
    found = torch.empty(0, dtype=tensor.dtype)
    found = found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    found = found.requires_grad_(tensor.requires_grad)
    found = found.conj() if tensor.is_conj() else found
    return found._neg_view() if tensor.is_neg() else found
