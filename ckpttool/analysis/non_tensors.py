"""Everything in a checkpoint that is not a tensor, in rows of name, type and value."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dotted_names import Entry, dotted, entries
from ..checkpoint.pickled_modules import is_module, own_attributes
from ..checkpoint.rebuilt_tensors import special_tensor
from ..checkpoint.state import State
from ..inert_pickle.known_names import UNDERSTOOD
from ..inert_pickle.values import MAX_DEPTH, Global, OrderedDict_, Record, container_name, tensor_of
from ..tensors.dtypes import DTYPES
from ..tensors.ref import TensorRef

MAX_ITEMS = 16
"""The most plain values that a list shows."""

SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")

NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i4": "i", "i8": "q", "u4": "I", "u8": "Q"}
"""NumPy's names of element types, and what `struct` calls them."""


@dataclass(frozen=True, slots=True)
class OtherRow:
    """A value that is not a tensor.

    Attributes:
        name: its dotted path.
        type: its type, as a person would call it.
        value: the value, when it is plain and short.
        has_value: whether `value` is set; it may be None itself.
        size: the number of entries of a container.
    """

    name: str
    type: str
    value: object = None
    has_value: bool = False
    size: int | None = None


def other_rows(checkpoint: Checkpoint, state: State | None) -> Iterator[OtherRow]:
    """Yield everything beside the tensors, as deep as names go; long lists and objects stay closed.

    Of a pickled model there are its own attributes, not those of the modules inside it.

    Args:
        checkpoint: the checkpoint.
        state: its model's state, whose module versions are left out; None when it has none.
    """

    def inside(value: object) -> Iterable[Entry] | None:
        if state is not None and value is state.anchor and isinstance(value, dict):
            return state.others.items()  # its module versions are for torch, not for people
        if special_tensor(value) is not None:
            return None
        if is_module(value):
            return own_attributes(value)
        return entries(value) if isinstance(value, dict) or _attributes(value) is not None else None

    for path, value in checkpoint.named(inside):
        attributes = None if is_module(value) or special_tensor(value) is not None else _attributes(value)
        if is_module(value):
            yield OtherRow(dotted(path), type_name(value))
        elif attributes is not None:
            yield OtherRow(dotted(path), type_name(value), size=len(attributes))
        elif isinstance(value, dict):
            if path and (not value or len(path) == MAX_DEPTH):
                yield OtherRow(dotted(path), type_name(value), size=len(value))
        elif tensor_of(value) is None and special_tensor(value) is None:
            yield _other(dotted(path), value)


def _attributes(value: object) -> dict[object, object] | None:
    """Return the attributes of an object pickled with a dict of them, such as argparse.Namespace."""
    if isinstance(value, Record) and isinstance(value.state, dict) and not value.elements and not value.items:
        return value.state if all(isinstance(key, str) for key in value.state) else None
    return None


def _other(name: str, value: object) -> OtherRow:
    plain = _plain(value)
    size = len(value) if isinstance(value, list | tuple | set | frozenset | bytes) else None
    return OtherRow(name, type_name(value), plain, plain is not None or value is None, size)


def _plain(value: object, levels: int = 2) -> object:
    """Return a value when it is plain and short, else None; lists may hold lists, `levels` deep."""
    if isinstance(value, bool | float) or (isinstance(value, int) and value.bit_length() < 4096):
        return value
    if isinstance(value, str):
        return value if len(value) <= 1000 else None
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and levels:
        items = [_plain(item, levels - 1) for item in value]
        return items if all(i is not None or v is None for i, v in zip(items, value, strict=True)) else None
    if isinstance(value, Global):
        return str(value)
    return _number(value) if isinstance(value, Record) else None


def _number(value: Record) -> object:
    """Return the number in a scalar of NumPy, as a best score often is; None for any other object."""
    if value.type_name not in SCALARS:
        return None
    match value.args:
        case (Record(args=(str(code), *_), state=(_, str(order), *_)), bytes(raw)) if code in NUMBERS:
            layout = (order if order in ("<", ">") else "=") + NUMBERS[code]
            return struct.unpack(layout, raw)[0] if len(raw) == struct.calcsize(layout) else None
    return None


def type_name(value: object) -> str:
    """Return what a person would call the type of an inert value."""
    if isinstance(value, Record):
        name = value.type_name
        return name.rpartition(".")[2] if name in UNDERSTOOD else name
    if isinstance(value, OrderedDict_):
        return "OrderedDict"
    if isinstance(value, TensorRef):
        return "Tensor"
    if isinstance(value, Global):
        return "dtype" if str(value).removeprefix("torch.") in DTYPES else "name"
    return container_name(value)
