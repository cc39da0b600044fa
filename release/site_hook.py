"""What the pages get before mkdocs renders them: links to files of the repository become their names."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import ckpttool

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)\)")
REFERENCE = "reference.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page. mkdocs calls this, by its name."""
    place = page.file.src_uri

    def shown(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[2]))
        return f"`{target.removeprefix('../')}`" if target.startswith("../") else match[0]

    text = LINK.sub(shown, markdown)
    return "\n\n".join([text, *_reference()]) if place == REFERENCE else text


def _reference() -> list[str]:
    """Return a line for each public name, in whose place mkdocstrings puts its docstring."""
    return [f"::: ckpttool.{name}" for name in vars(ckpttool)["__all__"] if not name.startswith("_")]
