"""How shards are named, and the series of them among the names in a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

# How shards are named: by transformers and what follows it; by torchtune, with the epoch.
NUMBERED = re.compile(r"(?P<begin>.+-)(?P<number>\d{5,7})-of-(?P<count>\d{5,7})(?P<end>\.[a-z]+)")

OF_TORCHTUNE = re.compile(r"(?P<begin>hf_model_)(?P<number>\d{4})(?P<end>_\d{1,6}\.pt)")


class Series(NamedTuple):
    """How the names of shards begin and end, and how many they say there are, or None where they don't."""

    begin: str
    end: str
    total: int | None

    @property
    def pattern(self) -> str:
        return f"{self.begin}*{self.end}"

    def missing(self, numbers: Collection[int]) -> list[int]:
        """Return the first few numbers that are not there."""
        every = range(1, (self.total or max(numbers)) + 1)
        return list(islice((number for number in every if number not in numbers), 8))


def series_in(names: Iterable[str]) -> dict[Series, dict[int, str]]:
    """Return the shards among names, by series and number."""
    series: dict[Series, dict[int, str]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name) or OF_TORCHTUNE.fullmatch(name):
            count = match.groupdict().get("count")
            like = Series(match["begin"], match["end"], int(count) if count else None)
            series.setdefault(like, {})[int(match["number"])] = name
    return series
