"""Pages in a real browser: what it complains of, asks for and shows."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 180_000  # milliseconds for a page, or for something on it: other programs may have the machine
WIDTHS = {"wide": 1280, "narrow": 400}


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start the system's Chromium, without a window; skip where there is none, or no playwright."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium, which is not installed (apt-get install chromium)")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, timeout=PATIENCE)
        yield started
        started.close()


class Shown:
    """A page, by its file or URL, in a window of its own, and what the browser said of it."""

    def __init__(self, browser: Any, page: Path | str, *, width: int = 1280, scheme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(page if isinstance(page, str) else page.resolve().as_uri())
        self.page.wait_for_selector("h1")

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def overflow(self) -> int:
        """Return how many pixels the page is wider than its window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(script))
