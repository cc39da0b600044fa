"""JSON from a file that may mean to mislead: UTF-8, one object, and no name in it twice."""

from __future__ import annotations

import json
from typing import Any

from ..errors import Damaged


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

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{what} is not JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise Damaged(path, f"{what} is not a JSON object")
    return found
