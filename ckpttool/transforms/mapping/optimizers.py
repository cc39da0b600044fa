"""What an optimizer keeps of the parameters that rules change, taken through the same steps.

Momentum in the shape of its parameter is joined, cut, turned and permuted as the parameter is; a count of
steps must be the same for all parameters that become one. What can't follow is refused by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import leave_out
from ...checkpoint.flat_optimizers import BadOptimizer
from ...checkpoint.optimizer_view import OptimizerGroups, OptimizerParameter, OptimizerView
from ...checkpoint.rebuilt_tensors import plain_tensor
from ...errors import Refused
from ...inert_pickle.values import in_brief
from ...tensors.ref import TensorRef
from ...tensors.values import same_values
from ..optimizer.owners import place_of
from ..optimizer.parameters import ParameterSource, Undecided
from .matching import Move
from .state_mapping import StateMapping

Entry = dict[Any, Any]


def followed(
    checkpoint: Checkpoint, optimizer: dict[Any, Any], mapping: StateMapping, state: str | None
) -> dict[Any, Any]:
    """Return an optimizer's state after the rules that its model's state went through.

    Raises Refused where it is not known which parameter is which, or something can't follow.
    """
    view = OptimizerView(optimizer)
    try:
        named = _named(checkpoint, optimizer, view.parameters(), mapping, state)
        return optimizer if named is None else _Following(view, mapping, named).optimizer()
    except BadOptimizer as fault:
        hint = fault.hint or _leaving_out(checkpoint, optimizer)
        raise Refused(checkpoint.path, f"its optimizer {fault}", hint=hint) from None


def _named(
    checkpoint: Checkpoint,
    optimizer: Entry,
    groups: OptimizerGroups,
    mapping: StateMapping,
    state: str | None,
) -> OptimizerGroups | None:
    """Return the parameters with their names; None where numbers say all, as the rules rename and no more."""
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


def _naming(checkpoint: Checkpoint, optimizer: Entry, groups: OptimizerGroups, state: str | None) -> str:
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

    def __init__(self, view: OptimizerView, mapping: StateMapping, named: OptimizerGroups) -> None:
        self.view, self.mapping, self.named = view, mapping, named
        self.by_name = {str(each.name): each for each in chain(*named)}
        self.groups = {str(each.name): number for number, group in enumerate(named) for each in group}

    def optimizer(self) -> dict[Any, Any]:
        """Return the whole under the same kind of keys."""
        made: OptimizerGroups = [[] for _ in self.named]
        for name, move in self.mapping.cases(str(each.name) for each in chain(*self.named)):
            made[self.groups[name]] += [self.by_name[name]] if move is None else self._moved(move)
        for new in chain(*made):
            if new.name not in self.mapping.names:
                raise BadOptimizer(f"would keep '{new.name}', which the state does not have")
        is_numbered = any(old.key != old.name for old in chain(*self.named))
        is_text = any(isinstance(old.key, str) for old in chain(*self.named))
        numbers = count()
        listed: OptimizerGroups = []
        for group in made:
            keys: list[Any] = [next(numbers) if is_numbered else new.name for new in group]
            pairs = zip(map(str, keys) if is_text else keys, group, strict=True)
            listed.append([new._replace(key=key) for key, new in pairs])
        state = ((new.key, new.entry) for new in chain(*listed) if new.entry is not None)
        return self.view.written(listed, state)

    def _moved(self, move: Move) -> list[OptimizerParameter]:
        """Return what becomes of the parameters that a case of a rule takes."""
        if move.rule.steps:
            self._require_whole(move)
            return self._through(move)
        (names,) = move.sources.values()
        pairs = zip(move.targets((), ()), names, strict=True)
        return [self.by_name[name]._replace(name=new) for new, name in pairs if name in self.by_name]

    def _require_whole(self, move: Move) -> None:
        """Refuse what the optimizer keeps of a part only, or in groups that differ."""
        names = list(move.names)
        for name in names:
            if name not in self.by_name:
                raise BadOptimizer(f"keeps '{names[0]}' and not '{name}', which {move.rule} makes one")
            if self.groups[name] != self.groups[names[0]]:
                what = f"has '{names[0]}' and '{name}' in two groups, and {move.rule} makes them one"
                raise BadOptimizer(what)
        for step in move.rule.steps:
            if not step.follows:
                raise BadOptimizer(f"keeps '{names[0]}', whose state can't follow '{step.verb}'")

    def _through(self, move: Move) -> list[OptimizerParameter]:
        """Return the entries after the steps of a rule."""
        entries = {name: self.by_name[name].entry for name in move.names}
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
        return [OptimizerParameter("", *pair) for pair in zip(targets, made, strict=True)]

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
