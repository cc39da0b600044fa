"""Tensors taken out of a structure of dicts, lists and tuples, and put back into it. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


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
