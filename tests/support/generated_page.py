"""A page of docs/ of which a part, between two marks, is generated."""

from __future__ import annotations

from pathlib import Path


def generated(page: Path, begin: str, end: str) -> str:
    """Return the part between the marks, which must be there."""
    return _split(page, begin, end)[1]


def regenerate(page: Path, begin: str, end: str, made: str) -> None:
    """Write the part between the marks, and nothing else."""
    before, _, after = _split(page, begin, end)
    page.write_text(f"{before}{begin}{made}{end}{after}", encoding="utf-8")


def _split(page: Path, begin: str, end: str) -> tuple[str, str, str]:
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    made, found_end, after = rest.partition(end)
    assert found_begin and found_end, f"{page} has no lines {begin}{end}"
    return before, made, after
