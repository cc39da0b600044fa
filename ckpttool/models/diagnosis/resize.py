"""Find the arguments of a factory that build the model in the sizes of a file, by running the factory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import UsageFault
from .. import factory
from ..skeleton import skeleton
from .case import Case, Respec
from .fit import Blueprint, Fit, compare

BUILDS = 16
"""How many models the search builds at most."""

# Names of the number of outputs, for factories that take any argument (torchvision's).
OUTPUTS = ("num_classes", "num_labels", "out_features")


def resized(spec: str, case: Case) -> Respec | None:
    """Find a SPEC that builds the model in a state's sizes.

    An argument is changed if its value is a size of the model and the file has another size in that place.

    Args:
        spec: of the model that does not fit; its factory is run up to 16 times.
        case: a state whose names fit the model.

    Returns:
        The SPEC, and what differs; None if no such SPEC was found.
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
    return Respec(spec, words)


def _fit(spec: str, case: Case) -> Fit | None:
    try:
        return compare(case.state, Blueprint.of(skeleton(spec)))
    except UsageFault:
        return None  # the factory does not take this argument, or not this value


def _candidates(spec: str, fit: Fit) -> Iterator[tuple[str, Any, int]]:
    """Yield each (argument, its value, the size in the file) once."""
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
