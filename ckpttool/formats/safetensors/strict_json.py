"""JSON from a file that may mean to mislead: UTF-8, one object, no name in it twice, no number -0."""

from __future__ import annotations

import json
from typing import Any

from ...errors import Damaged


def parse_object(path: str, raw: bytes, what: str) -> dict[str, Any]:
    """The object that the text is.

    Args:
        path: the file, for the message.
        what: the text, for the message: "its header".

    Raises:
        Damaged.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise Damaged(path, f"{what} has the same name twice")
        return made

    parse_int = _but_minus_zero if b"-0" in raw else None  # a call for each number takes time
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{what} is not JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise Damaged(path, f"{what} is not a JSON object")
    return found


def _but_minus_zero(text: str) -> int:
    """An integer; -0 is 0 to Python alone, and to others a float."""
    if text == "-0":
        raise ValueError("a number is -0")
    return int(text)
