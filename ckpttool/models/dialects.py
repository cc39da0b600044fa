"""Remedies for a state in another dialect: other names, layers fused, split, stacked or transposed.

A map that comes with the package, or the rules that `conform` finds. Where `conform` refuses, what else
brings the file over: a map between the two, or plain tensors first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ..conforming.conform import Conformed, conform, require_certain
from ..conforming.modules import Blueprint, Places, places_of
from ..conforming.search import search
from ..core.checkpoint.checkpoint import Checkpoint
from ..core.checkpoint.optimizer_names import to_names
from ..core.checkpoint.selection import drop
from ..core.formats.reading import opened
from ..errors import Ambiguous, CkptToolError, Mismatch, Refused, Unsupported
from ..mapping.applying import apply, config_of, maps
from ..mapping.rules import MapRules
from ..mapping.state_mapping import matched
from .fit import Aim, Case, Fit, Remedy, shortened
from .remedies import dequantized


def mapped(case: Case) -> Iterator[Remedy]:
    """Change the architecture by a map that comes with the package, forwards or backwards."""
    config = cache(lambda: config_of(case.checkpoint))
    for rules in maps():
        yield from _by(case.checkpoint, rules, (), config)
        if rules.reversible:
            yield from _by(case.checkpoint, rules.inverse(), ("--inverse",), config)


def _by(
    checkpoint: Checkpoint, rules: MapRules, flags: tuple[str, ...], config: Callable[[], Mapping[str, Any]]
) -> Iterator[Remedy]:
    """Yield a map as it is, then after what its optimizers need."""

    def changed(of: Checkpoint, before: Remedy | None = None) -> Checkpoint:
        return apply(before.apply(of) if before else of, rules, config=config())[0]

    with suppress(CkptToolError):
        apply(checkpoint, rules, config=config(), optimizers=False)  # else none of them works
        message = f"the file has the names and layout of {rules.start}, the model those of {rules.end}"
        by = Remedy("map", message, ("convert", "--map", rules.name, *flags), changed)
        yield by
        for step in _for_optimizers(checkpoint):
            yield replace(by, first=(step,), apply=partial(changed, before=step))


def _for_optimizers(checkpoint: Checkpoint) -> Iterator[Remedy]:
    """Yield what lets a map take optimizers along: names in the order of the state; else their removal."""
    message = "the optimizer names no parameters: they are taken in the order of the file's state"
    command = ("optimizer", "--to", "names", "--order", "state")
    yield Remedy("optimizer-names", message, command, lambda c: to_names(c, order="state")[0])
    found = [where for where, _ in checkpoint.optimizers()]
    if all(found):
        message = f"what an optimizer keeps can't follow the map, and is left out: {shortened((*found,))}"
        flags = [word for name in found for word in ("--drop", name)]
        yield Remedy("optimizer-left-out", message, ("convert", *flags), lambda c: drop(c, found))


def maps_between(theirs: Iterable[str], ours: Iterable[str]) -> Iterator[str]:
    """Yield the flags of each map whose rules take all names of one state and make those of another."""
    for rules in (rules for rules in maps() if rules.reversible):
        back = rules.inverse()
        for this, other, flags in ((rules, back, ""), (back, rules, " --inverse")):
            with suppress(Refused):
                sides = matched(this, theirs, ""), matched(other, ours, "")
                if all(side.moves and not side.rest for side in sides):
                    yield f"--map {rules.name}{flags}"


def conforming(case: Case) -> Iterator[Remedy]:
    """Bring a state under the model's names if there is one way. Raises Ambiguous where there are several."""
    try:
        made, found = conform(case.checkpoint, case.blueprint.places)
    except Ambiguous:
        raise
    except CkptToolError:
        return
    rests = ", ".join(dict.fromkeys(row.rests for row in found.table))
    message = f"the file has the model in another dialect; {len(found.table)} rules bring it over, by {rests}"
    yield Remedy("dialect", message, ("conform", *case.aim.words), lambda _: made)


def require_certain_names(case: Case) -> None:
    """Raise Ambiguous where layers of one shape could take each other's names, whatever else differs."""
    path = case.checkpoint.path
    theirs = {name: place for name, place in case.blueprint.places.items() if place.shape is not None}
    with suppress(Refused, Unsupported):  # no names are proposed for what is no plain tensor
        require_certain(path, search(path, places_of(path, case.state), theirs))


def question(case: Case, error: Ambiguous) -> str:
    """Return what is open, and the commands that decide it."""
    known = next(maps_between(case.state.tensors, case.blueprint.places), "")
    path = shlex.quote(case.checkpoint.path)
    way = "rules of your own: convert --map"
    if known:
        way = f"a map, with --config if the file's folder has none: ckpttool convert {path} OUT {known}"
    if case.aim.flag == "--like" and not case.checkpoint.packed:  # else its values are rounded
        values = f"ckpttool conform {path} OUT --like {shlex.quote(case.aim.name)} --check-values"
        way = f"if it holds the same model: {values}; or {way}"
    more = f"; and {len(error.candidates) - 3} more" if len(error.candidates) > 3 else ""
    ways = "; ".join(error.candidates[:3]) + more
    return f"names and shapes allow several ways: {ways}. What decides: {way}"


def conformed(
    checkpoint: Checkpoint, like: str | Places, *, state: str | None = None, **choices: Any
) -> tuple[Checkpoint, Conformed]:
    """Return what `conform` does. Raises what it raises, with a hint of what else brings the file over."""
    try:
        return conform(checkpoint, like, state=state, **choices)
    except (Ambiguous, Mismatch) as error:
        if isinstance(error, Mismatch) and not (error.missing or error.unexpected):
            raise  # rows alone differ
        places = like if isinstance(like, Mapping) else _places(like, choices.get("like_state"))
        if way := _way(checkpoint, places, state):
            is_open = isinstance(error, Ambiguous) and error.hint
            error.hint = f"{error.hint}; or {way}" if is_open else way  # what is to be pasted stands last
        raise


def _places(like: str, where: str | None) -> Places:
    with opened(like) as reference:
        return Blueprint.like(like, reference.state(where)).places


def _way(checkpoint: Checkpoint, places: Places, where: str | None) -> str:
    state = checkpoint.state(where)
    if flags := next(maps_between(state.tensors, places), ""):
        return f"a map is between the two: ckpttool convert {shlex.quote(checkpoint.path)} OUTPUT {flags}"
    case = Case(checkpoint, state, Blueprint(places, (), ()), Fit(), None, state, Aim("REF", "--like"))
    if any(dequantized(case)):
        plain = f"ckpttool convert {shlex.quote(checkpoint.path)} PLAIN --dequantize"
        return f"the file is quantised; make it plain, and conform that: {plain}"
    return ""
