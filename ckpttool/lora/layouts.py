"""What the layers of well-known models are called in files of adapters, by the tables in dialects.toml."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

WORD = re.compile(r"<([a-z]+)>")
PART = re.compile(r"(.+)@(\d+):(\d+)/(\d+)")
DIGITS = re.compile(r"\d+")


class Rows(NamedTuple):
    """The rows of a fused layer that are another's: `begin` to `end`, of `of` equal shares."""

    begin: int
    end: int
    of: int


WHOLE = Rows(0, 1, 1)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer of a model, under the names of both sides of its table."""

    component: str
    left: str
    right: str
    rows: Rows = WHOLE  # of the layer on the right
    was_right: bool = False  # the side that it was found by


@cache
def tables() -> dict[str, Any]:
    """Return what dialects.toml says."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, Any] = tomllib.loads(Path(__file__).with_name("dialects.toml").read_text("utf-8"))
    return found


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model's components and the names of their layers, as each dialect has them."""

    name: str
    components: Mapping[str, Mapping[str, Any]]
    of: Mapping[str, str]
    is_any: bool  # of models without a table, whose names stay
    only_from: tuple[str, ...]  # dialects that are looked up in it

    def tag(self, component: str, dialect: str) -> str:
        """Return what a dialect's names of a component begin with."""
        if dialect not in ("kohya", "comfy"):
            return component if dialect == "diffusers" else ""
        return str(self.components[component][dialect])

    def is_right(self, component: str, dialect: str) -> bool:
        """Return whether a dialect has the names on the right of the component's table."""
        return dialect in self.components[component].get("others", ())

    def places(self, component: str, joint: str, name: str, *, right: bool) -> list[LayerPlace]:
        """Return the layers that one side of the table calls so: several where it has them fused."""
        settings = self.components[component]
        bare = settings.get("bare", "")
        if bare and joint == "." and not name.startswith(bare):
            name = bare + name
        patterns = _patterns(settings["names"], right, joint)
        found = []
        for pattern, one, other, rows in patterns.get(DIGITS.sub("#", name), ()):
            if match := pattern.fullmatch(name):
                numbers = match.groups()
                found.append(LayerPlace(component, one.format(*numbers), other.format(*numbers), rows, right))
        return found

    def named(self, place: LayerPlace, dialect: str) -> str:
        """Return what a dialect calls a layer, in dots."""
        name = place.right if self.is_right(place.component, dialect) else place.left
        bare = self.components[place.component].get("bare", "")
        return name.removeprefix(bare) if dialect == "peft" else name


@cache
def layouts() -> tuple[ModelLayout, ...]:
    """Return all layouts, those of any model last."""
    return tuple(
        ModelLayout(
            name,
            each["components"],
            each.get("of", {}),
            each.get("any", False),
            tuple(each.get("only_from", tables()["dialects"])),
        )
        for name, each in tables()["layouts"].items()
    )


@cache
def _patterns(
    table: str, right_side: bool, joint: str
) -> Mapping[str, list[tuple[re.Pattern[str], str, str, Rows]]]:
    """Return the rows of a table by the names of one side, with `#` for each number."""
    found = defaultdict(list)
    for left, right, rows in _rows(table):
        name = (right if right_side else left).replace(".", joint)
        pattern = re.compile(r"(\d+)".join(map(re.escape, name.split("{}"))))
        found[DIGITS.sub("#", name.replace("{}", "0"))].append((pattern, left, right, rows))
    return found


def _rows(table: str) -> Iterator[tuple[str, str, Rows]]:
    names = tables()["names"][table]
    for left, right in names["rows"].items():
        for one, other in _spelled(left, right or left, names.get("words", {})):
            fused = PART.fullmatch(other)
            yield one, fused[1] if fused else other, Rows(*map(int, fused.groups()[1:])) if fused else WHOLE


def _spelled(left: str, right: str, words: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for each name that its words stand for."""
    word = WORD.search(left)
    if word is None:
        yield left, right
        return
    those = words[word[1]]
    for one, other in those.items() if isinstance(those, dict) else zip(those, those, strict=True):
        yield from _spelled(left.replace(word[0], one, 1), right.replace(word[0], other, 1), words)
