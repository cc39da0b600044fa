"""How a state fits a model: names, shapes and kinds compared, without a value.

A `Blueprint` is what a model's `state_dict()` asks for. Making one of a live module imports torch; comparing
does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...checkpoint.checkpoint import State
from ...tensors.ref import TensorRef

if TYPE_CHECKING:
    import torch

COUNTER = "num_batches_tracked"
"""BatchNorm's counter: torch adds it to states from before version 2 of the module."""

SHOWN = 3
"""Names of a kind that a message shows; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a model has under one name.

    Attributes:
        shape: None for what takes any value: `_extra_state`, and a parameter whose shape is the file's.
        dtype: element type, as `float32`; `""` where there is none.
        first: the first name of the same memory: another one for a tied parameter.
    """

    shape: tuple[int, ...] | None
    dtype: str
    first: str


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a model's state dict asks for.

    Attributes:
        places: name -> what is there, in the order of `state_dict()`.
        parameters: names of the parameters in the order in which optimizers number them.
        norms: paths of the BatchNorm layers of any kind.
    """

    places: Mapping[str, Place]
    parameters: tuple[str, ...]
    norms: tuple[str, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Blueprint:
        """The blueprint of a live module. Imports torch."""
        from torch.nn.modules.batchnorm import _NormBase

        places: dict[str, Place] = {}
        first: dict[tuple[object, ...], str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            shape, dtype = _shape(value), str(getattr(value, "dtype", "")).removeprefix("torch.")
            places[name] = Place(shape, dtype, first.setdefault(_memory(name, value), name))
        norms = tuple(path for path, module in model.named_modules() if isinstance(module, _NormBase))
        return cls(places, tuple(name for name, _ in model.named_parameters()), norms)


def _shape(value: Any) -> tuple[int, ...] | None:
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _memory(name: str, value: Any) -> tuple[object, ...]:
    """What two names of one tensor have in common; there is no address to compare on the meta device."""
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value) or not value.numel():
        return (name,)
    if value.is_meta:
        return (id(value),)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


@dataclass(frozen=True, slots=True)
class Fit:
    """What keeps a state from loading strictly.

    Attributes:
        missing: names of the model that the file lacks.
        unexpected: names of the file that the model does not have.
        mismatched: (name, what the file has, what the model has) of another shape, or complex into real.
        added: BatchNorm's counters that the file lacks and torch adds.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    added: tuple[str, ...] = ()

    @property
    def distance(self) -> int:
        """How many names, of the file and of the model, are in the way of a strict load; 0 for none."""
        return len(self.missing) + len(self.unexpected) + 2 * len(self.mismatched)

    def __str__(self) -> str:
        """`2 missing (a, b); 1 of another shape or type (w [10, 4] in the file, [5, 4] in the model)`"""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing ({shortened(self.missing)})")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected ({shortened(self.unexpected)})")
        if self.mismatched:
            shapes = [
                f"{name} {theirs} in the file, {mine} in the model" for name, theirs, mine in self.mismatched
            ]
            parts.append(f"{len(self.mismatched)} of another shape or type ({shortened(tuple(shapes))})")
        return "; ".join(parts)


def shortened(names: tuple[str, ...]) -> str:
    """The first few names, and how many more."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def compare(state: State, blueprint: Blueprint) -> Fit:
    """How a state, under the names it has, fits a model: what `load_state_dict(strict=True)` would find."""
    places = blueprint.places
    absent = [
        name
        for name, place in places.items()
        if name not in state.tensors and not (place.shape is None and name in state.others)
    ]
    without = _without_counters(state, blueprint)
    return Fit(
        missing=tuple(name for name in absent if name not in without),
        unexpected=tuple(name for name in (*state.tensors, *state.others) if name not in places),
        mismatched=tuple(
            (name, *differs)
            for name, tensor in state.tensors.items()
            if name in places and (differs := _differs(tensor, places[name]))
        ),
        added=tuple(name for name in absent if name in without),
    )


def _differs(tensor: TensorRef, place: Place) -> tuple[str, str] | None:
    """What a tensor of the file and its place in the model are, when the one can't be copied to the other."""
    if place.shape is None:
        return None
    from_before_scalars = (
        tensor.shape == (1,) and place.shape == ()
    )  # torch 0.3 had none, and torch allows for it
    if tensor.shape != place.shape and not from_before_scalars:
        return str(list(tensor.shape)), str(list(place.shape))
    if "complex" in tensor.dtype.name and "complex" not in place.dtype:  # torch would drop the imaginary part
        return tensor.dtype.name, place.dtype
    return None


def _without_counters(state: State, blueprint: Blueprint) -> set[str]:
    """The counters that torch adds itself: of norms saved before version 2, or without a version."""
    names = set()
    for path in blueprint.norms:
        entry = (state.versions or {}).get(path)
        version = entry.get("version") if isinstance(entry, dict) else None
        if not isinstance(version, int) or version < 2:
            names.add(f"{path}.{COUNTER}" if path else COUNTER)
    return names
