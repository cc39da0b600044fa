"""The pictures of README.md show what is printed today, load nothing, and are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pictures import drawing, session
from tests.support.running import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
TERMINAL = ROOT / "docs" / "pictures" / "terminal.svg"


def plain(text: str) -> str:
    """Take escape codes away, and the times, which are those of a machine."""
    return re.sub(r"\d+\.\d\d s\b", "N s", re.sub(r"\x1b\[[\d;]*m", "", text))


@pytest.mark.timeout(300)
def test_the_terminal_shows_what_the_commands_print_today(tmp_path: Path) -> None:
    session.prepare(tmp_path)
    text = drawing.text_of(TERMINAL.read_text(encoding="utf-8"))
    assert plain(text) == plain(session.shown(tmp_path)), "docs/pictures is stale: run `make report`"
    assert max(map(len, text.splitlines())) <= session.WIDTH


def test_a_drawing_holds_its_text_at_its_place_and_its_colours() -> None:
    pytest.importorskip("rich", reason="needs rich, of the extra dev")
    svg = drawing.drawn("\x1b[31m~\x1b[0m <a> &amp; 層\n\n   three  ×", 20)
    assert drawing.text_of(svg) == "~ <a> &amp; 層\n\n   three  ×"
    assert len(set(re.findall(r"fill: (#\w+)", svg))) >= 2


def test_pictures_are_small_and_load_nothing() -> None:
    assert [path.name for path in PICTURES] == ["report-dark.png", "report-light.png", "terminal.svg"]
    assert [path.name for path in PICTURES if path.stat().st_size > 100_000] == []
    svg = TERMINAL.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\s\"']+", svg.replace("http://www.w3.org/2000/svg", "")) == []
    assert "<script" not in svg and "@font-face" not in svg


def test_the_readme_shows_each_picture_in_words_too() -> None:
    shown = re.findall(r'(?:src|srcset)="(docs/pictures/[^"]+)"', README)
    assert sorted(shown) == [path.relative_to(ROOT).as_posix() for path in PICTURES]
    assert len(re.findall(r'<img [^>]*alt="[^"]{30,}"', README)) == 2
