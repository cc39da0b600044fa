"""What pages get around mkdocs: links to files of the repository become names, the search gets one, and code
blocks lose the words that only tests read.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import ckpttool

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)\)")
FENCE = re.compile(r"^( *```\w+) .+$", re.MULTILINE)  # mkdocs takes no word behind the language
REFERENCE = "reference.md"
SEARCH = 'data-md-component="search" role="dialog"'


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page. mkdocs calls this, by its name."""
    place = page.file.src_uri

    def shown(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[2]))
        return f"`{target.removeprefix('../')}`" if target.startswith("../") else match[0]

    text = FENCE.sub(r"\1", LINK.sub(shown, markdown))
    if place == REFERENCE:  # mkdocstrings shows the docstrings with links
        return "\n\n".join([text.partition("<!-- api -->")[0], *_reference()])
    return text


def on_post_page(output: str, **_: Any) -> str:
    """Return a page's HTML with a name for its search, which the theme leaves without. mkdocs calls this."""
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"')


def _reference() -> list[str]:
    """Return a line for each public name, in whose place mkdocstrings puts its docstring."""
    return [f"::: ckpttool.{name}" for name in vars(ckpttool)["__all__"] if not name.startswith("_")]
