"""Whether an optimizer's state, loaded by index, gives each parameter of a live model its own momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .slots import BadOptimizer, Slot, slots, without_prefix

FEW = 8
"""Misfits of each kind that are listed."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A parameter that would get the momentum of another.

    Attributes:
        position: its place in the optimizer, counted through all groups.
        parameter: the model's parameter at that place; `""` when the model has none.
        there, here: the name or shape that the file has at that place, and that of the model.
    """

    position: int
    parameter: str
    there: str
    here: str


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Whether an optimizer's state fits a model's parameters when torch loads it by index.

    Each kind of misfit lists the first few; a check that this file can't answer lists none.

    Attributes:
        kept, parameters: the number of parameters of the optimizer, and of the model.
        shapes: momentum of another shape than the parameter that would get it.
        names: the file names its parameters in another order, or one that the model lacks.
        order: the file names no parameters, and its momentum fits the order of its own model state, which is
            not the model's. Shapes may agree and the momentum be another parameter's all the same.
        problem: why nothing could be compared; `""` when it could.
    """

    kept: int = 0
    parameters: int = 0
    shapes: tuple[Misfit, ...] = ()
    names: tuple[Misfit, ...] = ()
    order: tuple[Misfit, ...] = ()
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether no misfit was found."""
        return not (self.shapes or self.names or self.order)


def mismatched_order(
    state: Mapping[str, Any], optimizer: Mapping[Any, Any], parameters: Mapping[str, Sequence[int]]
) -> OrderCheck:
    """Check whether loading an optimizer's state by index gives each parameter its own momentum.

    Several groups are assumed to be made by one rule from the model's parameters in their order, as scripts
    make them (weight decay or none), so the order is compared inside each group.

    Args:
        state: the model's state in the same file, name -> tensor, in the file's order; empty when there is
            none. Names may carry a wrapper's prefix that the model's lack.
        optimizer: a dict with `state` and `param_groups`.
        parameters: name -> shape of the live model's parameters, in the order of `named_parameters()`.
    """
    try:
        groups = slots(optimizer)
    except BadOptimizer as fault:
        return OrderCheck(parameters=len(parameters), problem=str(fault))
    kept = sum(map(len, groups))
    check = OrderCheck(kept, len(parameters))
    if all(slot.name is not None for group in groups for slot in group):
        return _compared(
            check, groups, [without_prefix(_names(group), parameters) for group in groups], parameters
        )
    if len(groups) != 1 or kept != len(parameters):
        counts = f"{kept} parameters in {len(groups)} groups, without names; the model has {len(parameters)}"
        return OrderCheck(kept, len(parameters), problem=counts)
    live = list(parameters)
    check = _compared(check, groups, [live], parameters)
    theirs = [name for name in without_prefix(state, parameters) if name in parameters]
    if check.shapes or len(theirs) != len(live) or not _all_fit(groups[0], theirs, parameters):
        return check
    return OrderCheck(kept, len(parameters), order=_different(theirs, live, 0))


def _names(group: Iterable[Slot]) -> list[str]:
    return [str(slot.name) for slot in group]


def _compared(
    check: OrderCheck,
    groups: Sequence[Sequence[Slot]],
    named: Sequence[Sequence[str]],
    parameters: Mapping[str, Sequence[int]],
) -> OrderCheck:
    """Compare the names and momenta of each group with the parameters that the model would put there."""
    place = {name: index for index, name in enumerate(parameters)}
    shapes: list[Misfit] = []
    names: list[Misfit] = []
    first = 0
    for group, theirs in zip(groups, named, strict=True):
        live = sorted(theirs, key=lambda name: place.get(name, len(place)))
        unknown = [(i, name) for i, name in enumerate(theirs, first) if name not in place]
        names.extend(Misfit(i, "", name, "no such parameter") for i, name in unknown)
        names.extend(() if unknown else _different(theirs, live, first))
        for position, (slot, name) in enumerate(zip(group, live, strict=True), first):
            shape = tuple(parameters[name]) if name in parameters else None
            if None not in (slot.shape, shape) and slot.shape != shape:
                shapes.append(Misfit(position, name, str(list(slot.shape or ())), str(list(shape or ()))))
        first += len(group)
    return OrderCheck(check.kept, check.parameters, tuple(shapes[:FEW]), tuple(names[:FEW]))


def _different(theirs: Sequence[str], live: Sequence[str], first: int) -> tuple[Misfit, ...]:
    pairs = enumerate(zip(theirs, live, strict=True), first)
    different = [Misfit(position, here, there, here) for position, (there, here) in pairs if there != here]
    return tuple(different[:FEW])


def _all_fit(group: Sequence[Slot], names: Sequence[str], parameters: Mapping[str, Sequence[int]]) -> bool:
    return all(slot.shape in (None, tuple(parameters[name])) for slot, name in zip(group, names, strict=True))
