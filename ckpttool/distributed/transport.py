"""Bytes from rank to rank, over gloo and over NCCL, which carries only what lies on a GPU. Imports torch.

Each function except those of only one rank is a collective: every rank calls it, in the same order. Without a
process group there is one rank, which sends nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's number, 0 without a process group."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """How many ranks there are, 1 without a process group."""
    return dist.get_world_size() if _grouped() else 1


def device() -> torch.device:
    """Where a tensor must lie to be sent."""
    if _grouped() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def of_all(message: bytes) -> list[bytes]:
    """Every rank's message, in rank order, on every rank; all are of one length."""
    if world_size() == 1:
        return [message]
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device())
    received = torch.empty(world_size() * len(message), dtype=torch.uint8, device=own.device)
    dist.all_gather_into_tensor(received, own)
    whole, length = copied(received), len(message)
    return [whole[start : start + length] for start in range(0, len(whole), length)]


def send(payload: bytes, source: int) -> bytes:
    """The payload of one rank, of any length, on every rank."""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device())
    dist.broadcast(length, src=source)
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    if rank() == source:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    data = data.to(device())
    dist.broadcast(data, src=source)
    return payload if rank() == source else copied(data)


def begin_sending(data: torch.Tensor, source: int) -> dist.Work:
    """Overwrites a tensor, where it lies, with that of one rank; done when the work has been waited for."""
    work = dist.broadcast(data, source, async_op=True)
    assert work is not None  # torch returns None only to a rank that is not a member of the group
    return work


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a flat uint8 tensor on their own device, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One value or none counts as contiguous whatever its stride, and torch views only a stride of 1 as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def memory(data: torch.Tensor) -> Any:
    """A buffer over a uint8 tensor's memory. Torch's own way to one needs numpy, which may be absent."""
    return (ctypes.c_char * data.numel()).from_address(data.data_ptr())


def copied(data: torch.Tensor) -> bytes:
    """What a uint8 tensor holds."""
    local = data.cpu()
    return bytes(memory(local)) if local.numel() else b""


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


class Place(NamedTuple):
    """Stands for a tensor in a structure that is sent without its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The structure with a Place for each tensor, which is moved to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Place(value.dtype, tuple(value.shape))
    if isinstance(value, Mapping):
        return {key: take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(take_out(item, tensors) for item in value)
    return value


def places(value: Any) -> Iterator[Place]:
    """Those in a structure, in the order in which `take_out` moved the tensors."""
    if isinstance(value, Place):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from places(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from places(item)


def put_back(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The structure with the next tensor in each Place."""
    if isinstance(value, Place):
        return next(tensors)
    if isinstance(value, dict):
        return {key: put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(put_back(item, tensors) for item in value)
    return value
