"""`make report`: a page to look at, build/report.html, and pictures of it where Chromium is there."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

import ckpttool
from tests.support import report_files
from tests.support.browser import Shown, browser
from tests.support.saved import saved


def main(folder: Path) -> None:
    """Write the page about a difference, and draw its first screen in both schemes."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    with tempfile.TemporaryDirectory() as files:
        before = saved(report_files.model(), Path(files) / "before.pt")
        ckpttool.report(before, page, report_files.successor(Path(files)), force=True)
    print(page)
    try:
        with browser() as started:
            for scheme in ("light", "dark"):
                with Shown(started, page, scheme=scheme) as shown:
                    shown.page.locator("#modules").scroll_into_view_if_needed()
                    picture = folder / f"report-{scheme}.png"
                    shown.page.screenshot(path=picture, full_page=True)
                    print(picture)
    except pytest.skip.Exception as why:
        print(f"no picture: {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build"))
