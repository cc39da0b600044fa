"""The parameters of an optimizer's state: key, name and shape of each, and whether they fit a live model.

torch numbers the parameters through all groups and keys the state by these numbers; loading goes by index.
An optimizer built from `named_parameters()` (torch 2.6) also keeps `param_names` in each group, which loading
ignores: they are the only record of which index is which. By name, `state` has parameter names for keys and
each group lists names as its `params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...checkpoint.rebuilt_tensors import plain_tensor, special_tensor
from ...checkpoint.special_tensors import SpecialTensor
from ...inert_pickle.values import Record

# Entries in the shape of the parameter: those of torch's optimizers, and others' under the same names.
MOMENTA = (
    *("exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax", "exp_avg_diff", "exp_avg_slow", "hessian"),
)

FLAT = ("old_dirs", "prev_flat_grad")  # of LBFGS: they hold all parameters in one vector, in their order
FEW = 8  # misfits of each kind that are listed

Shape = tuple[int, ...]
Shapes = Mapping[str, Sequence[int]]  # of parameters, by name


class BadOptimizer(ValueError):
    """An optimizer's state that can't be used; the message reads on after "the optimizer"."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Undecided(BadOptimizer):
    """An optimizer that names no parameters, and which several assignments of them fit."""


class Slot(NamedTuple):
    """One parameter's place in an optimizer."""

    key: int | str
    name: str | None  # if the file has it
    shape: Shape | None  # of its momentum; None without one (plain SGD, or never stepped)


def slots(optimizer: Mapping[Any, Any]) -> list[list[Slot]]:
    """Return the parameters of each group, in their order."""
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise BadOptimizer("has no `state` and `param_groups` of the usual form")
    listed = [_slots(group, state) for group in groups]
    keys = [slot.key for group in listed for slot in group]
    known = set(map(str, keys))
    if len(known) != len(keys):
        raise BadOptimizer("lists a parameter twice")
    if twice := [key for key in state if type(key) is int and str(key) in state]:
        raise BadOptimizer(f"keeps two states of parameter {twice[0]}: under the number and under its text")
    for key in state:
        if str(key) not in known:
            raise BadOptimizer(f"keeps state of '{str(key)[:80]}', which is in no group")
    return listed


def _slots(group: Any, state: dict[Any, Any]) -> list[Slot]:
    keys = group.get("params") if isinstance(group, dict) else None
    if not isinstance(keys, list) or not all(type(key) in (int, str) for key in keys):
        raise BadOptimizer("has a group without a list of `params`")
    # torch's converter to DCP turns numbers into text.
    is_by_name = any(isinstance(key, str) and not key.isdecimal() for key in keys)
    names: list[Any] = list(keys) if is_by_name else [None] * len(keys)
    listed = group.get("param_names")
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        if len(listed) != len(keys):
            raise BadOptimizer(f"has {len(keys)} parameters and {len(listed)} names in one group")
        names = listed
    return [Slot(key, name, _shape(entry_of(state, key))) for key, name in zip(keys, names, strict=True)]


def entry_of(state: Mapping[Any, Any], key: int | str) -> Any:
    """Return the state of one parameter, whose key may have become text; None when there is none."""
    return state[key] if key in state else state.get(str(key))


def _shape(entry: Any) -> Shape | None:
    for value in map(entry.get, MOMENTA) if isinstance(entry, dict) else ():
        tensor = plain_tensor(value) or special_tensor(value) or value
        is_tensor = isinstance(tensor, SpecialTensor) or not isinstance(tensor, Record)
        if is_tensor and (shape := getattr(tensor, "shape", None)) is not None:
            return tuple(shape)
    return None


def without_prefix(names: Iterable[str], parameters: Mapping[str, object]) -> list[str]:
    """Return names without the prefix by which the first known one differs from the model's."""
    listed = list(names)
    lengths = sorted({len(name) for name in parameters}, reverse=True)
    prefixes = (_prefix(name, parameters, lengths) for name in listed)
    prefix = next((prefix for prefix in prefixes if prefix is not None), "")
    return [name.removeprefix(prefix) for name in listed]


def _prefix(name: str, parameters: Mapping[str, object], lengths: Iterable[int]) -> str | None:
    """Return what stands before a parameter's name, whole parts alone; None when the name ends in none."""
    for length in lengths:
        start = len(name) - length
        if start >= 0 and name[start - 1 : start] in (".", "") and name[start:] in parameters:
            return name[:start]
    return None


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

    kept: int = 0  # parameters of the optimizer
    parameters: int = 0  # of the model
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
        groups = slots(optimizer)
    except BadOptimizer as fault:
        return OrderCheck(parameters=len(parameters), problem=str(fault))
    kept, live = sum(map(len, groups)), list(parameters)
    # Scripts make several groups (weight decay or none) by one rule, going through the model's parameters in
    # their order; so the order is compared inside each group.
    if all(slot.name is not None for group in groups for slot in group):
        named = [without_prefix([str(slot.name) for slot in group], parameters) for group in groups]
        return _compared(groups, named, parameters)
    if len(groups) != 1 or kept != len(live):
        counts = f"{kept} parameters in {len(groups)} groups, without names; the model has {len(live)}"
        return OrderCheck(kept, len(live), problem=counts)
    check = _compared(groups, [live], parameters)
    theirs = [name for name in without_prefix(state, parameters) if name in parameters]
    if check.shapes or len(theirs) != len(live) or not _all_fit(groups[0], theirs, parameters):
        return check
    return OrderCheck(kept, len(live), order=tuple(_different(theirs, live, 0)[:FEW]))


def _compared(groups: list[list[Slot]], named: list[list[str]], parameters: Shapes) -> OrderCheck:
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
        for position, (slot, name) in enumerate(zip(group, live, strict=True), first):
            if name in place and slot.shape not in (None, shape := tuple(parameters[name])):
                shapes.append(Misfit(position, name, str(list(slot.shape or ())), str(list(shape))))
        first += len(group)
    return OrderCheck(first, len(place), tuple(shapes[:FEW]), tuple(names[:FEW]))


def _different(theirs: Sequence[str], live: Sequence[str], first: int) -> list[Misfit]:
    pairs = enumerate(zip(theirs, live, strict=True), first)
    return [Misfit(position, here, there, here) for position, (there, here) in pairs if there != here]


def _all_fit(group: Sequence[Slot], names: Sequence[str], parameters: Shapes) -> bool:
    return all(slot.shape in (None, tuple(parameters[name])) for slot, name in zip(group, names, strict=True))
