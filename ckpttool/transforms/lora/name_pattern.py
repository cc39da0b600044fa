"""Regular expressions of a file of others, matched with names in a time that no expression makes exponential.

Python's `re` backtracks: `((.+)+)+!`, or forty times `(a|a)`, keep it busy for years. Here the set of all
places that are reached so far is carried from one piece of the expression to the next.
"""

from __future__ import annotations

import re
from functools import lru_cache

PIECE = re.compile(
    r"(?P<open>\((?:\?:)?(?!\?))|(?P<other>[)|^$])|(?P<text>[\w-]+(?![*+?{]))"
    r"|(?P<one>[\w-]|\.|\\[.dw_-]|\[\^?[\w.-]+\])(?P<many>[*+?]?)(?![*+?{])"
)
"""A group, a character of its own meaning, text, and one character of some kind, perhaps repeated."""

LONGEST = 1000
"""Characters of an expression; that of PEFT's users are names of layers with a `.*` or two."""


class UnknownPattern(ValueError):
    """The expression is of more than text, `.`, `\\d`, `[0-9]`, `*`, `+`, `?`, `|` and plain groups."""


def fits(pattern: str, name: str) -> bool:
    """Return whether `re.match(rf"(.*\\.)?({pattern})$", name)` does: all of it, or what follows a dot.

    Args:
        pattern: the expression.
        name: of a layer.

    Raises:
        UnknownPattern: the expression is too long, or has something else in it, such as a repeated group.
        re.error: it is no expression.
    """
    at = {0, *(place + 1 for place, character in enumerate(name) if character == ".")}
    first, done = at, set[int]()
    outer: list[tuple[set[int], set[int]]] = []
    for piece in _pieces(pattern):
        kind, text = piece.lastgroup, piece[0]
        if kind == "open":
            outer.append((first, done))
            first, done = at, set()
        elif text == "|":
            first, done, at = first, done | at, first
        elif text == ")":
            at |= done
            first, done = outer.pop()
        elif text in "^$":
            at = at & {0 if text == "^" else len(name)}
        elif kind == "text":
            at = {place + len(text) for place in at if name.startswith(text, place)}
        else:
            at = _repeated(piece["one"], piece["many"], name, at)
    return len(name) in at | done


def _repeated(one: str, many: str, name: str, at: set[int]) -> set[int]:
    """Return the places that a character of some kind leads to, once or as often as is said."""
    if not at:
        return at
    fit = re.compile(one).fullmatch
    reached = {place + 1 for place in at if fit(name[place : place + 1])}
    if many in ("*", "+"):
        for place in range(min(reached, default=len(name)), len(name)):
            if place in reached and fit(name[place]):
                reached.add(place + 1)
    return reached | at if many in ("*", "?") else reached


@lru_cache(1 << 12)
def _pieces(pattern: str) -> tuple[re.Match[str], ...]:
    """Cut an expression; raises UnknownPattern, and re.error."""
    found, end, depth = [], 0, 0
    while end < len(pattern) <= LONGEST:
        piece = PIECE.match(pattern, end)
        if piece is None:
            break
        depth += (piece.lastgroup == "open") - (piece[0] == ")")
        if depth < 0:
            break
        found.append(piece)
        end = piece.end()
    if end < len(pattern) or depth:
        re.compile(pattern)
        raise UnknownPattern(pattern)
    return tuple(found)
