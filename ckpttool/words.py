"""Names, counts and sizes in words, for people to read: in a terminal, a notebook and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
