"""Which parameters an optimizer without names keeps, by the shapes of its momentum."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .slots import Shape

MOST_WAYS = 20_000
"""Ways followed at once; with more of them, none is certain."""


class _Way(NamedTuple):
    """One way to assign the parameters so far, as its last step."""

    before: _Way | None = None
    group: int = 0
    name: str = ""


def by_shapes(
    places: Sequence[Shape | None], parameters: Sequence[tuple[str, Shape]]
) -> list[tuple[str, ...]]:
    """Return the ways to assign parameters to the places of an optimizer, in any order: none, one, or two.

    Args:
        places: the shape of the momentum at each place; None for a place without momentum, which fits any.
        parameters: (name, shape); those that fit nowhere may be left out.

    Returns:
        For each way the names at all places; two of several.
    """
    # Of a choice between parameters, the one takes the first and the other the last.
    ways = [_first_fit(places, order) for order in (parameters, parameters[::-1])]
    return [*dict.fromkeys(way for way in ways if way is not None)]


def _first_fit(
    places: Sequence[Shape | None], parameters: Sequence[tuple[str, Shape]]
) -> tuple[str, ...] | None:
    free: dict[Shape, deque[str]] = defaultdict(deque)
    for name, shape in parameters:
        free[shape].append(name)
    try:
        taken = [None if shape is None else free[shape].popleft() for shape in places]
    except IndexError:
        return None
    used = {*taken}
    others = iter([name for name, _ in parameters if name not in used])
    names = [next(others, None) if name is None else name for name in taken]
    return None if None in names else tuple(map(str, names))


def in_order(
    groups: Sequence[Sequence[Shape | None]], parameters: Sequence[tuple[str, Shape]]
) -> list[tuple[str, ...]]:
    """Return the ways to assign parameters to an optimizer that lists those of each group in their order.

    Scripts make such an optimizer that go through `named_parameters()` once and sort them into groups. One
    that puts the new layers first is another, and nothing in its state tells: whoever asks must know.

    Args:
        groups: the shape of the momentum at each place; None for a place without momentum, which fits any.
        parameters: (name, shape) in the model's order; those that fit nowhere may be left out.

    Returns:
        For each way the names at all places, group after group: none, one, or two of several.
    """
    spare = len(parameters) - sum(map(len, groups))
    reached: dict[tuple[int, ...], list[_Way]] = {(0,) * len(groups): [_Way()]}
    for seen, (name, shape) in enumerate(parameters):
        following: dict[tuple[int, ...], list[_Way]] = {}
        for at, ways in reached.items():
            if seen - sum(at) < spare:
                following.setdefault(at, []).extend(ways)
            for group, place in enumerate(at):
                if place < len(groups[group]) and groups[group][place] in (None, shape):
                    there = (*at[:group], place + 1, *at[group + 1 :])
                    following.setdefault(there, []).extend(_Way(way, group, name) for way in ways)
        reached = {at: ways[:2] for at, ways in following.items()}  # two show that there are several
        if len(reached) > MOST_WAYS:
            return []
    ended = reached.get(tuple(map(len, groups)), []) if spare >= 0 else []
    return [_names(way, len(groups)) for way in ended]


def _names(way: _Way, count: int) -> tuple[str, ...]:
    groups: list[list[str]] = [[] for _ in range(count)]
    for step in _back(way):
        groups[step.group].append(step.name)
    return tuple(name for group in groups for name in reversed(group))


def _back(way: _Way) -> Iterator[_Way]:
    while way.before is not None:
        yield way
        way = way.before
