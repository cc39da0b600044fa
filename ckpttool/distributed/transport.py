"""Bytes from rank to rank, over gloo and over NCCL, which carries only what lies on a GPU. Imports torch.

Every function that sends is a collective. Without a process group there is one rank, and nothing is sent.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if _has_group() else 1


def device() -> torch.device:
    """Return the device on which a tensor must lie to be sent."""
    if _has_group() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


# torch 2.14 renamed it, and warns of the older name.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---- sending -------------------------------------------------------------------------------------------


def gather_bytes(message: bytes) -> list[bytes]:
    """Return every rank's message, in rank order, on every rank. All messages must have the same length."""
    if world_size() == 1:
        return [message]
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device())
    received = torch.empty(world_size() * len(message), dtype=torch.uint8, device=own.device)
    all_gather_tensor(received, own)
    joined, length = to_bytes(received), len(message)
    return [joined[start : start + length] for start in range(0, len(joined), length)]


def broadcast_bytes(payload: bytes, source: int) -> bytes:
    """Return the payload of rank `source`, of any length, on every rank."""
    if world_size() == 1:
        return payload
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device())
    dist.broadcast(length, src=source)
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    if rank() == source:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    data = data.to(device())
    dist.broadcast(data, src=source)
    return payload if rank() == source else to_bytes(data)


def broadcast_tensor(tensor: torch.Tensor) -> None:
    """Send rank 0's tensor to the other ranks, which call `receive_tensor`. Any dtype and strides will do."""
    if world_size() > 1:
        dist.broadcast(as_bytes(tensor).to(device()), src=0)


def receive_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return, on the CPU, the tensor that rank 0 sends by `broadcast_tensor`."""
    received = torch.empty(shape, dtype=dtype)
    data = received.reshape(-1).view(torch.uint8).to(device())
    dist.broadcast(data, src=0)
    return data.cpu().view(dtype).reshape(shape)


def begin_broadcast(data: torch.Tensor, source: int) -> dist.Work:
    """Begin to overwrite a tensor with that of rank `source`, where it lies; wait for the work to finish."""
    work = dist.broadcast(data, source, async_op=True)
    assert work is not None  # torch returns None only to a rank that is not a member of the group
    return work


# ---- tensors and values as bytes -----------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor's values as a flat uint8 tensor on the same device, row by row."""
    require_plain(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One value or none is contiguous whatever its stride, but torch views only a stride of 1 as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def require_plain(tensor: torch.Tensor) -> None:
    """Raise TypeError if a tensor's values are not plain bytes: sparse, quantized, or on the meta device."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise TypeError(f"a {kind} tensor can't be sent or compared as bytes")


def memory_of(data: torch.Tensor) -> Any:
    """Return a buffer over the memory of a uint8 tensor on the CPU, without a copy."""
    return (ctypes.c_char * data.numel()).from_address(data.data_ptr())


def to_bytes(data: torch.Tensor) -> bytes:
    """Return the contents of a uint8 tensor."""
    local = data.cpu()
    return bytes(memory_of(local)) if local.numel() else b""


def pickle_without_tensors(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a value pickled with only the dtype and shape of each tensor, and the tensors in that order."""
    file, tensors = io.BytesIO(), list[torch.Tensor]()

    class WithoutTensors(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return None
            require_plain(value)  # here, before the other ranks wait for it
            tensors.append(value)
            return value.dtype, tuple(value.shape)

    WithoutTensors(file).dump(value)
    return file.getvalue(), tensors


class ReceivingTensors(pickle.Unpickler):
    """Loads the value of `pickle_without_tensors`, and receives its tensors on the way."""

    def persistent_load(self, described: Any) -> torch.Tensor:
        return receive_tensor(*described)
