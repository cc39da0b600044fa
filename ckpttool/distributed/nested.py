"""Tensors in nested batches: tuples, lists, mappings and dataclasses of them. Imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

PLAIN = {bool, int, float, str, type(None)}
"""Types that hold no tensors; the state of a random generator is 625 integers."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in order."""
    return found(value, torch.Tensor)


def found(value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield what is of these kinds in a value, in order."""
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
        return _like(value, {key: mapped(item, change, movable, kinds) for key, item in value.items()})
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


def _like(mapping: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """Return a dict as a mapping's own type if that can be made from one, as transformers' outputs can."""
    if type(mapping) is dict:
        return made
    try:
        return type(mapping)(made)  # type: ignore[call-arg]
    except TypeError:
        return made
