"""The numbers of layers in names, and how many a file and a model have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Return stem -> numbers that follow it in names: `layers.` -> {0, 1, 2}."""
    found: dict[str, set[int]] = {}
    for name in names:
        for part in re.finditer(r"(?:^|\.)([0-9]{1,6})(?=\.)", name):
            found.setdefault(name[: part.start(1)], set()).add(int(part[1]))
    return found


def unequal_counts(theirs: Iterable[str], ours: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (stem, how many in the file, how many in the model) where both count from 0 and end apart."""
    there, here = numbers(theirs), numbers(ours)
    for stem in here.keys() & there.keys():
        theirs_count, ours_count = len(there[stem]), len(here[stem])
        is_whole = there[stem] == {*range(theirs_count)} and here[stem] == {*range(ours_count)}
        if is_whole and theirs_count != ours_count:
            yield stem, theirs_count, ours_count
