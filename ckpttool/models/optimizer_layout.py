"""An optimizer of the user's as descriptions, and which of its parameters a file keeps the states of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..core.checkpoint.optimizer_names import (
    ORDER,
    Names,
    Order,
    Parameters,
    Undecided,
    by_shapes,
    check_shape,
    in_order,
    without_prefix,
)
from ..core.checkpoint.optimizer_view import OptimizerGroups
from ..core.checkpoint.prefixes import WRAPPERS
from ..core.checkpoint.special_tensors import Shape
from ..core.tensors.ref import TensorRef
from ..errors import UsageFault

WRAPPER = re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, WRAPPERS))})")

Entry = dict[str, Any]
Needs = Mapping[str, Mapping[str, TensorRef | None]]  # what is kept of each parameter; None for no tensor


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """An optimizer that a state is to be loaded into, as descriptions; names are the model's."""

    kind: str  # its class
    groups: Sequence[Names]  # the parameters of each
    settings: Sequence[Entry]  # of each group
    shapes: Mapping[str, Shape]  # of all parameters of the model, in its order
    dtypes: Mapping[str, str]  # of the same
    trainable: frozenset[str]
    buffers: frozenset[str]
    ties: Mapping[str, str]  # another name of a parameter -> its first one
    fresh: Mapping[str, Entry]  # what it keeps before the first step, by parameter
    # What a fresh one with such settings keeps after a step; a parameter is missing where that is not known.
    needs: Callable[[Sequence[Entry]], Needs] = field(default=lambda _: {})

    @property
    def names(self) -> Names:
        """All parameters, in the order in which torch counts them."""
        return tuple(chain(*self.groups))

    def known(self, names: Sequence[str]) -> list[str | None]:
        """Return the model's names for those of a file, without wrappers' prefixes; None for none of it."""
        own = {**{name: name for name in self.shapes}, **self.ties}
        buffers = {name: name for name in self.buffers}
        plain = {WRAPPER.sub("", name): first for name, first in (own | buffers).items()}
        bare = without_prefix(names, own)
        found = (own.get(name) or plain.get(WRAPPER.sub("", name)) for name in bare)
        return [*found]


def require_names(groups: Sequence[Sequence[str | None]], spec: str) -> None:
    """Raise UsageFault where an optimizer holds a parameter that is none of the model's."""
    for number, group in enumerate(groups):
        if None in group:
            place = f"number {group.index(None)} of its group {number}"
            what = f"{spec}: the optimizer has a parameter that is none of the model's: {place}"
            raise UsageFault(what, hint="build it of the model's parameters, or name a factory of the whole")


def named(
    groups: OptimizerGroups, live: LiveOptimizer, states: Sequence[Parameters], order: Order | None
) -> tuple[OptimizerGroups, bool]:
    """Return the parameters with their names, and whether an order was assumed to find them."""
    listed = [*chain(*groups)]
    if all(each.name is not None for each in listed):
        for shapes in map(dict, states):
            if all(each.name in shapes for each in listed):
                for each in listed:
                    check_shape(each, shapes[str(each.name)], "the file")
                break
        return groups, False
    if not any(keeps(each.entry) for each in listed):
        return groups, False  # nothing is kept that could be another's
    names, was_ordered = _found(groups, live, states, order)
    given = iter(names)
    return [[each._replace(name=next(given)) for each in group] for group in groups], was_ordered


def _found(
    groups: OptimizerGroups, live: LiveOptimizer, states: Sequence[Parameters], order: Order | None
) -> tuple[Names, bool]:
    """Return the names of an optimizer that has none: by shapes, by the state's order, by its own."""
    shapes = [[each.shape for each in group] for group in groups]
    flat = [*chain(*shapes)]
    lists = [_candidates(state, live, len(flat)) for state in states]
    pairs = zip(flat, (live.shapes[name] for name in live.names), strict=False)
    fits = [*map(len, groups)] == [*map(len, live.groups)] and all(a in (None, b) for a, b in pairs)
    if (
        order is None
        and len(sure := _distinct(live, (w for each in lists for w in by_shapes(flat, each)))) == 1
    ):
        return sure[0], False
    if order == "model":
        model = [(name, live.shapes[name]) for name in live.shapes if name in live.names]
        ways = [live.names] if fits else _distinct(live, in_order(shapes, model))
    else:
        ways = _distinct(live, (way for each in lists for way in in_order(shapes, each)))
        if order is None and fits and (not ways or any(_is_in_order(live, each) for each in lists)):
            ways = [live.names]
        elif order is None and fits and ways:
            what = "the file's state and the optimizer list them in orders that both fit"
            raise Undecided(f"names no parameters, and {what}", hint=ORDER)
    if len(ways) == 1:
        return ways[0], True
    which = "more than one assignment" if ways else "no assignment"
    of = "the model's parameters" if order == "model" else "the tensors of the file's state"
    hint = "save it with names: torch.optim takes model.named_parameters() from torch 2.6 on"
    raise Undecided(f"names no parameters, and {which} of {of} fits its shapes", hint=hint)


def _candidates(state: Parameters, live: LiveOptimizer, count: int) -> Parameters:
    """Return what of a state an optimizer of so many parameters may keep: all, or what is trained."""
    names = live.known([name for name, _ in state])
    found = [(each, name) for each, name in zip(state, names, strict=True) if name not in live.buffers]
    trained = [each for each, name in found if name is None or name in live.trainable]
    return trained if len(trained) == count else [each for each, _ in found]


def _distinct(live: LiveOptimizer, ways: Any) -> list[Names]:
    """Return the ways that differ in more than prefixes, such as those by a state and by its average."""
    found: dict[tuple[str, ...], Names] = {}
    for way in ways:
        known = live.known(way)
        found.setdefault(tuple(name or old for name, old in zip(known, way, strict=True)), way)
    return [*found.values()]


def _is_in_order(live: LiveOptimizer, state: Parameters) -> bool:
    """Return whether each group of the live optimizer lists its parameters in the order of a state."""
    place = {name: number for number, name in enumerate(live.known([name for name, _ in state]))}
    places = [[place.get(name, -1) for name in group] for group in live.groups]
    return all(-1 not in group and group == sorted(group) for group in places)


def keeps(entry: object) -> bool:
    """Return whether something is kept of a parameter: SGD without momentum has entries of None."""
    return isinstance(entry, dict) and any(value is not None for value in entry.values())
