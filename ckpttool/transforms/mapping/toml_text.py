"""Values as TOML writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping


def lines(title: str, table: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of a table after a line with its title, as `[counts]`; none for an empty table."""
    if table:
        yield from ("", title, *(f"{key(name)} = {text(value)}" for name, value in table.items()))


def key(name: str) -> str:
    """Return a key, quoted where it must be."""
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else text(name)


def text(value: object) -> str:
    """Return a value in one line. A text of JSON is one of TOML, but for DEL."""
    if isinstance(value, Mapping) and not value:
        return "{}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key(name)} = {text(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
