"""What a state has under each name: shape, type and ties. A file gives it, or a live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...checkpoint.special_tensors import require_plain
from ...checkpoint.state import State


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a model's state dict."""

    shape: tuple[int, ...] | None  # None where any value fits: `_extra_state`, and lazy parameters
    dtype: str  # as `float32`; "" where there is none
    first: str  # the first name of the same memory: another than its own for a tied parameter
    file: str = ""  # the file that it lies in, of those of a folder


Places = Mapping[str, Place]


def places_of(path: str, state: State) -> dict[str, Place]:
    """Return the places of a file's state, in its order. Raises Refused where a tensor is not a plain one."""
    require_plain(path, state.likes, "can't be brought under other names")
    first: dict[tuple[object, ...], str] = {}
    return {
        name: Place(
            tensor.shape,
            tensor.dtype.name,
            first.setdefault(tensor.view, name) if tensor.numel else name,
            tensor.storage.data.path,
        )
        for name, tensor in state.tensors.items()
    }
