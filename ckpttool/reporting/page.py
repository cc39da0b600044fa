"""The page itself: the template, the script, the style and the data, in one file that asks for nothing.

Text of checkpoints is only in a block of JSON, in which no `<` is left, and the script shows it as text. The
policy lets the browser run this script and this style, by their hashes, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

STYLE = "page.css"
# In the order in which each needs those before it
SCRIPTS = (
    "elements.js",
    "names.js",
    "tables.js",
    "treemap.js",
    "tree.js",
    "changes.js",
    "charts.js",
    "page.js",
)


def page(title: str, data: Mapping[str, Any]) -> bytes:
    """Return a page of `data`: JSON values, whose texts are `printable`; NaN and infinity become null."""
    style, script = _text(STYLE), "".join(map(_text, SCRIPTS))
    filled = Template(_text("page.html")).substitute(
        title=escape(title),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=as_block(data),
    )
    return filled.encode()


def as_block(data: Mapping[str, Any]) -> str:
    """Return JSON that nothing in it can end as a block of HTML."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(name: str) -> str:
    return files(__package__).joinpath("web").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
