"""Which parameters an optimizer without names keeps, by the shapes of its momentum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .optimizer_slots import Shape

MOST_WAYS = 20_000
"""Ways followed at once; with more of them, none is certain."""


class _Way(NamedTuple):
    """One way to assign the parameters so far, as its last step."""

    before: _Way | None = None
    group: int = 0
    name: str = ""


def assignments(
    groups: Sequence[Sequence[Shape | None]], parameters: Sequence[tuple[str, Shape]]
) -> list[tuple[str, ...]]:
    """Return the ways to assign parameters to the places of an optimizer: none, one, or two of several.

    Each group is assumed to list its parameters in the model's order, as in every script that goes through
    `named_parameters()` once and sorts them into groups.

    Args:
        groups: the shape of the momentum at each place; None for a place without momentum, which fits any.
        parameters: (name, shape) in the model's order; those that fit nowhere may be left out.

    Returns:
        For each way the names at all places, group after group.
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
