"""An object as the text that would make it, such as `Config(lr=0.1)`: for keys, which torch takes as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .numpy_values import scalar_of
from .plain_objects import attributes_of, text_of
from .values import Global, Record

MAX_LENGTH = 1000
"""Characters of a text."""

MAX_LEVELS = 20
"""Levels of nesting that are written."""


class NoText(ValueError):
    """An object holds more than a text of MAX_LENGTH can tell; the message says what."""


def described(value: object) -> str:
    """Return a text with all values of an object, such as `Config(lr=0.1, name='a')`.

    Raises:
        NoText: the object holds a tensor or another value that is no text, or too much for one.
    """
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
        yield from _joined("{", (_pair(key, ": ", each, levels) for key, each in value.items()), "}")
    elif isinstance(value, list | tuple | set | frozenset):
        opening, closing = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
        yield from _joined(opening, (_pieces(each, levels - 1) for each in value), closing)
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
        parts += [_pieces([*each], levels) for each in (record.elements, record.items) if each]
    yield from _joined("(", parts, ")")


def _arguments(values: object, levels: int) -> Iterator[Iterator[str]]:
    if isinstance(values, dict) and all(isinstance(key, str) and key.isidentifier() for key in values):
        yield from (_pair(key, "=", each, levels) for key, each in values.items())
    elif isinstance(values, tuple):
        yield from (_pieces(each, levels) for each in values)
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
