"""The remedy for a model of another program: a map between the two architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Refused
from ...transforms.mapping.applying import apply, config_of
from ...transforms.mapping.builtin import maps
from ...transforms.mapping.matching import matched
from ...transforms.mapping.rules import Rules
from .fit import Case, Remedy


def mapped(case: Case) -> Iterator[Remedy]:
    """Change the architecture by a map that comes with the package, forwards or backwards."""
    config = cache(lambda: config_of(case.checkpoint))
    for rules in maps():
        yield _by(rules, (), config)
        if rules.reversible:
            yield _by(rules.inverse(), ("--inverse",), config)


def _by(rules: Rules, flags: tuple[str, ...], config: Callable[[], Mapping[str, Any]]) -> Remedy:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        return apply(checkpoint, rules, config=config(), optimizers=False)[0]

    message = f"the file has the names and layout of {rules.start}, the model those of {rules.end}"
    return Remedy("map", message, ("convert", "--map", rules.name, *flags), change)


def maps_between(theirs: Iterable[str], ours: Iterable[str]) -> Iterator[str]:
    """Yield the flags of each map whose rules take all names of one state and make those of another."""
    for rules in (rules for rules in maps() if rules.reversible):
        back = rules.inverse()
        for this, other, flags in ((rules, back, ""), (back, rules, " --inverse")):
            with suppress(Refused):
                sides = matched(this, theirs, ""), matched(other, ours, "")
                if all(side.moves and not side.rest for side in sides):
                    yield f"--map {rules.name}{flags}"
