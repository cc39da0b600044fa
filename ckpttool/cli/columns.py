"""Text in the columns of a terminal, where East Asian characters take two and combining marks none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


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
    if width is None or columns(text) <= width:
        return text
    return _clip(text, 0, max(width - 1, 1)) + "…"


def cut_front(text: str, width: int) -> str:
    """Cut the start of `text` to `width` columns: names that share their start differ at their end."""
    wide = columns(text)
    return text if wide <= width else "…" + _clip(text, wide - max(width - 1, 1), wide)


def cut_middle(text: str, width: int) -> str:
    """Cut the middle of `text` to `width` columns: both ends of a path tell where something is."""
    wide = columns(text)
    if wide <= width:
        return text
    end = max(width - 1, 0) // 2
    return _clip(text, 0, width // 2) + "…" + _clip(text, wide - end, wide)


def left(text: str, width: int) -> str:
    """Pad `text` with spaces on its right to `width` columns."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Pad `text` with spaces on its left to `width` columns."""
    return " " * (width - columns(text)) + text


def wrapped(text: str, width: int) -> list[str]:
    """Break `text` between words into lines of at most `width` columns; break longer words where they end."""
    if _is_narrow(text):
        from textwrap import wrap
    else:
        from wcwidth import wrap
    return wrap(text, width, break_on_hyphens=False)


def table(
    rows: Sequence[Sequence[str]], to_the_left: Collection[int], width: int | None = None
) -> Iterator[str]:
    """Yield one line per row, each column as wide as its widest cell.

    Args:
        rows: cells; every row has the same number of them.
        to_the_left: indices of the columns that are aligned to the left; the others are to the right.
        width: columns of the terminal, for which the first column is cut at its front; None cuts nothing.
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
