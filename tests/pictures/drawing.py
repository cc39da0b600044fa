"""A terminal drawn as SVG, and the text of such a picture."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from typing import Any

CELL = 12.2  # of rich's drawing: the width of a character

# Light letters on a dark window, which is read on a light page and on a dark one. Fonts are the reader's own:
# an SVG in a page may load nothing.
FRAME = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>A terminal with the output of ckpttool inspect, strip-prefix, diff and scan</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
  font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def drawn(text: str, width: int) -> str:
    """Return an SVG of a terminal of so many columns that shows a text with its escape codes."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI
    from rich.text import Text

    colours: Any = {"force_terminal": True, "color_system": "standard", "highlight": False}
    console = Console(record=True, width=width, file=io.StringIO(), **colours)
    console.print(Text.from_ansi(text), soft_wrap=False)
    svg = console.export_svg(title="", theme=DIMMED_MONOKAI, code_format=FRAME, unique_id="t")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def text_of(svg: str) -> str:
    """Return the text of such a picture, line by line."""
    lines: dict[float, str] = {}
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        place, words = round(float(element.attrib["x"]) / CELL), (element.text or "").replace("\xa0", " ")
        y = float(element.attrib["y"])
        lines[y] = lines.get(y, "").ljust(place) + words
    step = min(b - a for a, b in zip(sorted(lines), sorted(lines)[1:], strict=False))
    first, last = min(lines), max(lines)
    numbers = {round((y - first) / step): text.rstrip() for y, text in lines.items()}
    return "\n".join(numbers.get(number, "") for number in range(round((last - first) / step) + 1))
