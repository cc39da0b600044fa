"""The remedy for a state in another dialect: other names, layers fused, split, stacked or transposed."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import Ambiguous, CkptToolError
from ...transforms.conforming.conform import conform
from .fit import Case, Remedy


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
