"""The page docs/reference.md: every public name with its signature and docstring, generated.

python -m tests.test_reference_page
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import ckpttool
from tests.support.generated_page import generated, regenerate
from tests.support.running import ROOT

pytestmark = pytest.mark.lint

PAGE = ROOT / "docs" / "reference.md"
MARKS = "<!-- api -->\n", "<!-- /api -->\n"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)


def page() -> str:
    """Return the generated part of the page."""
    named = {name: getattr(ckpttool, name) for name in sorted(ckpttool.__all__, key=str.lower)}
    shown = {name: value for name, value in named.items() if not inspect.ismodule(value)}
    modules = ", ".join(f"`ckpttool.{name}`" for name in named if name not in shown)
    listed = ", ".join(f"[`{name}`](#{name.lower()})" for name in shown)
    return "\n".join(["", listed, f"\nModules, with docstrings of their own: {modules}.", *parts(shown), ""])


def parts(shown: dict[str, Any]) -> Iterator[str]:
    for name, value in shown.items():
        yield f"\n## {name}\n"
        if not inspect.isclass(value):
            yield f"```text\n{signature(name, value)}\n```\n"
        yield from documented(value)


def signature(name: str, value: Any) -> str:
    """Return the call of a function, one parameter to a line where it is long."""
    found = inspect.signature(value)
    listed, before = list[str](), None
    for each in found.parameters.values():
        if each.kind is each.KEYWORD_ONLY != before:
            listed.append("*")
        before = each.kind
        stars = {each.VAR_KEYWORD: "**", each.VAR_POSITIONAL: "*"}.get(each.kind, "")
        default = (
            ""
            if each.default is each.empty
            else f" = {'…' if callable(each.default) else repr(each.default)}"
        )
        listed.append(f"{stars}{each.name}: {each.annotation}{default}")
    line = f"{name}({', '.join(listed)}) -> {found.return_annotation}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in listed), f") -> {found.return_annotation}"])


def documented(value: Any) -> Iterator[str]:
    """Yield a docstring as Markdown: paragraphs, lists of what is described, examples."""
    text = (inspect.getdoc(value) or "") + "\n"
    yield SECTION.sub("", text).strip() + "\n"
    for section in SECTION.finditer(text):
        title, body = section[1], textwrap.dedent(section[2]).strip("\n")
        if title == "Example":
            yield f"```pycon\n{body}\n```"
        elif title == "Returns":
            yield f"Returns: {' '.join(body.split())}\n"
        else:
            entries = [" ".join(entry.split()) for entry in ENTRY.split(body) if entry.strip()]
            items = (re.sub(r"^([\w, ]+):", r"**\1**:", entry) for entry in entries)
            yield f"{title}:\n\n" + "\n".join(f"- {item}" for item in items) + "\n"


def test_the_reference_page_is_what_the_docstrings_say() -> None:
    assert generated(PAGE, *MARKS) == page(), "stale: python -m tests.test_reference_page"


if __name__ == "__main__":
    regenerate(PAGE, *MARKS, page())
