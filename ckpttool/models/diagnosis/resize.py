"""A model built in the sizes of a file, by other arguments of its factory, which is run for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import UsageFault
from .. import factory
from ..skeleton import skeleton
from .case import Case
from .fit import Blueprint, Fit, compare

BUILDS = 16
"""Models that are built in the search, at most."""

# What factories that take anything (torchvision's) call the number of outputs.
OUTPUTS = ("num_classes", "num_labels", "out_features")


def resized(spec: str, case: Case) -> tuple[str, str] | None:
    """The SPEC with which a state whose names fit fits in its sizes too, and what is different; or None.

    An argument is changed when it has a size of the model's, and the file has another in that place.
    """
    changes: dict[str, tuple[object, int]] = {}
    fit, builds = case.fit, 0
    while fit.distance and builds < BUILDS:
        for name, old, new in _candidates(spec, fit):
            builds += 1
            longer = factory.respelled(spec, {name: new})
            nearer = _fit(longer, case)
            if nearer is not None and nearer.distance < fit.distance:
                changes[name] = (changes.get(name, (old, 0))[0], new)
                spec, fit = longer, nearer
                break
        else:
            break
    if fit.distance:
        return None
    words = ", ".join(
        f"{name} is {new} in the file and {old} in the model" for name, (old, new) in changes.items()
    )
    return spec, words


def _fit(spec: str, case: Case) -> Fit | None:
    try:
        return compare(case.state, Blueprint.of(skeleton(spec)))
    except UsageFault:
        return None  # it does not take such an argument, or not with such a value


def _candidates(spec: str, fit: Fit) -> Iterator[tuple[str, Any, int]]:
    """(argument, value that it has, size that the file has instead), each once."""
    sizes: dict[tuple[int, int], None] = {}
    for _, theirs, ours in fit.mismatched:
        pairs = zip(_sizes(theirs), _sizes(ours), strict=False)
        sizes |= {(wanted, given): None for wanted, given in pairs if wanted != given}
    given, takes_anything = factory.arguments(spec)
    for wanted, had in sizes:
        for name, value in given.items():
            if type(value) is int and value == had:
                yield name, value, wanted
        if takes_anything:
            yield from ((name, had, wanted) for name in OUTPUTS if name not in given)


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.strip("[]").split(", ") if size.isdigit()]
