"""NumPy's scalars, arrays and element types, read from how they are pickled, without NumPy.

Source: `__reduce__` of `numpy.generic`, `numpy.ndarray` and `numpy.dtype`, 1.x and 2.x; protocol 5 in band.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import re
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ..tensors.ref import DTYPES, MAX_AXES, Computed, Storage, TensorRef, contiguous_stride, extent, is_count
from ..tensors.values import swap
from .machine import BadKey, KeyGuard
from .values import RECONSTRUCTOR, Global, Record, attributes_in, names_of

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


# ---- The plain value that an object stands for: text, a dict of attributes, or a list.


OBJECT = names_of("builtins __builtin__: object")
DEFAULT_DICT = Global("collections", "defaultdict")
DEQUE = Global("collections", "deque")
MAX_BITS = 10_000  # of the numbers of a fraction


def _made(kind: Callable[..., object], *types: type) -> Callable[[Record], str]:
    """Return a function that makes a value of a class of the standard library, and returns its text."""

    def text(record: Record) -> str:
        args = record.args
        if not isinstance(args, tuple) or record.has_state or not all(type(arg) in types for arg in args):
            raise ValueError
        return str(kind(*args))

    return text


def _of_a_day(kind: Callable[..., object]) -> Callable[[Record], str]:
    """Return a function that makes a date or time of the day, with its offset from UTC if that is fixed."""

    def text(record: Record) -> str:
        match record.args:
            case (bytes(raw), *zones) if not record.has_state and len(zones) < 2:
                made: Any = kind(raw, *map(_zone, zones))
                if not made.fold:  # which its text does not tell
                    return str(made)
        raise ValueError

    return text


def _zone(zone: object) -> datetime.timezone:
    """Return a fixed offset; named zones are in a database of which each system has its own."""
    match zone:
        case Record(
            callable=Global("datetime", "timezone"),
            args=(Record(callable=Global("datetime", "timedelta"), args=tuple(parts)), *_),
        ) if {*map(type, parts)} <= {int}:
            return datetime.timezone(datetime.timedelta(*parts))
    raise ValueError


def _fraction(record: Record) -> str:
    match record.args:
        case (str(text),) if re.fullmatch(r"-?[0-9]+(/[0-9]+)?", text):  # an exponent may take hours
            return str(fractions.Fraction(text))
        case (int(over), int(under)) if max(over.bit_length(), under.bit_length()) < MAX_BITS:
            return str(fractions.Fraction(over, under))
    raise ValueError


def _uuid(record: Record) -> str:
    if not isinstance(record.state, dict) or type(record.state.get("int")) is not int:
        raise ValueError
    return str(uuid.UUID(int=record.state["int"]))


def _element(record: Record) -> str:
    element = element_of(record)
    if element is None or element.code in ("M8", "m8"):  # whose unit is in the state
        raise ValueError
    if element.order == ">":
        return f">{element.code}"
    return NUMBERS[element.code][1] if element.code in NUMBERS else element.code


_PATHS = "pathlib pathlib._local:"

# Classes of plain data, with what returns the text of an object.
TEXTS: dict[Global, Callable[[Record], str]] = {
    **dict.fromkeys(names_of(f"{_PATHS} Path PosixPath PurePath PurePosixPath"), _made(PurePosixPath, str)),
    **dict.fromkeys(names_of(f"{_PATHS} WindowsPath PureWindowsPath"), _made(PureWindowsPath, str)),
    Global("decimal", "Decimal"): _made(decimal.Decimal, str),
    Global("fractions", "Fraction"): _fraction,
    Global("datetime", "date"): _made(datetime.date, bytes),
    Global("datetime", "time"): _of_a_day(datetime.time),
    Global("datetime", "datetime"): _of_a_day(datetime.datetime),
    Global("datetime", "timedelta"): _made(datetime.timedelta, int),
    Global("uuid", "UUID"): _uuid,
    Global("numpy", "dtype"): _element,
}

MAX_TEXT = 100_000  # characters of an argument: a number of more digits would take long to be read


def text_of(record: Record) -> str | None:
    """Return the text of a path, date, decimal number, UUID or element type; None for any other object."""
    make = TEXTS.get(record.callable) if isinstance(record.callable, Global) else None
    if make is None or record.elements or record.items:
        return None
    args: tuple[Any, ...] = record.args if isinstance(record.args, tuple) else ()
    if any(isinstance(arg, str | bytes) and len(arg) > MAX_TEXT for arg in args):
        return None
    try:
        return make(record)
    except (ValueError, TypeError, ArithmeticError):
        return None


def attributes_of(record: Record) -> dict[Any, Any] | list[Any] | None:
    """Return an object's attributes, a dict's items or a list's elements, if its pickle has nothing else."""
    if not (_is_bare(record) or record.callable in (DEFAULT_DICT, DEQUE)):
        return None
    attributes = attributes_in(record.state)
    if attributes is None:
        return None
    if record.elements or record.callable == DEQUE:
        return None if record.items or attributes else list(record.elements)
    if record.items or record.callable == DEFAULT_DICT:
        items = _items(record)
        repeated = items is not None and all(_is_same(items.get(key), attributes[key]) for key in attributes)
        return items if repeated else None
    return attributes


def settings_of(record: Record) -> tuple[str, ...]:
    """Return the names of the settings that a standard dict or list class has besides its items."""
    args = record.args if isinstance(record.args, tuple) else ()
    if record.callable == DEFAULT_DICT and args:
        return ("default_factory",)
    return ("maxlen",) if record.callable == DEQUE and len(args) > 1 and args[1] is not None else ()


def _is_bare(record: Record) -> bool:
    """Return whether an object was made of its class alone."""
    if record.callable in RECONSTRUCTOR:
        args = record.args
        return isinstance(args, tuple) and len(args) == 3 and args[1] in OBJECT and args[2] is None
    if not isinstance(record.callable, Global) or record.args != () or record.kwargs:
        return False
    if record.how == "reduce":  # without contents it may be any function's result
        return bool(record.has_state or record.elements or record.items)
    return record.how == "newobj"


def _is_same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, int | float | str) and type(a) is type(b) and a == b)


def _items(record: Record) -> dict[Any, Any] | None:
    """Return the items of a dict; None for a key that has no hash, or one that takes long to be made."""
    guard, items = KeyGuard(len(record.items)), dict[Any, Any]()
    try:
        for key, value in record.items:
            items[guard.check(key, items)] = value
    except (BadKey, TypeError):
        return None
    return items


# An object as the text that would make it, such as `Config(lr=0.1)`: for keys, which torch takes as text.
MAX_LENGTH, MAX_LEVELS = 1000, 20  # of such a text: characters, levels of nesting


class NoText(ValueError):
    """An object holds more than a text of MAX_LENGTH can tell; the message says what."""


def described(value: object) -> str:
    """Return a text with all values of an object, such as `Config(lr=0.1, name='a')`; raise NoText."""
    text, left = [], MAX_LENGTH
    for piece in _pieces(value, MAX_LEVELS):
        text.append(piece)
        left -= len(piece)
        if left < 0:
            raise NoText(f"more than {MAX_LENGTH} characters")
    return "".join(text)


def _pieces(value: object, levels: int) -> Iterator[str]:
    """Yield the text in pieces, so that one that doubles at each level is given up early."""
    if not levels:
        raise NoText(f"more than {MAX_LEVELS} levels")
    if isinstance(value, str | bytes | bytearray):
        yield repr(value[: MAX_LENGTH + 1])
    elif isinstance(value, int) and value.bit_length() > MAX_LENGTH:
        yield hex(value)
    elif value is None or isinstance(value, int | float | Global):
        yield str(value)
    elif isinstance(value, dict):
        yield from _joined("{", (_pair(key, ": ", item, levels) for key, item in value.items()), "}")
    elif isinstance(value, list | tuple | set | frozenset):
        opening, closing = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        yield from _joined(opening, (_pieces(item, levels - 1) for item in value), closing)
    elif isinstance(value, Record):
        yield from _of_object(value, levels - 1)
    else:
        raise NoText("a tensor")


def _of_object(record: Record, levels: int) -> Iterator[str]:
    number = scalar_of(record)
    plain = text_of(record)
    if number is not None:
        yield str(complex(*number)) if isinstance(number, tuple) else str(number)
        return
    yield record.type_name
    attributes = attributes_of(record)
    if plain is not None:
        parts = [iter([repr(plain)])]
    elif attributes is not None:
        parts = [*_arguments(attributes, levels)]
    else:
        parts = [*_arguments(record.args, levels), *_arguments(record.kwargs, levels)]
        if record.has_state:
            parts.append(_pair("state", "=", record.state, levels))
        parts += [_pieces([*contents], levels) for contents in (record.elements, record.items) if contents]
    yield from _joined("(", parts, ")")


def _arguments(values: object, levels: int) -> Iterator[Iterator[str]]:
    if isinstance(values, dict) and all(isinstance(key, str) and key.isidentifier() for key in values):
        yield from (_pair(key, "=", value, levels) for key, value in values.items())
    elif isinstance(values, tuple):
        yield from (_pieces(value, levels) for value in values)
    elif values is not None:
        yield _pieces(values, levels)


def _pair(key: object, between: str, value: object, levels: int) -> Iterator[str]:
    yield from [str(key)] if between == "=" else _pieces(key, levels - 1)
    yield between
    yield from _pieces(value, levels - 1)


def _joined(opening: str, parts: Iterable[Iterator[str]], closing: str) -> Iterator[str]:
    yield opening
    for number, part in enumerate(parts):
        if number:
            yield ", "
        yield from part
    yield closing
