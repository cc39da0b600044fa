"""Tensors from rank to rank as bytes, and tensors in nested values and in parts. Imports torch.

Every function that sends is a collective. Without a process group there is one rank, and nothing is sent.
NCCL carries only what lies on a GPU.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

PLAIN = {bool, int, float, str, type(None)}
"""Types that hold no tensors; the state of a random generator is 625 integers."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in order."""
    return found(value, torch.Tensor)


def found(value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield the values of these kinds in a nested value, in order."""
    if isinstance(value, kinds):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name) for field in dataclasses.fields(value))
    for item in items:
        if type(item) not in PLAIN:
            yield from found(item, kinds)


def mapped(
    value: Any,
    change: Callable[[Any], Any],
    movable: Callable[[Any], Any] | None = None,
    kinds: type | tuple[type, ...] = torch.Tensor,
) -> Any:
    """Return a value with each tensor replaced by what `change` returns; containers keep their types.

    Anything else that has a method `to` is replaced, as a whole, by what `movable` returns, if that is given.

    Args:
        kinds: the types of what is replaced, if not tensors alone.
    """
    if isinstance(value, kinds):
        return change(value)
    if movable is not None and callable(getattr(value, "to", None)) and not isinstance(value, type):
        return movable(value)
    if isinstance(value, Mapping):
        made = {key: mapped(item, change, movable, kinds) for key, item in value.items()}
        try:  # a mapping's own type, if it is made from a dict, as transformers' outputs are
            return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
        except TypeError:
            return made
    if isinstance(value, list | tuple):
        items = [mapped(item, change, movable, kinds) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        parts = {name: mapped(getattr(value, name), change, movable, kinds) for name in names}
        return dataclasses.replace(value, **parts)
    return value


def moved(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with its tensors on a device, copied without waiting where memory is pinned.

    What else has a method `to`, such as torch's PackedSequence or a batch of graphs, moves itself.
    """
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True), lambda own: own.to(device))


# ---- The ranks


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


# ---- Sending


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
    """Send rank 0's tensor, of any dtype and strides, to the other ranks, which use `ReceivingTensors`."""
    if world_size() > 1:
        dist.broadcast(as_bytes(tensor).to(device()), src=0)


def begin_broadcast(data: torch.Tensor, source: int) -> dist.Work:
    """Begin to overwrite a tensor with that of rank `source`, where it lies; wait for the work to finish."""
    work = dist.broadcast(data, source, async_op=True)
    assert work is not None  # torch returns None only to a rank that is not a member of the group
    return work


# ---- Tensors and values as bytes


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

    def persistent_load(self, described: tuple[torch.dtype, tuple[int, ...]]) -> torch.Tensor:
        """Return, on the CPU, the tensor that rank 0 sends by `broadcast_tensor`."""
        dtype, shape = described
        received = torch.empty(shape, dtype=dtype)
        data = received.reshape(-1).view(torch.uint8).to(device())
        dist.broadcast(data, src=0)
        return data.cpu().view(dtype).reshape(shape)


# ---- Tensors divided among ranks, as by FSDP2: put together, and divided again


def whole(state: Any) -> Any:
    """Return a copy of a state on the CPU of rank 0, in which divided tensors are whole. A collective.

    The other ranks get copies of what is not divided, and lack the rest. One tensor at a time is sent, to all
    ranks. A tensor with two names stays one.

    Args:
        state: dicts, lists and tuples of tensors and plain values, with divided ones as values of dicts.
    """
    copies: dict[int, torch.Tensor | None] = {}

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = _whole(value)
            return copies[id(value)]
        if isinstance(value, dict):
            made = copy.copy(value)  # keeps its class, and the `_metadata` of a module's state
            made.clear()
            made.update((key, of(item)) for key, item in value.items())
            for key in [key for key, item in value.items() if made[key] is None and item is not None]:
                del made[key]
            return made
        return type(value)(map(of, value)) if isinstance(value, list | tuple) else value

    return of(state)


def _whole(tensor: torch.Tensor) -> torch.Tensor | None:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    moved = tensor.to(device())  # NCCL sends from a GPU
    together: torch.Tensor = moved.full_tensor()  # type: ignore[attr-defined]
    return together.to("cpu", copy=True) if rank() == 0 else None


def holds_parts(value: Any) -> bool:
    """Return whether a value is a divided tensor, or has some in it."""
    return any(True for _ in found(value, DTensor))


def part_like(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, divided as `own` is. Sends nothing: all have the whole.

    It is the tensor itself if `own` is not divided, or has another shape.
    """
    if isinstance(tensor, DTensor) or not isinstance(own, DTensor) or own.shape != tensor.shape:
        return tensor
    # Without the copy the part would keep the memory of the whole.
    return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None).clone()
