"""Diagnose why a file does not load into a live model. Imports torch when called.

Where only sizes differ, the model's factory is run again to find the arguments that build it in the file's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UsageFault
from ..formats.reading import File, opened
from . import factory
from .diagnosis import Diagnosis, diagnose
from .diagnosis.blocks import unequal_counts
from .diagnosis.fit import Aim, Blueprint, Case, Fit, Respec, compare
from .skeleton import accepts, skeleton

if TYPE_CHECKING:
    import torch

MAX_BUILDS = 16  # models that the search for sizes builds
# Names of the number of outputs, for factories that take any argument (torchvision's).
OUTPUTS = ("num_classes", "num_labels", "out_features")


def doctor(
    file: File,
    model: torch.nn.Module | None = None,
    *,
    like: File | None = None,
    state: str | None = None,
    spec: str | None = None,
) -> Diagnosis:
    """Find out why a checkpoint does not load into a model, and which commands fix it.

    Args:
        file: a path, or an open checkpoint; no values are read.
        model: the model that it should load into; it is not changed, and may be on the meta device.
        like: in the place of a model, a checkpoint that loads into it: its header says all that is asked.
        state: dotted path of the model's state in the file; the one that fits best when None.
        spec: the SPEC that built the model, for the commands and to run its factory again with other sizes.

    Returns:
        The problems, the command that fixes each, and the line of Python that loads the result.

    Raises:
        TypeError: `model` is no module, or both or neither of `model` and `like` are given.
        NoState: `state` is given, and the file has no state there.
        Unreadable, Damaged, Unsupported: as `ckpttool.open` raises them.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> diagnosis = ckpttool.doctor("last.pt", model)
        >>> diagnosis.loads, [problem.kind for problem in diagnosis.problems]
        (False, ['prefix', 'reload'])
    """
    if like is not None and model is None:
        with opened(file) as checkpoint, opened(like) as reference:
            blueprint = Blueprint.like(reference.path, reference.state())
            return diagnose(checkpoint, blueprint, Aim(reference.path, "--like"), state=state)
    if like is not None:
        raise TypeError("doctor() takes a model, or a checkpoint that loads into it as `like`, not both")
    require_module("doctor", model)
    assert model is not None
    with opened(file) as checkpoint:
        return diagnose(
            checkpoint,
            Blueprint.of(model),
            Aim(spec or "SPEC"),
            state=state,
            accepts=partial(accepts, model),
            rebuild=partial(resized, spec) if spec else None,
        )


def resized(spec: str, case: Case) -> Respec | None:
    """Find a SPEC that builds the model in a state's sizes."""
    changes: dict[str, tuple[object, int]] = {}
    fit, builds = case.fit, 0
    counts = [(there, here) for _, there, here in unequal_counts(case.state.tensors, case.blueprint.places)]
    while fit.distance and builds < MAX_BUILDS:
        for name, old, new in _candidates(spec, fit, counts):
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


def _candidates(spec: str, fit: Fit, counts: Iterable[tuple[int, int]]) -> Iterator[tuple[str, Any, int]]:
    """Yield each (argument, its value, the size or the number of layers in the file) once."""
    sizes: dict[tuple[int, int], None] = dict.fromkeys(counts)
    for _, theirs, ours in fit.mismatched:
        pairs = zip(_sizes(theirs), _sizes(ours), strict=False)
        sizes |= {(wanted, given): None for wanted, given in pairs if wanted != given}
    given, takes_anything = factory.arguments(spec)
    for wanted, had in sizes:
        sized = {name: value for name, value in given.items() if type(value) is int and value == had}
        yield from ((name, value, wanted) for name, value in sized.items())
        if takes_anything:
            yield from ((name, had, wanted) for name in OUTPUTS if name not in given)


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.strip("[]").split(", ") if size.isdigit()]


def require_module(function: str, model: object) -> None:
    """Refuse what is no module, by a TypeError that says what to pass."""
    import torch

    if isinstance(model, torch.nn.Module):
        return
    takes = f"{function}() takes a torch.nn.Module, not"
    if isinstance(model, type):
        raise TypeError(f"{takes} the class {model.__name__}: make one")
    if isinstance(model, str):
        command = f"ckpttool {function} FILE --model {model}"
        raise TypeError(f"{takes} {model!r}: build it first; the command takes such a SPEC: {command}")
    raise TypeError(f"{takes} {type(model).__name__}")
