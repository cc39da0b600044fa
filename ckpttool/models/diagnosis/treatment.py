"""Remedies tried on a state until it fits its model, or none brings it nearer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...checkpoint.checkpoint import State
from ...errors import CkptToolError
from . import name_remedies, value_remedies
from .case import Case, Finder, Remedy
from .fit import Fit, compare

FINDERS: tuple[Finder, ...] = (
    value_remedies.complex_parts,
    name_remedies.wrappers,
    name_remedies.wrappers_inside,
    name_remedies.renumbered,
    name_remedies.prefixes,
    name_remedies.renamed_parts,
    value_remedies.counters,
    value_remedies.ties,
    value_remedies.layouts,
    value_remedies.shapes,
    name_remedies.same_order,
    value_remedies.extras,
)
"""From what is certain to what is a guess: an earlier one is tried first."""

ROUNDS = 12
"""Remedies one after another, at most."""

Accepts = Callable[[State], bool]


def declines(_: State) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Treatment:
    """A case after the remedies that helped."""

    case: Case
    remedies: tuple[Remedy, ...] = ()


def treat(case: Case, finders: tuple[Finder, ...] = FINDERS, accepts: Accepts = declines) -> Treatment:
    """Applies remedies for as long as they bring a state nearer to its model."""
    used: list[Remedy] = []
    while case.fit.distance and len(used) < ROUNDS:
        if accepts(case.state):
            return Treatment(replace(case, fit=Fit()), tuple(used))
        found = next(filter(None, (_best(case, finder) for finder in finders)), None)
        if found is None:
            break
        remedy, case = found
        used.append(remedy)
    return Treatment(case, tuple(used))


def _best(case: Case, finder: Finder) -> tuple[Remedy, Case] | None:
    """The remedy of one kind that helps most, and the case after it."""
    best: tuple[Remedy, Case] | None = None
    for remedy in finder(case):
        after = _after(case, remedy)
        if after is not None and after.fit.distance < (best[1] if best else case).fit.distance:
            best = remedy, after
    return best


def _after(case: Case, remedy: Remedy) -> Case | None:
    try:
        checkpoint = remedy.apply(case.checkpoint)
        state = checkpoint.state()
    except CkptToolError:
        return None  # the command would fail in the same way
    return replace(case, checkpoint=checkpoint, state=state, fit=compare(state, case.blueprint))
