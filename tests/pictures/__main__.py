"""`make report`: the pictures of README.md, and the page that one of them shows, build/report.html.

The terminal needs rich, the pictures of the page a Chromium; without that their old ones stay, which is said.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import drawing, session
from tests.support.report_files import Shown, browser
from tests.support.running import ROOT

PICTURES = ROOT / "docs" / "pictures"
KEYS = ["ArrowDown", "ArrowDown", "ArrowRight", *["ArrowDown"] * 4]  # to a tensor of the first layer
MARGIN = 16
COLOURS = 128  # of a PNG: enough for a page, and a third of the bytes


def terminal(files: Path) -> None:
    """Draw a session in a terminal."""
    svg = drawing.drawn(session.shown(files), session.WIDTH)
    (PICTURES / "terminal.svg").write_text(svg, encoding="utf-8")
    print(PICTURES / "terminal.svg")


def page(files: Path, made: Path) -> None:
    """Write the page about the checkpoint of the session."""
    made.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ckpttool", "report", "last.pt", made.resolve(), "--force", "--quiet"]
    subprocess.run(command, cwd=files, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    print(made)


def photographed(made: Path) -> None:
    """Draw the page's modules and tensors in both schemes, with one of them chosen."""
    with browser() as started:
        for scheme in ("light", "dark"):
            with Shown(started, made, width=1100, scheme=scheme) as shown:
                shown.page.focus("[role=treegrid]")
                for key in KEYS:
                    shown.page.keyboard.press(key)
                picture = PICTURES / f"report-{scheme}.png"
                shown.page.evaluate("window.scrollTo(0, 0)")  # a clip's place is that on the page
                box = shown.page.locator("#modules").bounding_box()
                place = {each: box[each] - MARGIN for each in ("x", "y")}
                place |= {each: box[each] + 2 * MARGIN for each in ("width", "height")}
                picture.write_bytes(_small(shown.page.screenshot(full_page=True, clip=place)))
                print(picture)


def _small(png: bytes) -> bytes:
    """Return a PNG of few colours."""
    from PIL import Image

    image: Any = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(small := io.BytesIO(), "PNG", optimize=True)
    return small.getvalue()


def main(folder: Path) -> None:
    """Make them all."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        files = Path(made)
        session.prepare(files)
        terminal(files)
        page(files, folder / "report.html")
    try:
        photographed(folder / "report.html")
    except pytest.skip.Exception as why:
        print(f"no picture of the page: {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build"))
