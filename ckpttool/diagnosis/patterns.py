"""Shell patterns that select the keys to change and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase, translate

Sizes = tuple[int, ...]


def grouped(values: Mapping[str, Sizes], names: Iterable[object]) -> list[tuple[str, Sizes]]:
    """The fewest shell patterns that give each name its value: `*.weight` where all such names do."""
    everything = [str(name) for name in names]
    rules: dict[str, Sizes] = {}
    for name, value in values.items():
        if any(fnmatchcase(name, pattern) for pattern in rules):
            continue
        rules[next(p for p in _patterns(name) if _tells(p, value, values, everything))] = value
    return list(rules.items())


def _patterns(name: str) -> Iterator[str]:
    """From the widest to the name itself."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield "*." + ".".join(_literal(part) for part in parts[-count:])
    yield _literal(name)


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _tells(pattern: str, value: Sizes, values: Mapping[str, Sizes], names: list[str]) -> bool:
    """Whether a pattern is worth it: it matches several names, and all that it matches have this value."""
    fits = re.compile(translate(pattern)).match
    fitting = [values.get(name) for name in names if fits(name)]
    return all(found == value for found in fitting) and len(fitting) > pattern.startswith("*.")
