"""The site: every page of docs/ is in its navigation, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from release import site_hook
from tests.support.running import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def rendered(text: str, page: str) -> str:
    return site_hook.on_page_markdown(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = re.findall(r"[\w/-]+\.md$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(pages) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("metrics.md", "[loop](../train/main.py)", "`train/main.py`"),
        ("metrics.md", "[loop](own-loops.md#a-rank)", "[loop](own-loops.md#a-rank)"),
        ("errors/orig-mod.md", "[BatchNorm](../batchnorm.md)", "[BatchNorm](../batchnorm.md)"),
        ("errors/orig-mod.md", "[test](../../tests/test_docs.py)", "`tests/test_docs.py`"),
        ("metrics.md", "[uv](https://docs.astral.sh/uv/)", "[uv](https://docs.astral.sh/uv/)"),
    ],
)
def test_a_link_out_of_the_pages_becomes_the_name_of_the_file(page: str, link: str, shown: str) -> None:
    assert rendered(f"see {link}.", page) == f"see {shown}."


def test_a_code_block_loses_what_only_tests_read() -> None:
    """mkdocs would take the block, and all up to the next one, for something else."""
    text = "```sh nodes\ntorchrun a b\n```\n\n- x\n\n  ```python\n  a b\n  ```\n"
    assert rendered(text, "log.md") == text.replace(" nodes", "")


def test_the_reference_has_every_public_name() -> None:
    names = re.findall(r"^::: ckpttool\.(\w+)$", rendered("", "reference.md"), re.MULTILINE)
    assert {"open", "save", "Checkpoint", "CkptToolError"} <= set(names) == set(dict.fromkeys(names))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_site_is_built_strictly_and_asks_no_other_server(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {"index.html", "errors/orig-mod.html", "reference.html"} <= set(pages)
    asked = re.compile(r"<(?:link[^>]*stylesheet[^>]*href|script[^>]*src|img[^>]*src)=\"?https?://")
    assert [name for name, page in pages.items() if asked.search(page)] == []
    assert 'aria-label="Search"' in pages["index.html"]
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
