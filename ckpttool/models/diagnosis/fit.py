"""Compare a state with a model by names, shapes and types, without reading values.

`Blueprint.of` imports torch; the comparison does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...checkpoint.state import State
from ...tensors.ref import TensorRef

if TYPE_CHECKING:
    import torch

COUNTER = "num_batches_tracked"
"""BatchNorm's counter: torch adds it to states that were saved before version 2 of the module."""

SHOWN = 3
"""How many names a message shows; it counts the rest."""


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a model's state dict.

    Attributes:
        shape: None where any value fits: `_extra_state`, and lazy parameters.
        dtype: element type, as `float32`; `""` where there is none.
        first: the first name of the same memory; another name than its own for a tied parameter.
    """

    shape: tuple[int, ...] | None
    dtype: str
    first: str


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The names, shapes and types of a model's state dict.

    Attributes:
        places: name -> entry, in the order of `state_dict()`.
        parameters: names of the parameters in the order in which optimizers number them.
        norms: paths of the BatchNorm layers of any kind.
    """

    places: Mapping[str, Place]
    parameters: tuple[str, ...]
    norms: tuple[str, ...]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Blueprint:
        """Return the blueprint of a live module. Imports torch."""
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
    """Return a key that is equal for two names of one tensor; on the meta device there is no address."""
    import torch

    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value) or not value.numel():
        return (name,)
    if value.is_meta:
        return (id(value),)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype


@dataclass(frozen=True, slots=True)
class Fit:
    """The differences that keep a state from loading strictly.

    Attributes:
        missing: names of the model that the file lacks.
        unexpected: names of the file that the model does not have.
        mismatched: (name, shape in the file, shape in the model), or both dtypes for complex into real.
        added: BatchNorm's counters that the file lacks and torch adds; they keep nothing from loading.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    added: tuple[str, ...] = ()

    @property
    def distance(self) -> int:
        """The number of names, of the file and of the model, that keep the state from loading strictly."""
        return len(self.missing) + len(self.unexpected) + 2 * len(self.mismatched)

    def __str__(self) -> str:
        """Return `2 missing (a, b); 1 of another shape or type (w [9] in the file, [5] in the model)`."""
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
    """Return the first few names, and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def compare(state: State, blueprint: Blueprint) -> Fit:
    """Return what `load_state_dict(strict=True)` would find wrong with a state, under the names it has."""
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
    """Return both shapes, or both dtypes, if a tensor can't be copied to its place in the model."""
    if place.shape is None:
        return None
    is_scalar = (
        tensor.shape == (1,) and place.shape == ()
    )  # torch 0.3 had no scalars; load_state_dict converts
    if tensor.shape != place.shape and not is_scalar:
        return str(list(tensor.shape)), str(list(place.shape))
    if "complex" in tensor.dtype.name and "complex" not in place.dtype:  # torch would drop the imaginary part
        return tensor.dtype.name, place.dtype
    return None


def _without_counters(state: State, blueprint: Blueprint) -> set[str]:
    """Return the counters that torch adds by itself: of norms saved before version 2 or without a version."""
    names = set()
    for path in blueprint.norms:
        entry = (state.versions or {}).get(path)
        version = entry.get("version") if isinstance(entry, dict) else None
        if not isinstance(version, int) or version < 2:
            names.add(f"{path}.{COUNTER}" if path else COUNTER)
    return names
