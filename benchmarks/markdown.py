"""Tables between two marks of a Markdown page, so that nobody copies numbers by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are left-aligned."""
    ruler = ["---" if column < left else "---:" for column in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ruler, *rows[1:]])


def check_marks(file: Path) -> None:
    """Check that a page can be updated, before an hour is spent measuring."""
    try:
        _split(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error


def put_between_marks(file: Path, markdown: str) -> None:
    """Replace what lies between the marks of a page."""
    before, after = _split(file)
    file.write_text(f"{before}{BEGIN}\n{markdown}\n{END}{after}", encoding="utf-8")


def _split(file: Path) -> tuple[str, str]:
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{file}: has no lines {BEGIN} and {END} to put the tables between")
    return before, after
