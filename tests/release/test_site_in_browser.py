"""The site in a real Chromium: its ten most important pages, and the search."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_files import WIDTHS, Shown, browser

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PAGES = [
    "index",
    "errors",
    "errors/unexpected-key-module",
    "tasks",
    "cli",
    "conform",
    "distributed",
    "trainer",
]
PAGES += ["security", "reference"]


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site: a browser lets no page from a disk read the index of its search."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_asks_nothing_elsewhere_and_axe_finds_nothing(
    chromium: Any, address: str, page: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe, of the extra dev"
    ).Axe()
    for width in WIDTHS.values():
        for scheme in ("light", "dark"):
            with Shown(chromium, f"{address}/{page}.html", width=width, scheme=scheme) as shown:
                assert (shown.complaints, shown.overflow()) == ([], 0)
                elsewhere = [url for url in shown.requests if not url.startswith((address, "data:"))]
                assert elsewhere == []
                body = shown.page.evaluate("document.body.getAttribute('data-md-color-scheme')")
                assert body == {"light": "default", "dark": "slate"}[scheme]
                found = axe.run(shown.page).response["violations"]
                assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found] == []


@pytest.mark.parametrize("page", ["index", "tasks"])
def test_pages_open_from_a_disk_too(chromium: Any, site: Path, page: str) -> None:
    with Shown(chromium, site / f"{page}.html") as shown:
        assert shown.overflow() == 0
        shown.page.click("text=all commands" if page == "index" else "text=scan.md")
        shown.page.wait_for_url(re.compile(r"(cli|scan)\.html"))
        assert shown.page.inner_text("h1")


def test_search_finds_a_page_by_the_text_of_its_error(chromium: Any, address: str) -> None:
    with Shown(chromium, f"{address}/index.html") as shown:
        shown.page.fill("input.md-search__input", "Unexpected key module")
        first = shown.page.locator(".md-search-result__link").first
        first.wait_for()
        links = shown.page.locator(".md-search-result__link").evaluate_all(
            "all => all.map(each => each.href)"
        )
        assert any("errors/unexpected-key-module.html" in link for link in links[:3])
        first.click()
        shown.page.wait_for_url(re.compile("h="))
        shown.page.locator("mark").first.wait_for()
        assert shown.complaints == []


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {
        path: path.read_text(encoding="utf-8") for path in site.rglob("*.html") if path.name != "404.html"
    }
    names = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in pages.items()}
    offenders = []
    for path, text in pages.items():
        for link in re.findall(r'<(?:a|img)\b[^>]*?\b(?:href|src)="?([^"\s>]+)', text):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in names and anchor not in names[target]):
                offenders.append(f"{path.relative_to(site)}: {link}")
    assert offenders == []
