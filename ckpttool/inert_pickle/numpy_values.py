"""NumPy's scalars, arrays and element types, read from how they are pickled, without NumPy.

Source: `__reduce__` of `numpy.generic`, `numpy.ndarray` and `numpy.dtype`, 1.x and 2.x; protocol 5 in band.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ..tensors.dtypes import DTYPES
from ..tensors.ref import MAX_AXES, Computed, Storage, TensorRef, contiguous_stride, extent, is_count
from ..tensors.values import swap
from .values import Global, Record, names_of

SCALAR = names_of("numpy.core.multiarray numpy._core.multiarray: scalar")
ARRAY = names_of("numpy.core.multiarray numpy._core.multiarray: _reconstruct")
FROM_BUFFER = names_of("numpy.core.numeric numpy._core.numeric: _frombuffer")
DTYPE = Global("numpy", "dtype")

CODE = re.compile("[A-Za-z][0-9]{1,9}")

MAX_EMPTY = 1 << 20  # lists that an array without elements may become: think of shape [2**40, 0]

# NumPy's names of element types, with what `struct` and torch call them.
_NUMBERS = """
    b1 ? bool, i1 b int8, i2 h int16, i4 i int32, i8 q int64, u1 B uint8, u2 H uint16, u4 I uint32,
    u8 Q uint64, f2 e float16, f4 f float32, f8 d float64, c8 ff complex64, c16 dd complex128
"""
NUMBERS = {code: (layout, name) for code, layout, name in map(str.split, _NUMBERS.split(","))}


@dataclass(frozen=True, slots=True)
class Element:
    """An element type: its kind (`f`, `i`, `U`, `O`, …) with its size as NumPy has it, and its byte order."""

    code: str
    order: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element; text has four a character."""
        return int(self.code[1:] or 0) * (4 if self.code[0] == "U" else 1)

    def unpack(self, raw: bytes) -> list[object] | None:
        """Return the elements in some bytes, complex ones as (real, imaginary); None for other types."""
        step = self.itemsize
        if not step or len(raw) % step:
            return None
        if self.code in NUMBERS:
            values = struct.iter_unpack(self.order + NUMBERS[self.code][0], raw)
            return [value if len(value) > 1 else value[0] for value in values]
        if self.code[0] not in "SU":
            return None
        texts = [raw[at : at + step] for at in range(0, len(raw), step)]
        if self.code[0] == "S":
            return [text.rstrip(b"\0") for text in texts]
        encoding = "utf-32-be" if self.order == ">" else "utf-32-le"
        try:
            return [text.decode(encoding, "surrogatepass").rstrip("\0") for text in texts]
        except UnicodeDecodeError:  # no character has such a number
            return None


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array as it is pickled."""

    element: Element
    shape: tuple[int, ...]
    fortran: bool  # the first axis is the innermost one
    data: bytes | list[object]  # a list for an array of objects

    def tensor(self, path: str) -> TensorRef | None:
        """Return the array as a tensor; None for an element type that torch does not have."""
        if self.element.code not in NUMBERS or not isinstance(self.data, bytes):
            return None
        dtype = DTYPES[NUMBERS[self.element.code][1]]
        raw = bytearray(self.data)
        if self.element.order == ">":
            swap(raw, dtype.part)

        storage = Storage(Computed.in_memory(path, raw), dtype.kind)
        return TensorRef(storage, dtype, self.shape, self._stride())

    def nested(self, convert: Callable[[object], object]) -> object:
        """Return the elements as `ndarray.tolist()` does; raise ValueError for types without a plain form."""
        flat = self.element.unpack(self.data) if isinstance(self.data, bytes) else self.data
        if flat is None and self.data:
            raise ValueError(f"elements of type {self.element.code}")
        items = [convert(item) for item in flat or ()]
        return _rows(items, self.shape, self._stride(), 0) if self.shape else items[0]

    def _stride(self) -> tuple[int, ...]:
        reverse = contiguous_stride(self.shape[::-1])[::-1]
        return reverse if self.fortran else contiguous_stride(self.shape)


def _rows(items: list[object], shape: tuple[int, ...], stride: tuple[int, ...], at: int) -> list[object]:
    if len(shape) == 1:
        return [items[at + i * stride[0]] for i in range(shape[0])]
    return [_rows(items, shape[1:], stride[1:], at + i * stride[0]) for i in range(shape[0])]


def element_of(value: object) -> Element | None:
    """Return the element type that a pickled `numpy.dtype` is; None for any other value."""
    if not isinstance(value, Record) or value.callable != DTYPE:
        return None
    match value.args, value.state:
        case (str(code), *_), (_, str(order), None, None, None, *_) if CODE.fullmatch(code):
            return Element(code, order if order in ("<", ">") else "<")
        case ("O" | "O8", *_), _:
            return Element("O8", "<")
    return None


def scalar_of(value: object) -> object:
    """Return the value of a pickled scalar of NumPy, complex as (real, imaginary); None for anything else."""
    match value:
        case Record(callable=name, args=(dtype, bytes(raw))) if name in SCALAR:
            element = element_of(dtype)
            values = element.unpack(raw) if element and len(raw) == element.itemsize else None
            return values[0] if values else None
    return None


def scalar_type(value: Record) -> str:
    """Return the name of the class of a pickled scalar: `numpy.float64`."""
    element = element_of(value.args[0]) if isinstance(value.args, tuple) and value.args else None
    code = element.code if element else ""
    name = NUMBERS[code][1] if code in NUMBERS else {"U": "str_", "S": "bytes_"}.get(code[:1], "generic")
    return f"numpy.{name}"


def array_of(value: object) -> PickledArray | None:
    """Return a pickled array of NumPy; None for anything else, or if its parts do not fit each other."""
    if not isinstance(value, Record):
        return None
    match value.callable, value.args, value.state:
        case name, _, (_, tuple(shape), dtype, int(fortran), bytes() | list() as data) if name in ARRAY:
            pass
        case name, (bytes() | bytearray() as data, dtype, tuple(shape), str(order)), _ if name in FROM_BUFFER:
            data, fortran = bytes(data), order == "F"
        case _:
            return None
    element = element_of(dtype)
    if element is None or not all(map(is_count, shape)) or isinstance(data, list) != (element.code == "O8"):
        return None
    numel = 0 if 0 in shape else extent(shape)
    size = 1 if isinstance(data, list) else element.itemsize
    if not size or len(data) != numel * size or len(shape) > MAX_AXES or extent(shape) > MAX_EMPTY + numel:
        return None
    return PickledArray(element, shape, bool(fortran), data)
