"""What else brings a file over where `conform` refuses: a map between the two, or plain tensors first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...errors import Ambiguous, Mismatch
from ...formats.reading import opened
from ...transforms.conforming.conform import Conformed, conform
from ...transforms.conforming.places import Places
from .fit import Aim, Blueprint, Case, Fit
from .map_remedies import maps_between
from .value_remedies import dequantized


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
            error.hint = f"{way}; else: {error.hint}" if is_open else way
        raise


def _places(like: str, where: str | None) -> Places:
    with opened(like) as reference:
        return Blueprint.like(like, reference.state(where)).places


def _way(checkpoint: Checkpoint, places: Places, where: str | None) -> str:
    state = checkpoint.state(where)
    if flags := next(maps_between(state.tensors, places), ""):
        return f"a map is between the two: ckpttool convert INPUT OUTPUT {flags}"
    case = Case(checkpoint, state, Blueprint(places, (), ()), Fit(), None, state, Aim("REF", "--like"))
    if any(dequantized(case)):
        return "INPUT is quantised: ckpttool convert INPUT PLAIN --dequantize, and conform that"
    return ""
