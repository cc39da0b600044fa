"""The state of an optimizer, keyed by index or by parameter name.

torch numbers the parameters through all groups, keys the state by these numbers, and loads only by index. By
name, `state` has parameter names for keys and each group lists names as its `params`: what
`torch.distributed.checkpoint` calls fully qualified names. Both forms hold the same, and each can be made of
the other where it is known which parameter is which: by the names in the file (`param_names`), or by the
model's state in it, where only one assignment fits the shapes of the momentum.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.dotted_names import contents, dotted
from ..checkpoint.states import BUFFERS, is_optimizer
from ..errors import NothingToDo, Refused
from ..inert_pickle.values import PARAMETER, Record, remade, tensor_of
from .optimizer_assignment import assignments
from .optimizer_slots import (
    FLAT,
    BadOptimizer,
    Misfit,
    OrderCheck,
    Shape,
    Slot,
    entry_of,
    mismatched_order,
    slots,
    without_prefix,
)

__all__ = [
    "BadOptimizer",
    "Misfit",
    "OrderCheck",
    "Rekeyed",
    "mismatched_order",
    "rename_parameters",
    "to_indices",
    "to_names",
]

FLOATING = ("float", "bfloat", "complex")


def rename_parameters(optimizer: Any, names: Mapping[str, str]) -> dict[Any, Any]:
    """An optimizer's state dict with its parameters renamed; names that are not in `names` stay.

    Args:
        optimizer: a dict with `state` and `param_groups`.
        names: old name -> new name.
    """
    new = remade(optimizer, optimizer.items())
    if isinstance(optimizer["state"], dict):
        state = optimizer["state"]
        new["state"] = remade(state, ((_new_name(key, names), value) for key, value in state.items()))
    if isinstance(optimizer["param_groups"], list):
        new["param_groups"] = [_rename_group(group, names) for group in optimizer["param_groups"]]
    return new


def _rename_group(group: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(group, dict):
        return group
    new = remade(group, group.items())
    for listed in ("params", "param_names"):  # `params` holds names when the state is keyed by name
        if isinstance(group.get(listed), list):
            new[listed] = [_new_name(name, names) for name in group[listed]]
    return new


def _new_name(name: Any, names: Mapping[str, str]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """What was done to the optimizers of a file.

    Attributes:
        optimizers: their dotted names; `""` for a file that is one.
        parameters: how many parameters they keep, together.
        moved: how many of them are at another place than before.
        absent: parameters of the live model that no optimizer keeps.
    """

    optimizers: tuple[str, ...]
    parameters: int
    moved: int
    absent: tuple[str, ...] = ()


def to_names(
    checkpoint: Checkpoint,
    *,
    parameters: Mapping[str, Sequence[int]] | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, Rekeyed]:
    """A checkpoint whose optimizers are keyed by the names of parameters.

    Args:
        parameters: name -> shape of a live model's parameters, in the order of `named_parameters()`. Each
            group is put in this order, and where neither the file's own names nor its state say which
            parameter is which, this order does.
        state: dotted path of the model's state whose parameters they are; every state is tried when None.

    Raises:
        NothingToDo: there is no optimizer, or all are keyed by names in this order.
        Refused: it is not known which parameter is which, or what is known contradicts the momentum's shapes
            or the live model: nothing is guessed, added or dropped.
    """
    return _rekeyed(checkpoint, parameters, state, by_name=True)


def to_indices(
    checkpoint: Checkpoint,
    *,
    parameters: Mapping[str, Sequence[int]] | None = None,
    state: str | None = None,
) -> tuple[Checkpoint, Rekeyed]:
    """A checkpoint whose optimizers are keyed by numbers, as torch keys them: the inverse of `to_names`.

    Args:
        parameters: name -> shape of a live model's parameters, in the order of `named_parameters()`: each
            group is put in this order, so that an optimizer whose groups are made by the same rule from that
            model gives each parameter its own momentum. The order stays when None.
        state: as for `to_names`.

    Raises:
        NothingToDo, Refused: as for `to_names`.
    """
    return _rekeyed(checkpoint, parameters, state, by_name=False)


def _rekeyed(
    checkpoint: Checkpoint,
    parameters: Mapping[str, Sequence[int]] | None,
    state: str | None,
    *,
    by_name: bool,
) -> tuple[Checkpoint, Rekeyed]:
    found = [(dotted(path), value) for path, value in checkpoint.named(contents) if is_optimizer(value)]
    if not found:
        raise NothingToDo(
            f"{checkpoint.path}: holds no optimizer's state",
            hint=f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}",
        )
    live = None if parameters is None else {name: tuple(shape) for name, shape in parameters.items()}
    source = _Source(checkpoint, live, state)
    changed: dict[int, object] = {}
    kept, moved, keeping = 0, 0, set[str]()
    for where, optimizer in found:
        assert isinstance(optimizer, dict)
        try:
            old = slots(optimizer)
            named = source.named(old, needed=by_name or live is not None)
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
    return new_file, Rekeyed(tuple(where for where, _ in found), kept, moved, absent)


def _in_order(groups: list[list[Slot]], live: Mapping[str, Shape]) -> tuple[list[list[Slot]], set[str]]:
    """Each group in the order of the live model, and the model's names for all its parameters.

    Raises:
        BadOptimizer: there is a parameter that the model does not have, or has in another shape.
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
        _check_shape(slot, live[name], "the model")
    ordered = [sorted(group, key=lambda slot: place[bare[str(slot.name)]]) for group in groups]
    return ordered, set(bare.values())


def _check_shape(slot: Slot, shape: Shape, where: str) -> None:
    if slot.shape not in (None, shape):
        raise BadOptimizer(
            f"keeps momentum of shape {list(slot.shape or ())} for '{slot.name}', "
            f"whose shape in {where} is {list(shape)}"
        )


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
    """The same optimizer with its parameters in this order, under new keys."""
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
    """Whether nothing was done: the same keys of the state, of the same type, and the same lists."""
    assert isinstance(old, dict) and isinstance(new, dict)
    pairs = zip(old["param_groups"], new["param_groups"], strict=True)
    return list(map(repr, old["state"])) == list(map(repr, new["state"])) and all(
        one["params"] == other["params"] and one.get("param_names") == other.get("param_names")
        for one, other in pairs
    )


# Which parameter is which.


class _Source:
    """Where a file, or a live model, says which parameter is which."""

    def __init__(self, checkpoint: Checkpoint, live: Mapping[str, Shape] | None, state: str | None) -> None:
        where = [state] if state is not None else [dotted(path) for path in checkpoint.states()]
        self.live = live
        self.states = [_parameters(checkpoint, path, live) for path in where]

    def named(self, groups: list[list[Slot]], *, needed: bool) -> list[list[Slot]]:
        """The same slots with their names. Raises BadOptimizer where these are not known for certain."""
        if all(slot.name is not None for group in groups for slot in group):
            self._check(groups)
            return groups
        if not needed:
            return groups
        found: dict[tuple[str, ...], None] = {}
        for candidates in self.states or ([list(self.live.items())] if self.live else []):
            ways = assignments([[slot.shape for slot in group] for group in groups], candidates)
            found.update(dict.fromkeys(ways))
        if len(found) != 1:
            raise BadOptimizer(_unnamed(bool(found), bool(self.states or self.live)), hint=HINT)
        names = iter(next(iter(found)))
        return [[slot._replace(name=next(names)) for slot in group] for group in groups]

    def _check(self, groups: list[list[Slot]]) -> None:
        """Names beside momentum of another shape than the parameter of that name in the same file."""
        for shapes in map(dict, self.states):
            listed = [slot for group in groups for slot in group]
            if all(slot.name in shapes for slot in listed):
                for slot in listed:
                    _check_shape(slot, shapes[str(slot.name)], "the file")
                return


HINT = "--model SPEC gives the parameters if the file does not; --state WHERE says which state is meant"


def _unnamed(several: bool, asked: bool) -> str:
    if not asked:
        return "names no parameters, and the file has no model's state that would"
    if several:
        return "names no parameters, and more than one assignment of the state's tensors fits"
    return "names no parameters, and no assignment of the state's tensors fits"


def _parameters(
    checkpoint: Checkpoint, where: str, live: Mapping[str, Shape] | None
) -> list[tuple[str, Shape]]:
    """The tensors of a state that may be parameters, each of several names once, in the file's order."""
    found = checkpoint.state(where)
    known = {str(name) for name, value in found.container.items() if _is_parameter(value)}
    bare = dict(zip(found.tensors, without_prefix(found.tensors, live or {}), strict=True))
    seen: set[tuple[object, ...]] = set()
    listed = []
    for name, tensor in found.tensors.items():
        if known:
            fits = name in known
        elif live:
            fits = bare[name] in live
        else:
            fits = tensor.dtype.name.startswith(FLOATING) and not name.endswith(BUFFERS)
        if fits and tensor.view not in seen:
            seen.add(tensor.view)
            listed.append((name, tensor.shape))
    return listed


def _is_parameter(value: object) -> bool:
    """Whether a value was saved as an `nn.Parameter`, as in a pickled model."""
    return isinstance(value, Record) and tensor_of(value) is not None and value.callable in PARAMETER
