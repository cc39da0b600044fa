"""Try remedies on a state until it fits its model or none brings it nearer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.state import State
from ...errors import CkptToolError
from . import name_remedies, value_remedies
from .case import Case, Finder, Remedy
from .fit import Blueprint, Fit, compare

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
"""From certain to guessed: earlier ones are tried first."""

ROUNDS = 12
"""How many remedies are applied at most."""

Accepts = Callable[[State], bool]


def declines(_: State) -> bool:
    """Return False: the model has no loading rules of its own."""
    return False


@dataclass(frozen=True, slots=True)
class Treatment:
    """A case after the remedies that helped, in their order."""

    case: Case
    remedies: tuple[Remedy, ...] = ()


def treat(case: Case, finders: tuple[Finder, ...] = FINDERS, accepts: Accepts = declines) -> Treatment:
    """Apply remedies as long as they bring a state nearer to its model.

    Args:
        case: the state and its model.
        finders: find the remedies to try, in order.
        accepts: return whether the model takes a state by loading rules of its own; then it fits.

    Returns:
        The case after the remedies that helped, with its new fit, and those remedies.
    """
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
    """Return the remedy of one kind that helps most and the case after it, or None."""
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
        return None  # the command would fail too
    return replace(case, checkpoint=checkpoint, state=state, fit=compare(state, case.blueprint))


def as_reloaded(checkpoint: Checkpoint, state: State, blueprint: Blueprint) -> tuple[str, Case]:
    """Return a state as `reload` loads it: without wrappers' prefixes, with its ties, without stray values.

    Args:
        checkpoint: the file.
        state: the state in it.
        blueprint: of the model.

    Returns:
        The prefix that was removed, `""` for none, and the state with its fit. Entries that are not tensors
        and that the model does not ask for (an epoch beside the weights) are left out.
    """
    alone = replace(checkpoint, tree=state.container)
    finders = name_remedies.wrappers, value_remedies.ties
    treated = treat(Case(alone, state, blueprint, compare(state, blueprint), None, state), finders)
    prefix = "".join(remedy.command[2] for remedy in treated.remedies if remedy.kind == "prefix")
    fitted = treated.case.state
    asked = {name: value for name, value in fitted.others.items() if name in blueprint.places}
    fitted = replace(fitted, others=asked)
    return prefix, replace(treated.case, state=fitted, fit=compare(fitted, blueprint))
