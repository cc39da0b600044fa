"""Whether an optimizer's state fits the parameters of a live model, when torch loads it by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoint.flat_optimizers import BadOptimizer
from ...checkpoint.optimizer_view import OptimizerGroups, OptimizerParameter, OptimizerView
from .parameters import without_prefix

FEW = 8  # misfits of each kind that are listed

Shapes = Mapping[str, Sequence[int]]  # of parameters, by name


@dataclass(frozen=True, slots=True)
class Misfit:
    """A parameter that would get the momentum of another."""

    position: int  # in the optimizer, counted through all groups
    parameter: str  # of the model, at that place; "" when it has none
    there: str  # name or shape in the file
    here: str  # in the model


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Whether an optimizer's state fits a model's parameters when torch loads it by index."""

    # The first few of each kind: momentum of another shape; names in another order, or unknown to the model;
    # no names, and momentum that fits the order of the file's own state, which is not the model's.
    shapes: tuple[Misfit, ...] = ()
    names: tuple[Misfit, ...] = ()
    order: tuple[Misfit, ...] = ()
    problem: str = ""  # why nothing could be compared

    @property
    def fits(self) -> bool:
        """Whether no misfit was found."""
        return not (self.shapes or self.names or self.order)


def mismatched_order(
    state: Mapping[str, Any], optimizer: Mapping[Any, Any], parameters: Shapes
) -> OrderCheck:
    """Check whether loading an optimizer's state by index gives each parameter its own momentum."""
    try:
        groups = OptimizerView(optimizer).parameters()
    except BadOptimizer as fault:
        return OrderCheck(problem=str(fault))
    count, live = sum(map(len, groups)), list(parameters)
    # Scripts make several groups (weight decay or none) by one rule, going through the model's parameters in
    # their order; so the order is compared inside each group.
    if all(kept.name is not None for group in groups for kept in group):
        named = [without_prefix([str(kept.name) for kept in group], parameters) for group in groups]
        return _compared(groups, named, parameters)
    if len(groups) != 1 or count != len(live):
        counts = f"{count} parameters in {len(groups)} groups, without names; the model has {len(live)}"
        return OrderCheck(problem=counts)
    check = _compared(groups, [live], parameters)
    theirs = [name for name in without_prefix(state, parameters) if name in parameters]
    if check.shapes or len(theirs) != len(live) or not _all_fit(groups[0], theirs, parameters):
        return check
    return OrderCheck(order=tuple(_different(theirs, live, 0)[:FEW]))


def _compared(groups: OptimizerGroups, named: list[list[str]], parameters: Shapes) -> OrderCheck:
    """Compare the names and momenta of each group with the parameters that the model would put there."""
    place = {name: index for index, name in enumerate(parameters)}
    shapes: list[Misfit] = []
    names: list[Misfit] = []
    first = 0
    for group, theirs in zip(groups, named, strict=True):
        live = sorted(theirs, key=lambda name: place.get(name, len(place)))
        unknown = [(i, name) for i, name in enumerate(theirs, first) if name not in place]
        misfits = [Misfit(i, "", name, "no such parameter") for i, name in unknown]
        names += misfits or _different(theirs, live, first)
        for position, (kept, name) in enumerate(zip(group, live, strict=True), first):
            if name in place and kept.shape not in (None, shape := tuple(parameters[name])):
                shapes.append(Misfit(position, name, str(list(kept.shape or ())), str(list(shape))))
        first += len(group)
    return OrderCheck(tuple(shapes[:FEW]), tuple(names[:FEW]))


def _different(theirs: Sequence[str], live: Sequence[str], first: int) -> list[Misfit]:
    pairs = enumerate(zip(theirs, live, strict=True), first)
    return [Misfit(position, here, there, here) for position, (there, here) in pairs if there != here]


def _all_fit(group: Sequence[OptimizerParameter], names: Sequence[str], parameters: Shapes) -> bool:
    return all(kept.shape in (None, tuple(parameters[name])) for kept, name in zip(group, names, strict=True))
