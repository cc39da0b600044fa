"""JSON objects in files, such as headers and indexes: what readers take for different ones is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import Damaged

# The names and values of an object.
Pairs = list[tuple[str, Any]]


def parse_object(
    path: str, raw: bytes, what: str, usual: Callable[[Pairs], object] = lambda pairs: None
) -> dict[str, Any]:
    """Parse JSON and return the object in it."""

    def once(pairs: Pairs) -> object:
        if (parsed := usual(pairs)) is not None:
            return parsed
        made = dict(pairs)
        if len(made) != len(pairs):
            raise Damaged(path, f"{what} has the same name twice")
        return made

    # A call for each number takes time; so does the search for two bytes, a hundred times that for one.
    parse_int = _but_minus_zero if b"-" in raw and b"-0" in raw else None
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{what} is not JSON: {str(error)[:80]}") from None
    if not isinstance(parsed, dict):
        raise Damaged(path, f"{what} is not a JSON object")
    return parsed


def _but_minus_zero(text: str) -> int:
    """Return an integer; refuse -0, which Python alone takes for one and others for a float."""
    if text == "-0":
        raise ValueError("a number is -0")
    return int(text)
