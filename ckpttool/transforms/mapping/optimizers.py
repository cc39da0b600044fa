"""What an optimizer keeps of the parameters that rules change, taken through the same steps.

Momentum in the shape of its parameter is joined, cut, turned and permuted as the parameter is; a count of
steps must be the same for all parameters that become one. What can't follow is refused by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import leave_out
from ...checkpoint.flat_optimizers import as_nested, flattened, is_flat
from ...checkpoint.rebuilt_tensors import plain_tensor
from ...errors import Refused
from ...inert_pickle.values import in_brief, remade
from ...tensors.ref import TensorRef
from ...tensors.values import same_values
from ..optimizer.owners import place_of
from ..optimizer.parameters import ParameterSource
from ..optimizer.slots import BadOptimizer, Slot, Undecided, entry_of, slots
from .matching import Move
from .state_mapping import StateMapping

Entry = dict[Any, Any]


class KeptState(NamedTuple):
    """One parameter after the rules: its name, and what the optimizer keeps of it; None for nothing."""

    name: str
    entry: Any


def followed(
    checkpoint: Checkpoint, optimizer: dict[Any, Any], mapping: StateMapping, state: str | None
) -> dict[Any, Any]:
    """Return an optimizer's state after the rules that its model's state went through.

    Raises Refused where it is not known which parameter is which, or something can't follow.
    """
    old = as_nested(optimizer)
    try:
        named = _named(checkpoint, optimizer, slots(old), mapping, state)
        if named is None:
            return optimizer
        new = _Following(old, mapping, named).optimizer()
    except BadOptimizer as fault:
        hint = fault.hint or _leaving_out(checkpoint, optimizer)
        raise Refused(checkpoint.path, f"its optimizer {fault}", hint=hint) from None
    return flattened(new) if is_flat(optimizer) else new


def _named(
    checkpoint: Checkpoint,
    optimizer: Entry,
    groups: list[list[Slot]],
    mapping: StateMapping,
    state: str | None,
) -> list[list[Slot]] | None:
    """Return the slots with their names; None where numbers say all, as the rules rename and no more."""
    try:
        return ParameterSource(checkpoint, None, state, None).named(groups, needed=True)[0]
    except BadOptimizer as fault:
        if mapping.only_renames:
            return None
        if isinstance(fault, Undecided):
            fault.hint = _naming(checkpoint, optimizer, groups, state)
        raise


def _leaving_out(checkpoint: Checkpoint, optimizer: Entry) -> str:
    return leave_out(checkpoint.path, place_of(checkpoint, optimizer))


def _naming(checkpoint: Checkpoint, optimizer: Entry, groups: list[list[Slot]], state: str | None) -> str:
    """Return the command that names the parameters, in the state's order if that fits."""
    where, order = [] if state is None else ["--state", state], ["--order", "state"]
    try:
        ParameterSource(checkpoint, None, state, "state").named(groups, needed=True)
        first = "name them first, in the order of the file's state or of --model SPEC, and take NAMED.pt"
    except BadOptimizer:
        out = _leaving_out(checkpoint, optimizer)
        first = f"{out}; or name them first, in the order of a model, and take NAMED.pt"
        order = ["--model", "SPEC"]
    words = ["ckpttool", "optimizer", checkpoint.path, "NAMED.pt", "--to", "names", *order, *where]
    return f"{first}: {shlex.join(words)}"


class _Following:
    """An optimizer, parameter by parameter, on its way through the rules."""

    def __init__(self, old: dict[Any, Any], mapping: StateMapping, named: list[list[Slot]]) -> None:
        self.old, self.mapping, self.named = old, mapping, named
        self.by_name = {str(slot.name): slot for slot in chain(*named)}
        self.groups = {str(slot.name): number for number, group in enumerate(named) for slot in group}
        self.moves = {name: move for move in mapping.matched.moves for name in move.names}
        self.done: set[int] = set()

    def optimizer(self) -> dict[Any, Any]:
        """Return the whole under the same kind of keys."""
        listed = [[kept for slot in group for kept in self._kept(slot)] for group in self.named]
        for kept in chain(*listed):
            if kept.name not in self.mapping.names:
                raise BadOptimizer(f"would keep '{kept.name}', which the state does not have")
        is_numbered = any(slot.key != slot.name for slot in chain(*self.named))
        is_text = any(isinstance(slot.key, str) for slot in chain(*self.named))
        numbers = iter(range(sum(map(len, listed))))
        new = remade(self.old, self.old.items())
        state: dict[Any, Any] = {}
        new["param_groups"] = []
        for group, entries in zip(self.old["param_groups"], listed, strict=True):
            keys: list[Any] = [next(numbers) if is_numbered else kept.name for kept in entries]
            keys = [*map(str, keys)] if is_text else keys
            new["param_groups"].append(again := remade(group, group.items()))
            again["params"] = keys
            if "param_names" in again:
                again["param_names"] = [kept.name for kept in entries]
            state |= {k: kept.entry for k, kept in zip(keys, entries, strict=True) if kept.entry is not None}
        new["state"] = remade(self.old["state"], state.items())
        return new

    def _kept(self, slot: Slot) -> list[KeptState]:
        """Return what becomes of a parameter; nothing where it is dropped, or another one has it already."""
        name = str(slot.name)
        if (move := self.moves.get(name)) is None:
            return [] if name in self.mapping.matched.dropped else [KeptState(name, self._entry(name))]
        if id(move) in self.done:
            return []
        self.done.add(id(move))
        self._require_whole(move)
        if not move.rule.steps:
            (names,) = move.sources.values()
            pairs = zip(move.targets((), ()), names, strict=True)
            return [KeptState(new, self._entry(old)) for new, old in pairs if old in self.by_name]
        return self._through(move)

    def _entry(self, name: str) -> Any:
        return entry_of(self.old["state"], self.by_name[name].key)

    def _require_whole(self, move: Move) -> None:
        """Refuse what the optimizer keeps of a part only, or in groups that differ."""
        names = list(move.names)
        if not move.rule.steps:
            return
        for name in names:
            if name not in self.by_name:
                raise BadOptimizer(f"keeps '{names[0]}' and not '{name}', which {move.rule} makes one")
            if self.groups[name] != self.groups[names[0]]:
                what = f"has '{names[0]}' and '{name}' in two groups, and {move.rule} makes them one"
                raise BadOptimizer(what)
        for step in move.rule.steps:
            if not step.follows:
                raise BadOptimizer(f"keeps '{names[0]}', whose state can't follow '{step.verb}'")

    def _through(self, move: Move) -> list[KeptState]:
        """Return the entries after the steps of a rule."""
        entries = {name: self._entry(name) for name in move.names}
        first = next(iter(entries.values()))
        for name, entry in entries.items():
            if (entry is None) != (first is None) or (entry is not None and {*entry} != {*first}):
                raise BadOptimizer(f"keeps other things of '{name}' than of '{next(iter(entries))}'")
        whole = {at: tuple(map(self.mapping.tensor, names)) for at, names in move.sources.items()}
        shapes = self.mapping.through(move, whole)
        targets = [name for at in shapes.tensors for name in move.targets(shapes.fields, at)]
        made: list[Entry | None] = [None if first is None else {} for _ in targets]
        for key in first or ():
            values = self._values(move, key, entries)
            for entry, value in zip(made, values * len(targets) if len(values) == 1 else values, strict=True):
                if entry is not None:
                    entry[key] = value
        return [*map(KeptState, targets, made)]

    def _values(self, move: Move, key: object, entries: Mapping[str, Entry]) -> list[Any]:
        """Return one value for all, or one for each target in their order."""
        tensors = {name: plain_tensor(entry[key]) for name, entry in entries.items()}
        shaped = {
            name: tensor
            for name, tensor in tensors.items()
            if tensor is not None and tensor.shape == self.mapping.tensor(name).shape and tensor.shape
        }
        if len(shaped) == len(entries):
            sources = {at: tuple(shaped[name] for name in names) for at, names in move.sources.items()}
            made = self.mapping.through(move, sources)
            return [tensor for those in made.tensors.values() for tensor in those]
        values = [entry[key] for entry in entries.values()]
        if not all(_is_single(value, plain_tensor(value)) for value in values):
            raise BadOptimizer(f"keeps '{in_brief(key)}' of '{next(iter(entries))}' in another shape")
        if not _all_same(values):
            names = " and ".join(f"'{name}'" for name in list(entries)[:2])
            raise BadOptimizer(f"keeps another '{in_brief(key)}' of {names}, which {move.rule} makes one")
        return values[:1]


def _is_single(value: object, tensor: TensorRef | None) -> bool:
    """Return whether a value is one number, or says something else that is not in the parameter's shape."""
    return (
        tensor.numel == 1
        if tensor is not None
        else value is None or isinstance(value, bool | int | float | str)
    )


def _all_same(values: Sequence[object]) -> bool:
    tensors = [plain_tensor(value) for value in values]
    if tensors[0] is None:
        return all(type(value) is type(values[0]) and value == values[0] for value in values)
    return all(tensor is not None and same_values(tensor, tensors[0]) for tensor in tensors)
