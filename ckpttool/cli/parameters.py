"""Types of values on the command line."""

from __future__ import annotations

from typing import Any

import click


class Shape(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers separated by commas: `1,3,32,32`."""

    name = "shape"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            self.fail(f"'{value}' is not a shape such as 1,3,32,32", param, ctx)
        return tuple(int(part) for part in parts)


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: `500MB`, `5G`, `1GiB`."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the bytes. Raises UsageFault if the text is no size."""
        from ..formats.shards.writing import parse_size

        return value if isinstance(value, int) else parse_size(value)


class Pair(click.ParamType):  # type: ignore[type-arg]
    """Two parts separated by =, at the last one: names may hold others."""

    name = "pair"
    cut = staticmethod(str.rpartition)

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        left, equals, right = self.cut(value, "=")
        if not (left and equals and right):
            self.fail(f"'{value}' is not two parts separated by =", param, ctx)
        return left, self.second(right, param, ctx)

    def second(self, value: str, param: Any, ctx: Any) -> Any:
        """Convert the second part; a subclass may fail there."""
        return value


class Entry(Pair):
    """A name and a text separated by =, at the first one: the text may hold others."""

    name = "entry"
    cut = staticmethod(str.partition)


class SizesFor(Pair):
    """A shell pattern of keys, and whole numbers: `*.weight=1,0`."""

    name = "sizes"

    def second(self, value: str, param: Any, ctx: Any) -> tuple[int, ...]:
        return Shape().convert(value, param, ctx)
