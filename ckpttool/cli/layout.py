"""Text in the columns of a terminal: measured, cut, padded, wrapped between words, and in tables."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import TextIO


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that `stream` is; None if it is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def columns(text: str) -> int:
    """Return the number of columns that a line of printable text takes."""
    if _is_narrow(text):
        return len(text)
    from wcwidth import width

    return width(text)


def _is_narrow(text: str) -> bool:
    """Whether each character takes one column: then wcwidth, whose import takes 40 ms, is not needed."""
    return text.isascii() or max(text.replace("…", ""), default="") < "\u0300"


def _clip(text: str, start: int, end: int) -> str:
    """Return the characters that lie whole between two columns."""
    if _is_narrow(text):
        return text[start:end]
    from wcwidth import clip

    return clip(text, start, end, fillchar="")


def cut(text: str, width: int | None) -> str:
    """Cut the end of `text` to `width` columns, with "…" in its place; None cuts nothing."""
    return text if width is None else _cut(text, width, max(width - 1, 1), 0)


def cut_front(text: str, width: int) -> str:
    """Cut the start of `text` to `width` columns: names that share their start differ at their end."""
    return _cut(text, width, 0, max(width - 1, 1))


def cut_middle(text: str, width: int) -> str:
    """Cut the middle of `text` to `width` columns: both ends of a path tell where something is."""
    return _cut(text, width, width // 2, max(width - 1, 0) // 2)


def _cut(text: str, width: int, start: int, end: int) -> str:
    wide = columns(text)
    return text if wide <= width else f"{_clip(text, 0, start)}…{_clip(text, wide - end, wide)}"


def left(text: str, width: int) -> str:
    """Pad `text` with spaces on its right to `width` columns."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Pad `text` with spaces on its left to `width` columns."""
    return " " * (width - columns(text)) + text


def wrapped(text: str, width: int, *, whole_words: bool = False) -> list[str]:
    """Break `text` between words into lines of at most `width` columns.

    A longer word is broken behind a dot or slash, else an underscore, else where a line ends. With
    `whole_words` it stays whole, as a path to be copied.
    """
    lines: list[str] = []
    line = ""
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        gap = " " * len(gap)
        for part in [word] if whole_words else _parts(word, width):
            if columns(line + gap + part) <= width:
                line += gap + part
            else:
                lines, line = lines + [line] * bool(line), part
            gap = ""
    return [*lines, line] if line else lines


def _parts(word: str, width: int) -> Iterator[str]:
    """Yield a word in parts of at most `width` columns."""
    while columns(word) > width:
        head = _clip(word, 0, max(width, 2))
        end = max(head.rfind("."), head.rfind("/")) + 1 or head.rfind("_") + 1 or max(len(head), 1)
        yield word[:end]
        word = word[end:]
    yield word


def without(heads: Sequence[str], width: int) -> list[str]:
    """Return lines that name what a table leaves out in a narrow terminal; none if that is nothing."""
    said = f"without {', '.join(heads)}, for which the terminal is too narrow; | cat has them"
    return wrapped(said, width) if heads else []


def fitting(widths: Sequence[int], width: int) -> int:
    """Return how many columns of these widths, the first ones, fit with two spaces before each."""
    return sum(total <= width for total in accumulate(wide + 2 for wide in widths))


def table(
    rows: Sequence[Sequence[str]], to_the_left: Collection[int], width: int | None = None
) -> Iterator[str]:
    """Yield one line per row, each column as wide as its widest cell. Where that is wider than `width`, the
    first column gives way, and what words in the last one leave of the line is cut."""
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    if width is not None and rows:
        least = min(widths[0], 16)
        last = min(widths[-1], 16) if len(widths) - 1 in to_the_left else widths[-1]
        rest = sum(widths[1:-1]) + last + 2 * (len(widths) - 1)
        widths[:1] = [min(widths[0], max(width - rest, least))]
    pads = [left if i in to_the_left else right for i in range(len(widths))]
    for first, *others in rows:
        cells = [cut_front(first, widths[0]), *others]
        line = "  ".join(pad(cell, wide) for pad, cell, wide in zip(pads, cells, widths, strict=True))
        yield cut(line.rstrip(), width)
