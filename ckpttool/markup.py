"""HTML made of elements: text and attributes are escaped by the standard library, whoever forgets to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from .words import printable

Child = str | Element


def element(tag: str, *children: Child, **attributes: str) -> Element:
    """Return an element; text in it is made `printable`. `class_` is the attribute `class`."""
    made = Element(tag, {name.rstrip("_"): printable(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + printable(child)
        else:
            made.text = (made.text or "") + printable(child)
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Element:
    """Return a table, its columns aligned to the left."""
    made = element("table")
    if head:
        made.append(element("tr", *(element("th", title, style="text-align:left") for title in head)))
    for row in rows:
        line = SubElement(made, "tr")
        line.extend(element("td", cell, style="text-align:left;vertical-align:top") for cell in row)
    return made


def folded(summary: str, *children: Child, is_open: bool = False) -> Element:
    """Return something that is folded under a line of text."""
    state = {"open": "open"} if is_open else {}
    return element("details", element("summary", summary), *children, style="margin-left:1em", **state)


def html(*elements: Element) -> str:
    """Return elements as HTML, in one `div`."""
    return tostring(element("div", *elements), encoding="unicode", method="html")
