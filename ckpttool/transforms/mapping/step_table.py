"""A step as a table of a rule file, read: `{ concat = 0, sizes = [64, 16, 16] }`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from ...errors import UsageFault
from .numbers import parsed
from .toml_text import text as toml
from .verbs import (
    WRITTEN,
    Cast,
    Concat,
    PermuteHeads,
    Reshape,
    Scale,
    Split,
    Stack,
    Step,
    Transpose,
    Unstack,
)

VERBS: dict[str, type[Step]] = {
    step.verb: step for step in (Concat, Split, Stack, Unstack, Transpose, PermuteHeads, Reshape, Scale, Cast)
}


READ = {written: name for name, written in WRITTEN.items()}


def step_of(table: Mapping[str, Any]) -> Step:
    """Return the step that a table of a rule file describes. Raises UsageFault."""
    found = [verb for verb in table if verb in VERBS]
    if len(found) != 1:
        hint = f"a step is a table with one of {', '.join(VERBS)}, such as {{concat = 0}}"
        close = [each for key in table for each in get_close_matches(key, VERBS, 1)]
        if close and not found:
            hint = f"did you mean {close[0]}? {hint}"
        raise UsageFault(f"the step {toml(table)[:200]} has {len(found)} verbs", hint=hint)
    kind = VERBS[found[0]]
    known = {each.name for each in fields(kind)}
    given: dict[str, Any] = {}
    for key, value in table.items():
        name = kind.own if key == kind.verb else READ.get(key, key)
        if name not in known or key in WRITTEN or (key != kind.verb and name == kind.own):
            raise UsageFault(f"the step '{kind.verb}' takes no '{key}'")
        given[name] = _of_kind(f"{kind.verb}: {key}", value, name)
    return kind(**given)


def _of_kind(where: str, value: Any, name: str) -> Any:
    """Return the value of a field, lists as tuples. Raises UsageFault for one of another kind."""
    if isinstance(value, list):
        value = tuple(value)
    if not KINDS[name](value):
        raise UsageFault(f"{where} = {value!r} is of another kind than it takes")
    return value


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) is int or (isinstance(value, str) and bool(parsed(value)))


def _all(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(kind, value))


KINDS: dict[str, Callable[[object], bool]] = {
    "axis": _is_int,
    "axes": _all(_is_int),
    "parts": _all(lambda part: type(part) is int and part >= 0),
    "sizes": _all(_is_number),
    "shape": _all(_is_number),
    "before": _all(_is_number),
    "heads": _is_number,
    "size": _is_number,
    "by": lambda value: type(value) in (int, float) and isfinite(value),  # type: ignore[arg-type]
    "to": lambda value: isinstance(value, str),
    "field": lambda value: isinstance(value, str),
}
