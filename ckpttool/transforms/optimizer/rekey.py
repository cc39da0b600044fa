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
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import contents, dotted
from ...checkpoint.states import is_optimizer
from ...errors import NothingToDo, Refused, UsageFault
from ...inert_pickle.values import remade
from .parameters import Order, ParameterSource, check_shape
from .slots import FLAT, BadOptimizer, Shape, Slot, entry_of, slots, without_prefix


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """The change made to the optimizers of a file.

    Attributes:
        optimizers: their dotted names; `""` for a file that is an optimizer's state itself.
        parameters: the number of parameters in all of them.
        moved: how many of these are at another place than before.
        absent: parameters of the live model that no optimizer keeps.
        ordered: those optimizers whose parameters were taken in an order, on the caller's word.
    """

    optimizers: tuple[str, ...]
    parameters: int
    moved: int
    absent: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()


def to_names(
    checkpoint: Checkpoint,
    *,
    parameters: Mapping[str, Sequence[int]] | None = None,
    state: str | None = None,
    order: Order | None = None,
) -> tuple[Checkpoint, Rekeyed]:
    """Return a checkpoint whose optimizers are keyed by the names of parameters.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        parameters: name -> shape of a live model's parameters, in the order of `named_parameters()`. Each
            group is put in this order.
        state: dotted path of the model's state whose parameters they are; every state is tried when None.
        order: what an optimizer without names is taken to list its parameters in the order of, if its shapes
            leave it open: the file's `state`, or the live `model`. None: the live model, unless the file's
            state has another order that fits too; without a live model it is refused.

    Raises:
        NothingToDo: there is no optimizer, or all are keyed by names in this order.
        Refused: it is unknown which parameter is which, or the momentum's shapes or the live model contradict
            what is known. Nothing is guessed, added or dropped.
        UsageFault: `order` is `model`, and there are no `parameters`.
        NoState: there is no state at `state`.
    """
    return _rekeyed(checkpoint, parameters, state, order, by_name=True)


def to_indices(
    checkpoint: Checkpoint,
    *,
    parameters: Mapping[str, Sequence[int]] | None = None,
    state: str | None = None,
    order: Order | None = None,
) -> tuple[Checkpoint, Rekeyed]:
    """Return a checkpoint whose optimizers are keyed by numbers, as torch keys them: undo `to_names`.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        parameters: name -> shape of a live model's parameters, in the order of `named_parameters()`. Each
            group is put in this order, so that an optimizer whose groups are made by the same rule from that
            model gives each parameter its own momentum. The order stays when None.
        state: dotted path of the model's state whose parameters they are; every state is tried when None.
        order: as in `to_names`.

    Raises:
        NothingToDo: there is no optimizer, or all are keyed by numbers in this order.
        Refused: it is unknown which parameter is which, or the momentum's shapes or the live model contradict
            what is known. Nothing is guessed, added or dropped.
        UsageFault: `order` is `model`, and there are no `parameters`.
        NoState: there is no state at `state`.
    """
    return _rekeyed(checkpoint, parameters, state, order, by_name=False)


def _rekeyed(
    checkpoint: Checkpoint,
    parameters: Mapping[str, Sequence[int]] | None,
    state: str | None,
    order: Order | None,
    *,
    by_name: bool,
) -> tuple[Checkpoint, Rekeyed]:
    if order == "model" and parameters is None:
        raise UsageFault("the order of a model needs the model", hint="give it: --model SPEC")
    found = [(dotted(path), value) for path, value in checkpoint.named(contents) if is_optimizer(value)]
    if not found:
        raise NothingToDo(
            f"{checkpoint.path}: holds no optimizer's state",
            hint=f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}",
        )
    live = None if parameters is None else {name: tuple(shape) for name, shape in parameters.items()}
    source = ParameterSource(checkpoint, live, state, order)
    changed: dict[int, object] = {}
    kept, moved, keeping, ordered = 0, 0, set[str](), list[str]()
    for where, optimizer in found:
        assert isinstance(optimizer, dict)
        try:
            old = slots(optimizer)
            named, in_order = source.named(old, needed=by_name or live is not None)
            ordered += [where] if in_order else []
            new, names = (named, set[str]()) if live is None else _in_order(named, live)
            keeping |= names
            moved += _moved(named, new, optimizer)
        except BadOptimizer as fault:
            raise Refused(
                checkpoint.path, f"the optimizer{f' {where!r}' if where else ''} {fault}", hint=fault.hint
            ) from None
        kept += sum(map(len, new))
        changed[id(optimizer)] = _with_keys(optimizer, new, by_name)
    if all(_same_keys(value, changed[id(value)]) for _, value in found):
        form = "names" if by_name else "numbers"
        raise NothingToDo(f"{checkpoint.path}: its optimizer is keyed by {form} in this order already")
    absent = tuple(name for name in live or () if name not in keeping)
    new_file = checkpoint.rebuilt(lambda value: changed.get(id(value), value))
    return new_file, Rekeyed(tuple(where for where, _ in found), kept, moved, absent, (*ordered,))


def _in_order(groups: list[list[Slot]], live: Mapping[str, Shape]) -> tuple[list[list[Slot]], set[str]]:
    """Return each group in the order of the live model, and the model's names for all its parameters.

    Raises:
        BadOptimizer: the model lacks a parameter, or has it in another shape.
    """
    names = [str(slot.name) for group in groups for slot in group]
    bare = dict(zip(names, without_prefix(names, live), strict=True))
    place = {name: index for index, name in enumerate(live)}
    for slot in (slot for group in groups for slot in group):
        name = bare[str(slot.name)]
        if name not in place:
            raise BadOptimizer(
                f"keeps '{slot.name}', which the model does not have; none is added or dropped"
            )
        check_shape(slot, live[name], "the model")
    ordered = [sorted(group, key=lambda slot: place[bare[str(slot.name)]]) for group in groups]
    return ordered, set(bare.values())


def _moved(
    before: Sequence[Sequence[Slot]], after: Sequence[Sequence[Slot]], optimizer: Mapping[Any, Any]
) -> int:
    pairs = zip((s.key for g in before for s in g), (s.key for g in after for s in g), strict=True)
    moved = sum(one != other for one, other in pairs)
    kept = (entry_of(optimizer["state"], slot.key) for group in before for slot in group)
    if moved and any(isinstance(entry, dict) and any(name in entry for name in FLAT) for entry in kept):
        raise BadOptimizer(
            "is LBFGS, which keeps all parameters in one vector: it can't be put in another order"
        )
    return moved


def _with_keys(optimizer: dict[Any, Any], groups: Sequence[Sequence[Slot]], by_name: bool) -> dict[Any, Any]:
    """Return the same optimizer with its parameters in this order, under new keys."""
    flat = [slot for group in groups for slot in group]
    keys = {str(slot.key): slot.name if by_name else number for number, slot in enumerate(flat)}
    state = optimizer["state"]
    new = remade(optimizer, optimizer.items())
    new["state"] = remade(state, ((keys[str(key)], value) for key, value in state.items()))
    new["param_groups"] = [
        _group_with_keys(old, [keys[str(slot.key)] for slot in group], [slot.name for slot in group])
        for old, group in zip(optimizer["param_groups"], groups, strict=True)
    ]
    return new


def _group_with_keys(old: dict[Any, Any], keys: list[Any], names: list[str | None]) -> dict[Any, Any]:
    new = remade(old, old.items())
    new["params"] = keys
    if "param_names" in old:
        new["param_names"] = names
    return new


def _same_keys(old: object, new: object) -> bool:
    """Return whether keys, their types and the groups' lists are the same."""
    assert isinstance(old, dict) and isinstance(new, dict)
    pairs = zip(old["param_groups"], new["param_groups"], strict=True)
    return list(map(repr, old["state"])) == list(map(repr, new["state"])) and all(
        one["params"] == other["params"] and one.get("param_names") == other.get("param_names")
        for one, other in pairs
    )
