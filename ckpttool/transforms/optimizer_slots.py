"""Whose momentum is whose: what an optimizer keeps of each parameter, and whether a model would get its own.

torch numbers the parameters through all groups and keys the state by these numbers; loading goes by
index. An optimizer built from `named_parameters()` (torch 2.6) also keeps `param_names` in each group, which
loading ignores: they are the only record of which index is which. By name, `state` has parameter names for
keys and each group lists names as its `params`, which is what `torch.distributed.checkpoint` calls FQNs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..inert_pickle.values import tensor_of
from ..tensors.ref import TensorRef

MOMENTA = (
    *("exp_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax", "exp_avg_diff", "exp_avg_slow", "hessian"),
)
"""What optimizers keep in the shape of the parameter: those of torch, and their kin under the same names."""

FLAT = ("old_dirs", "prev_flat_grad")
"""What LBFGS keeps of all parameters in one vector, in their order."""

FEW = 8
"""Misfits that are listed one by one."""

Shape = tuple[int, ...]


class BadOptimizer(ValueError):
    """An optimizer's state that can't be used: says what is wrong with it, and perhaps what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Slot(NamedTuple):
    """One parameter's place in an optimizer: its key, its name if the file has it, and its shape.

    `shape` is that of its momentum; None where it has none (plain SGD, or never stepped).
    """

    key: int | str
    name: str | None
    shape: Shape | None


def slots(optimizer: Mapping[Any, Any]) -> list[list[Slot]]:
    """The parameters of each group, in their order.

    Args:
        optimizer: a dict with `state` and `param_groups`; tensors as torch's or as a file's descriptions.

    Raises:
        BadOptimizer: malformed; a parameter twice, or state of one that is in no group.
    """
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise BadOptimizer("has no `state` and `param_groups` of the usual form")
    found = [_slots(group, state) for group in groups]
    keys = [slot.key for group in found for slot in group]
    known = set(map(str, keys))
    if len(known) != len(keys):
        raise BadOptimizer("lists a parameter twice")
    for key in state:
        if str(key) not in known:
            raise BadOptimizer(f"keeps state of '{str(key)[:80]}', which is in no group")
    return found


def _slots(group: Any, state: dict[Any, Any]) -> list[Slot]:
    keys = group.get("params") if isinstance(group, dict) else None
    if not isinstance(keys, list) or not all(type(key) in (int, str) for key in keys):
        raise BadOptimizer("has a group without a list of `params`")
    names: list[Any] = list(keys) if any(map(is_name, keys)) else [None] * len(keys)
    told = group.get("param_names")
    if isinstance(told, list) and all(isinstance(name, str) for name in told):
        if len(told) != len(keys):
            raise BadOptimizer(f"has {len(keys)} parameters and {len(told)} names in one group")
        names = told
    return [Slot(key, name, _shape(entry_of(state, key))) for key, name in zip(keys, names, strict=True)]


def is_name(key: object) -> bool:
    """Whether a key is a parameter's name; torch's own converter to DCP makes text of numbers."""
    return isinstance(key, str) and not key.isdecimal()


def entry_of(state: Mapping[Any, Any], key: int | str) -> Any:
    """What is kept of one parameter; the state's keys may have become text while the group's did not."""
    return state[key] if key in state else state.get(str(key))


def _shape(entry: Any) -> Shape | None:
    if isinstance(entry, dict):
        for name in MOMENTA:
            found = tensor_of(entry.get(name)) or entry.get(name)
            if isinstance(found, TensorRef) or (found is not None and hasattr(found, "shape")):
                return tuple(found.shape)
    return None


@dataclass(frozen=True, slots=True)
class Misfit:
    """A parameter that would be given what belongs to another.

    Attributes:
        position: the place in the optimizer, counted through all groups.
        parameter: the model's parameter at that place.
        there, here: what the file has for that place, and what the model has: names, or shapes.
    """

    position: int
    parameter: str
    there: str
    here: str


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """Whether an optimizer's state fits a model's parameters when it is loaded by place, as torch does.

    The first few misfits of each kind; none at all where a question can't be asked of this file.

    Attributes:
        kept, parameters: how many parameters the optimizer keeps, and how many the model has.
        shapes: momentum of another shape than the parameter that would get it.
        names: the file's own names of parameters are in another order, or the model has no such parameter.
        order: the file names no parameters, its momentum fits the order of its own model state, and that is
            not the model's order: shapes may agree and the momentum be another parameter's all the same.
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
    """Whether loading an optimizer's state by index gives each parameter of a live model its own momentum.

    Several groups are taken to be made by one rule from the model's parameters in their order, as scripts
    make them (weight decay or none): the order is compared inside each group.

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


def without_prefix(names: Iterable[str], parameters: Mapping[str, object]) -> list[str]:
    """Names without the prefix by which the first known one differs from the model's name for it."""
    listed = list(names)
    prefix = next((found for name in listed if (found := _prefix(name, parameters)) is not None), "")
    return [name.removeprefix(prefix) for name in listed]


def _prefix(name: str, parameters: Mapping[str, object]) -> str | None:
    parts = name.split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts)))
    return next((name.removesuffix(tail) for tail in tails if tail in parameters), None)


def _compared(
    check: OrderCheck,
    groups: Sequence[Sequence[Slot]],
    named: Sequence[Sequence[str]],
    parameters: Mapping[str, Sequence[int]],
) -> OrderCheck:
    """The names and momenta of each group against the parameters that the model would put there."""
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
