"""The plain value that an object stands for, read from its pickle: text, a dict of attributes, or a list."""

from __future__ import annotations

import datetime
import decimal
import fractions
import re
import uuid
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from .key_guard import BadKey, KeyGuard
from .numpy_values import NUMBERS, element_of
from .values import Global, Record

RECONSTRUCTOR = {Global("copyreg", "_reconstructor"), Global("copy_reg", "_reconstructor")}
OBJECT = {Global("builtins", "object"), Global("__builtin__", "object")}
DEFAULT_DICT = Global("collections", "defaultdict")
DEQUE = Global("collections", "deque")


MAX_BITS = 10_000
"""Bits of the numbers of a fraction."""


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
            case (bytes(raw),) if not record.has_state:
                made: Any = kind(raw)
            case (bytes(raw), Record() as zone) if not record.has_state:
                made = kind(raw, _zone(zone))
            case _:
                raise ValueError
        if made.fold:  # its text does not tell
            raise ValueError
        return str(made)

    return text


def _zone(record: Record) -> datetime.timezone:
    """Return a fixed offset; those of named zones are in a data base that each system has its own of."""
    args = record.args if record.callable == Global("datetime", "timezone") else None
    match args:
        case (Record(callable=Global("datetime", "timedelta"), args=tuple(parts)), *_) if all(
            type(part) is int for part in parts
        ):
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


TEXTS: dict[Global, Callable[[Record], str]] = {
    **{
        Global(module, name): _made(PureWindowsPath if "Windows" in name else PurePosixPath, str)
        for module in ("pathlib", "pathlib._local")
        for name in ["Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"]
    },
    Global("decimal", "Decimal"): _made(decimal.Decimal, str),
    Global("fractions", "Fraction"): _fraction,
    Global("datetime", "date"): _made(datetime.date, bytes),
    Global("datetime", "time"): _of_a_day(datetime.time),
    Global("datetime", "datetime"): _of_a_day(datetime.datetime),
    Global("datetime", "timedelta"): _made(datetime.timedelta, int),
    Global("uuid", "UUID"): _uuid,
    Global("numpy", "dtype"): _element,
}
"""Classes of plain data, with what returns the text of an object."""

MAX_TEXT = 100_000
"""Characters of an argument: a number of more digits would take long to be read."""


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
    """Return what an object holds, if that is all that its pickle says beside its class.

    Returns:
        The attributes of an object, such as a Namespace or a dataclass; the items of a dict of another class,
        as defaultdict is; the elements of a list of another class, as deque is. None for an object that was
        made of arguments, or holds several of these.
    """
    if not (_is_bare(record) or record.callable in (DEFAULT_DICT, DEQUE)):
        return None
    attributes = _state(record)
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
    """Return the names of the settings that a dict or list of a class of the library has beside its items."""
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


def _state(record: Record) -> dict[Any, Any] | None:
    """Return the attributes of an object, slots included; None where its state is something else."""
    state: Any = record.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    if not all(part is None or isinstance(part, dict) for part in parts):
        return None
    return {key: value for part in parts if part for key, value in part.items()}


def _is_same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b)


def _items(record: Record) -> dict[Any, Any] | None:
    """Return the items of a dict; None for a key that has no hash, or one that takes long to be made."""
    guard, items = KeyGuard(len(record.items)), dict[Any, Any]()
    try:
        for key, value in record.items:
            items[guard.check(key, items)] = value
    except (BadKey, TypeError):
        return None
    return items
