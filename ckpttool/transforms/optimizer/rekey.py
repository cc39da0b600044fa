"""Optimizer states keyed by index or by parameter name, each made from the other.

torch numbers the parameters through all groups, keys the state by these numbers, and loads by index alone.
By name, `state` has parameter names for keys and each group lists names as its `params`:
`torch.distributed.checkpoint` calls them fully qualified names. Both forms hold the same. One can be made
from the other when it is known which parameter is which: from the names in the file (`param_names`), from the
model's state in it, when only one assignment in any order fits the shapes of the momentum, or by the user's
word that the optimizer lists its parameters in the order of that state or of a live model.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.flat_optimizers import BadOptimizer
from ...checkpoint.optimizer_view import LISTS, OptimizerGroups, OptimizerView
from ...checkpoint.special_tensors import Shape
from ...errors import NothingToDo, Refused, UsageFault
from .parameters import Order, ParameterSource, check_shape, without_prefix

VECTORS = ("old_dirs", "prev_flat_grad")  # of LBFGS: they hold all parameters in one vector, in their order

Form = Literal["names", "indices", "flat"]
FORMS = {"names": "by names", "indices": "by numbers", "flat": "flat, by names"}


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """The change made to the optimizers of a file.

    Attributes:
        optimizers: dotted names; "" for a file that is an optimizer's state itself.
        parameters: how many they hold.
        moved: how many of them are in another place than before.
        absent: parameters of the live model that no optimizer keeps.
        ordered: optimizers whose parameters were taken in an order, on the caller's word.
    """

    optimizers: tuple[str, ...]
    parameters: int
    moved: int
    absent: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()


def rekeyed(
    checkpoint: Checkpoint,
    to: Form,
    *,
    parameters: Mapping[str, Sequence[int]] | None = None,
    state: str | None = None,
    order: Order | None = None,
) -> tuple[Checkpoint, Rekeyed]:
    """Return a checkpoint whose optimizers are keyed by the names of parameters, or by numbers as torch does.

    "flat" is one flat dict by names, as torchtitan has it: `state.NAME.exp_avg`.
    `parameters` are a live model's, name -> shape, in its order. Nothing is guessed, added or dropped: what
    is unknown, or contradicts shapes, is Refused; without anything to change, NothingToDo.
    """
    if order == "model" and parameters is None:
        raise UsageFault("the order of a model needs the model", hint="give it: --model SPEC")
    optimizers = [*checkpoint.optimizers()]
    if not optimizers:
        hint = f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}"
        raise NothingToDo(f"{checkpoint.path}: holds no optimizer's state", hint=hint)
    live = None if parameters is None else {name: tuple(shape) for name, shape in parameters.items()}
    source = ParameterSource(checkpoint, live, state, order)
    changes = [_change(where, optimizer, source, to, checkpoint.path) for where, optimizer in optimizers]
    if all(_keys_of(change.old) == _keys_of(change.new) for change in changes):
        raise NothingToDo(f"{checkpoint.path}: its optimizer is keyed {FORMS[to]} in this order already")
    new = {id(change.old): change.new for change in changes}
    known = set[str]().union(*(change.live_names for change in changes))
    return checkpoint.rebuilt(lambda value: new.get(id(value), value)), Rekeyed(
        optimizers=tuple(where for where, _ in optimizers),
        parameters=sum(change.parameters for change in changes),
        moved=sum(change.moved for change in changes),
        absent=tuple(name for name in live or () if name not in known),
        ordered=tuple(change.where for change in changes if change.is_ordered),
    )


to_names = partial(rekeyed, to="names")
to_indices = partial(rekeyed, to="indices")


class _Change(NamedTuple):
    """One optimizer under its new keys."""

    where: str
    old: dict[Any, Any]
    new: dict[Any, Any]
    parameters: int
    moved: int
    is_ordered: bool
    live_names: set[str]


def _change(where: str, old: Any, source: ParameterSource, to: Form, file: str) -> _Change:
    """Return one optimizer under its new keys; Refused if it is unknown which parameter is which."""
    live, view = source.live, OptimizerView(old)
    try:
        named, is_ordered = source.named(view.parameters(), needed=to != "indices" or live is not None)
        groups, live_names = (named, set[str]()) if live is None else _in_order(named, live)
        moved = _moved(named, groups)
        new = _with_keys(view, groups, to)
    except BadOptimizer as fault:
        name = f" {where!r}" if where else ""
        raise Refused(file, f"the optimizer{name} {fault}", hint=fault.hint) from None
    return _Change(where, old, new, sum(map(len, groups)), moved, is_ordered, live_names)


def _in_order(groups: OptimizerGroups, live: Mapping[str, Shape]) -> tuple[OptimizerGroups, set[str]]:
    """Return each group in the order of the live model, and the model's names for all its parameters."""
    names = [str(kept.name) for kept in chain(*groups)]
    bare = dict(zip(names, without_prefix(names, live), strict=True))
    place = {name: index for index, name in enumerate(live)}
    for kept in chain(*groups):
        name = bare[str(kept.name)]
        if name not in place:
            what = f"keeps '{kept.name}', which the model does not have; none is added or dropped"
            raise BadOptimizer(what)
        check_shape(kept, live[name], "the model")
    ordered = [sorted(group, key=lambda kept: place[bare[str(kept.name)]]) for group in groups]
    return ordered, set(bare.values())


def _moved(before: OptimizerGroups, after: OptimizerGroups) -> int:
    moved = sum(old.key != new.key for old, new in zip(chain(*before), chain(*after), strict=True))
    entries = [kept.entry for kept in chain(*before) if isinstance(kept.entry, dict)]
    if moved and any(name in entry for entry in entries for name in VECTORS):
        what = "is LBFGS, which keeps all parameters in one vector: it can't be put in another order"
        raise BadOptimizer(what)
    return moved


def _with_keys(view: OptimizerView, groups: OptimizerGroups, to: Form) -> dict[Any, Any]:
    """Return the same optimizer with its parameters in this order, under new keys."""
    keys: dict[str, Any] = {
        str(kept.key): number if to == "indices" else kept.name for number, kept in enumerate(chain(*groups))
    }
    listed = [[kept._replace(key=keys[str(kept.key)]) for kept in group] for group in groups]
    state = ((keys[str(key)], entry) for key, entry in view.state.items())
    return view.written(listed, state, flat=to == "flat")


def _keys_of(optimizer: dict[Any, Any]) -> list[Any]:
    """Return the keys of an optimizer, with their types, and the lists of its groups."""
    view = OptimizerView(optimizer)
    if view.is_flat:
        return [*optimizer]
    return [[*map(repr, view.state)], *([group.get(name) for name in LISTS] for group in view.groups)]
