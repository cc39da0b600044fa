"""Types of what is given on the command line."""

from __future__ import annotations

from typing import Any

import click


class Shape(click.ParamType):  # type: ignore[type-arg]
    """Counts with commas between them: `1,3,32,32`."""

    name = "shape"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            self.fail(f"'{value}' is not a shape such as 1,3,32,32", param, ctx)
        return tuple(int(part) for part in parts)


class Pair(click.ParamType):  # type: ignore[type-arg]
    """Two things with = between them, cut at the last one: names may hold another."""

    name = "pair"
    cut = staticmethod(str.rpartition)

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        left, equals, right = self.cut(value, "=")
        if not (left and equals and right):
            self.fail(f"'{value}' is not two parts with = between them", param, ctx)
        return left, self.second(right, param, ctx)

    def second(self, value: str, param: Any, ctx: Any) -> Any:
        return value


class Entry(Pair):
    """A name and a text with = between them, cut at the first one: the text may hold others."""

    name = "entry"
    cut = staticmethod(str.partition)


class SizesFor(Pair):
    """A shell pattern of keys and counts: `*.weight=1,0`."""

    name = "sizes"

    def second(self, value: str, param: Any, ctx: Any) -> tuple[int, ...]:
        return Shape().convert(value, param, ctx)
