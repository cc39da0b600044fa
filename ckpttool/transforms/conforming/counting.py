"""Whether what was paired by numbers counts up on both sides, wherever something else tells which is which.

A U-Net's blocks may count up in one library and down in another: of two that are equal the numbers would say
the wrong one, and the others, which shapes tell apart, show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise

from .layers import Match
from .modules import Parts, counted, pattern

Place = tuple[Parts, int]  # a pattern of the parts before one that counts, and their number


def varying(names: list[Parts]) -> int:
    """Return which part of names differs among them; they have the same pattern."""
    return next(place for place, column in enumerate(zip(*names, strict=True)) if len({*column}) > 1)


def falling(matches: Iterable[Match], trusted: Iterable[tuple[list[Parts], list[Parts]]]) -> Iterator[str]:
    """Yield, in words, where numbers that were trusted do not rise together.

    Args:
        matches: everything that was matched.
        trusted: the names on both sides of what was paired by numbers.
    """
    bare = cache(pattern)
    places = [tuple((names, varying(names)) for names in sides) for sides in trusted]
    known = {tuple((bare(names[0][:at]), at) for names, at in sides) for sides in places}
    seen: dict[object, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for match in matches:
        pair = match.left[0].first.parts, match.right[0].first.parts
        for sides in known:
            if all(
                len(parts) > at and bare(parts[:at]) == begin
                for parts, (begin, at) in zip(pair, sides, strict=True)
            ):
                numbers = [counted((parts[at],)) for parts, (_, at) in zip(pair, sides, strict=True)]
                before = tuple(parts[:at] for parts, (_, at) in zip(pair, sides, strict=True))
                if all(numbers):
                    words = tuple(pattern((parts[at],)) for parts, (_, at) in zip(pair, sides, strict=True))
                    seen[before, words][numbers[0][-1]].add(numbers[1][-1])
    for (before, _), found in seen.items():  # type: ignore[misc]
        order = [found[number] for number in sorted(found)]
        if any(max(a) >= min(b) for a, b in pairwise(order)):
            left, right = (".".join(parts) or "the top" for parts in before)
            yield f"the numbers below '{left}' and '{right}' do not count in the same direction"
