"""Tensors of which each rank has a part, as of FSDP2: put together, and divided again. Imports torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from . import nested, transport


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
            made = copy.copy(
                value
            )  # of its own kind, with the versions that a module's state has as `_metadata`
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
    moved = tensor.to(transport.device())  # NCCL sends from a GPU
    together: torch.Tensor = moved.full_tensor()  # type: ignore[attr-defined]
    return together.to("cpu", copy=True) if transport.rank() == 0 else None


def holds_parts(value: Any) -> bool:
    """Return whether a value is a divided tensor, or has some in it."""
    return any(True for _ in nested.found(value, DTensor))


def part_like(tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, divided as `own` is. Sends nothing: all have the whole.

    It is the tensor itself if `own` is not divided, or has another shape.
    """
    if isinstance(tensor, DTensor) or not isinstance(own, DTensor) or own.shape != tensor.shape:
        return tensor
    # Without the copy the part would keep the memory of the whole.
    return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None).clone()
