"""Apply rules to a checkpoint: to its state, to copies of the state, and to its optimizers.

Momentum in the shape of its parameter goes through the same steps as the parameter. A count of steps must be
the same for all parameters that become one. What can't follow is refused by name.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain, count
from typing import Any

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.dotted_names import leave_out
from ..core.checkpoint.optimizer_names import ParameterSource, Undecided, place_of, with_copies, with_states
from ..core.checkpoint.optimizer_view import BadOptimizer, OptimizerGroups, OptimizerParameter, OptimizerView
from ..core.checkpoint.prefixes import found_prefixes
from ..core.checkpoint.settings import json_object, require_unpacked, settings_beside
from ..core.checkpoint.special_tensors import plain_tensor
from ..core.checkpoint.state import State
from ..core.inert_pickle.values import Record, attributes_in, in_brief
from ..core.tensors.cast import CastReports
from ..core.tensors.ref import TensorRef
from ..core.tensors.values import same_values
from ..core.words import noted
from ..errors import CkptToolError, Refused, UsageFault
from ..rooms import find
from . import rule_file
from .rules import MapRules
from .state_mapping import Move, StateMapping

Entry = dict[Any, Any]


def followed(
    checkpoint: Checkpoint, optimizer: dict[Any, Any], mapping: StateMapping, state: str | None
) -> dict[Any, Any]:
    """Return an optimizer's state after the rules that its model's state went through.

    Raises Refused where it is not known which parameter is which, or something can't follow.
    """
    view = OptimizerView(optimizer)
    try:
        groups = view.parameters()
        try:
            named = ParameterSource(checkpoint, None, state, None).named(groups, needed=True)[0]
        except BadOptimizer as fault:
            if mapping.only_renames:  # then the numbers say all
                return optimizer
            if isinstance(fault, Undecided):
                fault.hint = _naming(checkpoint, optimizer, groups, state)
            raise
        return _Following(view, mapping, named).optimizer()
    except BadOptimizer as fault:
        hint = fault.hint or _leaving_out(checkpoint, optimizer)
        raise Refused(checkpoint.path, f"its optimizer {fault}", hint=hint) from None


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
    return tensor.numel == 1 if tensor is not None else isinstance(value, bool | int | float | str | None)


def _all_same(values: Sequence[object]) -> bool:
    tensors = [plain_tensor(value) for value in values]
    if tensors[0] is None:
        return all(type(value) is type(values[0]) and value == values[0] for value in values)
    return all(tensor is not None and same_values(tensor, tensors[0]) for tensor in tensors)


# ---- Maps that come with the package


FOLDER = os.path.join(os.path.dirname(__file__), "maps")
ENDING = ".toml"


def names() -> list[str]:
    """Return the names of the maps, sorted."""
    return sorted(each.removesuffix(ENDING) for each in os.listdir(FOLDER) if each.endswith(ENDING))


def maps() -> tuple[MapRules, ...]:
    """Return the maps that come with the package, sorted by name.

    Returns:
        The rules of each: `name`, `start` and `end` (the two architectures), `reversible`, `to_toml()`.

    Raises:
        Unreadable: a file of the package is gone.

    Example:
        >>> [rules.name for rules in ckpttool.maps()][:2]
        ['gguf-llama', 'megatron-hf']
    """
    return tuple(map(named, names()))


def path_of(name: str) -> str:
    """Return where the file of a map is. Raises UsageFault for a name that there is none of."""
    if name not in (known := names()):
        close = get_close_matches(name, known, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        hint = f"{meant}a rule file's name ends in {ENDING}; ckpttool maps lists the maps"
        raise UsageFault(f"--map {name}: there is no such map", hint=hint)
    return os.path.join(FOLDER, name + ENDING)


def named(name: str) -> MapRules:
    """Return the map of a name. Raises UsageFault for a name that there is none of."""
    return replace(rule_file.read(path_of(name)), name=name)


# ---- Rules applied to a checkpoint


FILES = ("config.json", "params.json")  # of Hugging Face, and of Meta
ENTRIES = ("model_args", "config", "args", "hyper_parameters")  # of nanoGPT, others, Megatron, Lightning


@dataclass(frozen=True, slots=True)
class Mapped:
    """What rules made of a state.

    Attributes:
        names: new name -> the names that its tensor was made of, in the order of the output.
        dropped: names that were left out, as the rules say.
        tied: names that were added to a tensor, or taken away, as the rules say.
        also: dotted paths of other states that were changed too.
        casting: which numbers became infinite or 0 by `cast`, complete once the output is saved.
    """

    names: Mapping[str, tuple[str, ...]] = field(metadata={"json": None})
    dropped: tuple[str, ...] = ()
    tied: tuple[str, ...] = noted("other names of one tensor, added or taken away")
    also: tuple[str, ...] = noted("changed too")
    casting: CastReports = field(default_factory=CastReports, metadata={"json": None})

    @property
    def renaming(self) -> dict[str, str]:
        """Old name -> new name, for tensors that became one tensor."""
        return {names[0]: new for new, names in self.names.items() if len(names) == 1}


@takes_checkpoint
def apply(
    checkpoint: Checkpoint,
    rules: MapRules,
    *,
    config: Mapping[str, Any] | None = None,
    state: str | None = None,
    optimizers: bool = True,
) -> tuple[Checkpoint, Mapped]:
    """Return a checkpoint in another architecture's names and layout; its tensors still lie in the old file.

    Names, shapes and types are all checked here, before anything is read or written.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: what becomes of its tensors.
        config: where the rules' numbers come from, such as what a `config.json` says.
        state: dotted path of the model's state. When None it is found, and its copies, such as an average,
            are changed too.
        optimizers: take along what else the file has of the model: optimizers, and copies of the state.

    Raises:
        Refused: names, shapes, types or counts do not fit the rules, or a number is not known; a tensor that
            more than its name changes of is packed; an optimizer keeps what can't follow, or it is not known
            which parameter is which.
        Collision: two tensors would get the same name.
        NoState: the file holds no state, or none at `state`.
    """
    targets = with_copies(checkpoint, state) if optimizers else [checkpoint.state(state)]
    mappings = [StateMapping(checkpoint.path, targets[0], rules, config or {})]
    mappings += [_of_copy(checkpoint.path, copy, targets[0], rules, config or {}) for copy in targets[1:]]
    first, *copies = mappings
    new = [(each.state, each.container()) for each in mappings]
    follows = (lambda optimizer, _: followed(checkpoint, optimizer, first, state)) if optimizers else None
    changed = with_states(checkpoint, new, first.moved, follows, numbers=not first.only_renames)
    for each in mappings:
        require_unpacked(checkpoint, each.state, names=each.made_anew)
    casting = CastReports(reports=[report for each in mappings for report in each.reports])
    also = tuple(copy.state.where for copy in copies)
    return changed, Mapped(first.names, (*first.matched.dropped,), (*first.tied,), also, casting)


def _of_copy(path: str, copy: State, of: State, rules: MapRules, config: Mapping[str, Any]) -> StateMapping:
    try:
        return StateMapping(f"{path}, {copy.where}", copy, rules, config)
    except Refused as fault:
        alone = f"as it is by --state {shlex.quote(of.where)}"
        fault.hint = f"leave it out by --drop {shlex.quote(copy.where)}, or {alone}; {fault.hint}"
        raise


@takes_checkpoint
def apply_map(
    checkpoint: Checkpoint,
    rules: str,
    *,
    inverse: bool = False,
    config: str | None = None,
    state: str | None = None,
    optimizers: bool = True,
) -> tuple[Checkpoint, Mapped]:
    """Return a checkpoint in another architecture's names and layout, by a map or a rule file.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        rules: the name of a map, as `ckpttool maps` lists them, or the path of a rule file, which ends in
            `.toml`.
        inverse: take the way back.
        config: the path of the model's config; None looks beside the checkpoint, and in it.
        state, optimizers: as for `apply`.

    Returns:
        The new checkpoint, whose tensors still lie in the old file, and what was made of which tensors.

    Raises:
        UsageFault: there is no such map, the rules are malformed, or have no way back.
        Unreadable, Damaged: a file of rules or settings can't be read.
        Refused, Collision, NoState: the checkpoint does not fit the rules, as for `apply`.

    Example:
        >>> with ckpttool.open("model.safetensors") as checkpoint:
        ...     changed, mapped = ckpttool.apply_map(checkpoint, "rules.toml")
        ...     sorted(changed.state())[-2:]
        ['linear.bias', 'linear.weight']
    """
    one_way = rule_file.read(rules) if rules.endswith(ENDING) else named(rules)
    found = one_way.inverse() if inverse else one_way
    settings = config_of(checkpoint, config)
    found = found.for_model(checkpoint.path, settings)
    try:
        return apply(checkpoint, found, config=settings, state=state, optimizers=optimizers)
    except Refused as fault:
        target = checkpoint.state(state)
        if not _fits(target, found, settings):
            back = found.inverse() if found.reversible else None
            if back is not None and _fits(target, back, settings):
                way = "without --inverse" if inverse else "with --inverse"
                fault.hint = f"its names are those of the other side: {way} the map takes them"
            elif found.name and fault.hint and not found_prefixes([*target.tensors]):
                # Of a map of the package: nobody changes its rules.
                fault.hint = f"is it {found.start}? --exclude leaves out what more it has"
        raise


def _fits(state: State, rules: MapRules, config: Mapping[str, Any]) -> bool:
    """Return whether rules take the names of a state, whatever its shapes."""
    try:
        StateMapping("", state, rules, config)
    except CkptToolError:
        return False
    return True


def config_of(checkpoint: Checkpoint, path: str | None = None) -> Mapping[str, Any]:
    """Return what a config says: the one at `path`, beside the checkpoint, or inside it; {} without any.

    What a GGUF says of itself comes first. Raises Unreadable, or Damaged where the file is no JSON object.
    """
    gguf: Any = find("gguf.reading")
    own = gguf.settings(checkpoint) if gguf else {}
    if path is not None:
        return {**json_object(path), **own}
    place, settings = settings_beside(checkpoint.path, *FILES)
    return {**(settings if place else next(_inside(checkpoint.tree), {})), **own}


def _inside(tree: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that a file holds, as a dict or an object's attributes."""
    entries = tree if isinstance(tree, dict) else {}
    for value in map(entries.get, ENTRIES):
        settings = attributes_in(value.state) if isinstance(value, Record) else value
        if isinstance(settings, dict) and settings:
            yield settings
