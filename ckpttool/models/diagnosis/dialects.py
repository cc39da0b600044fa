"""The remedy for a state in another dialect: other names, layers fused, split, stacked or transposed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ...errors import Ambiguous, CkptToolError, Refused, Unsupported
from ...transforms.conforming.conform import conform, require_certain
from ...transforms.conforming.places import places_of
from ...transforms.conforming.search import search
from .fit import Case, Remedy
from .map_remedies import maps_between


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
    known = next(maps_between(case.state.tensors, case.blueprint.places), "--map RULES")
    way = f"ckpttool convert … {known}, with the model's --config config.json"
    if case.aim.flag == "--like":
        way = (
            f"ckpttool conform … --like {case.aim.name} --check-values, if it holds the same model; or {way}"
        )
    more = f"; and {len(error.candidates) - 3} more" if len(error.candidates) > 3 else ""
    return (
        f"names and shapes allow several ways: {'; '.join(error.candidates[:3])}{more}. What decides: {way}"
    )
