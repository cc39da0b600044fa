"""Text in columns of a terminal, where East Asian characters take two and combining ones none."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Sequence


def columns(text: str) -> int:
    """How many columns a line of printable text takes (Unicode Standard Annex 11)."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitting(text: str, width: int) -> int:
    """How many of its first characters fit."""
    if text.isascii():
        return min(width, len(text))
    for count, character in enumerate(text):
        width -= _width(character)
        if width < 0:
            return count
    return len(text)


def cut(text: str, width: int | None) -> str:
    """The text, or as much of it as fits, and a mark; any width does when None."""
    if width is None or columns(text) <= width:
        return text
    return text[: fitting(text, max(width - 1, 1))] + "…"


def cut_front(text: str, width: int) -> str:
    """The same from its end: where names share their beginning, the end distinguishes them."""
    if columns(text) <= width:
        return text
    return "…" + text[::-1][: fitting(text[::-1], max(width - 1, 1))][::-1]


def cut_middle(text: str, width: int) -> str:
    """The same from its middle: both ends of a path tell where something is."""
    if columns(text) <= width:
        return text
    start, end = width // 2, max(width - 1, 0) // 2
    return text[: fitting(text, start)] + "…" + text[::-1][: fitting(text[::-1], end)][::-1]


def left(text: str, width: int) -> str:
    """Filled with spaces up to so many columns."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    return " " * (width - columns(text)) + text


def wrapped(text: str, width: int) -> list[str]:
    """Its words on lines of so many columns; a word that is longer than a line is broken."""
    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if columns(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        while columns(word) > width:
            count = max(fitting(word, width), 1)
            lines.append(word[:count])
            word = word[count:]
        line = word
    return [*lines, line] if line else lines


def table(
    rows: Sequence[Sequence[str]], to_the_left: Collection[int], width: int | None = None
) -> Iterator[str]:
    """Rows of cells, each column as wide as its widest cell. The first gives way where the width asks for it.

    Args:
        to_the_left: columns that are not aligned to the right.
        width: columns of the terminal; any when None.
    """
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    if width is not None and rows:
        least = min(widths[0], 16)
        rest = sum(widths[1:]) + 2 * (len(widths) - 1)
        widths[:1] = [min(widths[0], max(width - rest, least))]
    for first, *others in rows:
        padded = [left(cut_front(first, widths[0]), widths[0])]
        for i, cell in enumerate(others, 1):
            padded.append((left if i in to_the_left else right)(cell, widths[i]))
        yield cut("  ".join(padded).rstrip(), width)
