"""Names, counts and sizes in words, for people to read: in a terminal, a notebook and a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

LONGEST = 300  # characters of a name in a message


def printable(text: str) -> str:
    """Return `text` with control characters and lone surrogates escaped, fit to be shown."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show_bytes(count: float) -> str:
    """Return a number of bytes for people, in units of 1000: `97.8 MB`."""
    if count < 1000:
        return f"{count:.0f} bytes"
    units = ["kB", "MB", "GB", "TB"]
    while (count := count / 1000) >= 999.5 and len(units) > 1:
        del units[0]
    return f"{count:.3g} {units[0]}"


def counted(count: int, one: str, more: str = "") -> str:
    """Return a count with its noun: `1 value`, `2 values`."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def in_short(name: str) -> str:
    """Return a name, or its beginning where it is longer than a few lines of a terminal."""
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}…"


def first_few(names: Sequence[object], most: int = 4) -> str:
    """Join the first `most` names, and say how many more there are."""
    shown = ", ".join(in_short(str(name)) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def show_names(names: Sequence[str], most: int = 4) -> str:
    """Do as `first_few` with names that may hold anything."""
    return first_few([*map(printable, names[:most]), *names[most:]], most)


def first_key(keys: Iterable[object]) -> str:
    """Return a hint that names the first of the keys, or says that there is none."""
    return next((f"the first key is '{in_short(str(key))}'" for key in keys), "it holds no tensor")


def number(value: float | int, digits: int = 3) -> str:
    """Return an integer as it is, and another number in a few digits."""
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


# ---- JSON that programs print and write: strict, with a version for scripts


SCHEMA = 1  # rises when a field changes its meaning or goes; a new field leaves it


def versioned(data: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a JSON object, the version first."""
    return {"schema": SCHEMA, **data}


def finite(value: Any, instead: Callable[[float], str | None] = lambda _: None) -> Any:
    """Return a value for JSON. NaN and infinity become null, or what `instead` returns.

    A dataclass becomes an object of its fields, an array or a tensor a list.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else instead(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item, instead) for key, item in value.items()}
    return [finite(item, instead) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Telling:
    """How commands print one field of a result, from the field's `metadata`."""

    name: str  # of the attribute
    json: str | None  # its name in JSON, where that is another; None where JSON lacks it
    note: str = ""  # the words of a note before the names in it; "" where there is no note
    counted: bool = False  # JSON has how many names there are, and not the names
    if_any: bool = False  # JSON lacks it where there is nothing to say


def noted(words: str, **how: Any) -> Any:
    """Return a field of names, () by default, that a note lists after these words; see `Telling`."""
    return field(default=(), metadata={"note": words, **how})


def _tellings(kind: type) -> tuple[Telling, ...]:
    """Return the fields of a class of results; () of another class."""
    known = fields(kind) if is_dataclass(kind) else ()
    return tuple(Telling(**{"name": each.name, "json": each.name, **each.metadata}) for each in known)


tellings: Callable[[type], tuple[Telling, ...]] = cache(_tellings)
