"""Which parameter each place of an optimizer belongs to, by a file's names and states or a live model."""

from __future__ import annotations

import shlex
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, NamedTuple

from ...errors import NoState, NothingToDo, Refused, UsageFault
from ..inert_pickle.values import PARAMETER, Record, tensor_of
from . import optimizer_view
from .checkpoint import Checkpoint
from .dotted_names import Path, dotted, follow, leave_out
from .module_tree import moved_kinds
from .optimizer_view import BadOptimizer, OptimizerGroups, OptimizerParameter, OptimizerView, is_optimizer
from .prefixes import Renaming
from .special_tensors import Shape, plain_tensor
from .state import BUFFERS, State, is_average, part

FLOATING = ("float", "bfloat", "complex")  # how the names of parameters' element types begin
MAX_WAYS = 20_000  # followed at once; with more of them, none is certain

Names = tuple[str, ...]
Parameters = Sequence[tuple[str, Shape]]  # in an order
Places = Sequence[Shape | None]

# Whose order an optimizer lists its parameters in: that of the file's state, or of the live model.
Order = Literal["state", "model"]

MODEL = "--model SPEC takes them in the order of that model's parameters"
ORDER = "--order state takes them in the order of the file's state, --order model in that of --model"


class Undecided(BadOptimizer):
    """An optimizer that names no parameters, and which several assignments of them fit."""


class ParameterSource:
    """A file, or a live model, as the source of parameters' names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        live: Mapping[str, Shape] | None,
        state: str | None,
        order: Order | None,
        trainable: Collection[str] = (),
    ) -> None:
        where = [state] if state is not None else [dotted(path) for path in checkpoint.states()]
        self.live, self.order, self.trainable = live, order, {*trainable}
        self.states = [parameters_of(checkpoint, path, live) for path in where]

    def named(self, groups: OptimizerGroups, *, needed: bool) -> tuple[OptimizerGroups, bool]:
        """Return the parameters with their names, and whether an order was assumed to find them."""
        if is_named := all(kept.name is not None for group in groups for kept in group):
            self._check([kept for group in groups for kept in group])
        if is_named or not needed:
            return groups, False
        shapes = [[kept.shape for kept in group] for group in groups]
        ways, ordered = [], False
        # An optimizer with as many places as the model has trainable parameters was given those.
        count = sum(map(len, shapes))
        for source in (
            (self._trained(), self) if count == len(self.trainable) < len(self.live or {}) else (self,)
        ):
            ways, ordered = source._by_shapes(shapes), False
            if len(ways) > 1 and (source.order or source.live):
                ways, ordered = source._in_order(shapes), True
            if ways:
                break
        if len(ways) != 1:
            raise self._unnamed(several=bool(ways), ordered=ordered)
        names = iter(ways[0])
        return [[kept._replace(name=next(names)) for kept in group] for group in groups], ordered

    def _trained(self) -> ParameterSource:
        """Return a source of the trainable parameters alone."""
        only = copy(self)
        only.live = {name: shape for name, shape in (self.live or {}).items() if name in self.trainable}
        only.states = []
        for state in self.states:
            bare = without_prefix((name for name, _ in state), self.live or {})
            only.states.append(
                [each for each, name in zip(state, bare, strict=True) if name in self.trainable]
            )
        return only

    def _by_shapes(self, groups: list[list[Shape | None]]) -> list[Names]:
        flat = [shape for group in groups for shape in group]
        lists = self.states or ([[*self.live.items()]] if self.live else [])
        return [*dict.fromkeys(way for candidates in lists for way in by_shapes(flat, candidates))]

    def _in_order(self, groups: list[list[Shape | None]]) -> list[Names]:
        """Return the ways that fit the order that was asked for, under the names that the file has."""
        live: list[Parameters] = [[*self.live.items()]] if self.live else []
        lists = {"state": self.states, "model": live, None: [*self.states, *live]}[self.order]
        ways: dict[tuple[str, ...], tuple[str, ...]] = {}
        for way in (way for candidates in lists for way in in_order(groups, candidates)):
            ways.setdefault(tuple(without_prefix(way, self.live or {})), way)
        return [*ways.values()]

    def _unnamed(self, *, several: bool, ordered: bool) -> BadOptimizer:
        what = "names no parameters, and"
        if not self.states and not self.live:
            return BadOptimizer(f"{what} the file has no model's state that would", hint=MODEL)
        if ordered and several and self.order is None and self.states:
            why = "the file's state and the model list them in orders that both fit, or in no single one"
            return BadOptimizer(f"{what} {why}", hint=ORDER)
        which = "more than one assignment" if several else "no assignment"
        if ordered:
            return BadOptimizer(f"{what} {which} in that order fits the shapes of the momentum")
        why = f"{what} {which} of the state's tensors fits"
        if several:
            return Undecided(why, hint=f"{MODEL}; {ORDER}")
        return BadOptimizer(why, hint="--state WHERE says which state is meant")

    def _check(self, listed: list[OptimizerParameter]) -> None:
        """Refuse names whose momentum has another shape than the tensor of that name in the same file."""
        for shapes in map(dict, self.states):
            if all(kept.name in shapes for kept in listed):
                for kept in listed:
                    check_shape(kept, shapes[str(kept.name)], "the file")
                return


def parameters_of(
    checkpoint: Checkpoint, where: str | None, live: Mapping[str, Shape] | None = None
) -> Parameters:
    """Return the tensors of a state that may be parameters, ties once, in the file's order."""
    state = checkpoint.state(where)
    known = {str(name) for name, value in state.container.items() if _is_parameter(value)}
    averages = {f"ema_{name.replace('.', '_')}" for name in state.tensors}  # mmcv's, which are buffers
    bare = dict(zip(state.tensors, without_prefix(state.tensors, live or {}), strict=True))
    listed: dict[tuple[object, ...], tuple[str, Shape]] = {}  # by the memory of each
    for name, tensor in state.tensors.items():
        floats = tensor.dtype.name.startswith(FLOATING) and not name.endswith(BUFFERS)
        floats = floats and name not in averages
        fits = name in known if known else bare[name] in live if live else floats
        if fits:
            listed.setdefault(tensor.view, (name, tensor.shape))
    return list(listed.values())


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


def _is_parameter(value: object) -> bool:
    """Return whether a value was saved as an `nn.Parameter`, as in a pickled model."""
    return isinstance(value, Record) and tensor_of(value) is not None and value.callable in PARAMETER


def check_shape(kept: OptimizerParameter, shape: Shape, where: str) -> None:
    """Compare the shape of a parameter's momentum with that of its parameter."""
    if kept.shape not in (None, shape):
        what = f"keeps momentum of shape {list(kept.shape or ())} for '{kept.name}'"
        raise BadOptimizer(f"{what}, whose shape in {where} is {list(shape)}")


class _Way(NamedTuple):
    """One way to assign the parameters so far, as its last step."""

    before: _Way | None = None
    group: int = 0
    name: str = ""


def by_shapes(places: Places, parameters: Parameters) -> list[Names]:
    """Return the ways to assign parameters to the places of an optimizer, in any order: none, one, or two."""
    # Where there is a choice of parameters, one way takes the first and the other the last.
    ways = [_first_fit(places, order) for order in (parameters, parameters[::-1])]
    return [*dict.fromkeys(way for way in ways if way is not None)]


def _first_fit(places: Places, parameters: Parameters) -> Names | None:
    free: dict[Shape, deque[str]] = defaultdict(deque)
    for name, shape in parameters:
        free[shape].append(name)
    try:
        taken = [None if shape is None else free[shape].popleft() for shape in places]
    except IndexError:
        return None
    used = {*taken}
    others = iter([name for name, _ in parameters if name not in used])
    names = [next(others, None) if name is None else name for name in taken]
    return None if None in names else tuple(map(str, names))


def in_order(groups: Sequence[Places], parameters: Parameters) -> list[Names]:
    """Return the ways to assign parameters to an optimizer that lists those of each group in their order."""
    # Scripts make such an optimizer that go through `named_parameters()` once and sort them into groups.
    # One that puts the new layers first is another, and nothing in its state tells: the caller must know.
    spare = len(parameters) - sum(map(len, groups))
    reached: dict[tuple[int, ...], list[_Way]] = {(0,) * len(groups): [_Way()]}
    for seen, (name, shape) in enumerate(parameters):
        following: dict[tuple[int, ...], list[_Way]] = {}
        for at, ways in reached.items():
            if seen - sum(at) < spare:
                following.setdefault(at, []).extend(ways)
            for group, place in enumerate(at):
                if place < len(groups[group]) and groups[group][place] in (None, shape):
                    there = (*at[:group], place + 1, *at[group + 1 :])
                    following.setdefault(there, []).extend(_Way(way, group, name) for way in ways)
        reached = {at: ways[:2] for at, ways in following.items()}  # two show that there are several
        if len(reached) > MAX_WAYS:
            return []
    ended = reached.get(tuple(map(len, groups)), []) if spare >= 0 else []
    return [_names(way, len(groups)) for way in ended]


def _names(way: _Way, count: int) -> Names:
    groups: list[list[str]] = [[] for _ in range(count)]
    while way.before is not None:
        groups[way.group].append(way.name)
        way = way.before
    return tuple(name for group in groups for name in reversed(group))


# ---- What changes together with a state: its copies, and the optimizers of their parameters.
#
# A file may hold two models of the same names, each with its optimizer, or a model and its average. Names
# and shapes say whose parameters an optimizer keeps; an average has none. An optimizer of a whole model
# knows the parameters of a part of it by their names in the whole.


class Owners:
    """The states of a file that change, and the rest."""

    def __init__(self, checkpoint: Checkpoint, changed: Sequence[State]) -> None:
        self.checkpoint, self.changed = checkpoint, changed

    def follows(self, optimizer: dict[Any, Any], *, numbers: bool) -> bool:
        """Return whether an optimizer changes with the states; also true where it fits none of the file.

        Args:
            optimizer: its state, nested or flat.
            numbers: it changes though it names no parameters: shapes say which they are.

        Raises:
            Refused: it may be of a state that changes or of one that does not.
        """
        listed = _listed(optimizer)
        if not listed or (any(kept.name is None for kept in listed) and not numbers):
            return True
        mine, theirs = ([s for s in those if self._fits(listed, s)] for those in (self.changed, self._rest))
        if theirs and mine:
            raise self._ambiguous(optimizer, mine[0], theirs[0])
        return not theirs

    def prefix(self, optimizer: dict[Any, Any]) -> str:
        """Return what stands before the names of the (first) state in those of a whole model's optimizer."""
        return self._prefix(self.changed[0], _listed(optimizer))

    def _fits(self, listed: Sequence[OptimizerParameter], state: State) -> bool:
        if is_average((*state.path, state.prefix)):
            return False
        if any(kept.name is None for kept in listed):
            found = parameters_of(self.checkpoint, state.where)
            return bool(by_shapes([kept.shape for kept in listed], found))
        prefix = self._prefix(state, listed)
        shapes = {f"{prefix}{name}": tensor.shape for name, tensor in state.items()}
        names = {f"{prefix}{name}" for name in state.container}
        momentum = ((str(kept.name), kept.shape) for kept in listed)
        return all(name in names and shape in (None, shapes.get(name, shape)) for name, shape in momentum)

    def _prefix(self, state: State, listed: Iterable[OptimizerParameter]) -> str:
        outer, prefix = self._enclosing(state)
        return prefix if outer and all(kept.name in outer.container for kept in listed) else ""

    def _enclosing(self, state: State) -> tuple[State | None, str]:
        """Return the state that a state is a part of, and what stands before its names there."""
        if state.part_of is not None:
            return state.part_of, "" if state.prefix.startswith("!") else state.prefix
        for outer in self._all:
            count = len(outer.path)
            if outer.nested is not None and count < len(state.path) and state.path[:count] == outer.path:
                return outer, f"{dotted(state.path[count:])}."
        return None, ""

    @cached_property
    def _all(self) -> list[State]:
        found: list[State] = []
        for path in self.checkpoint.states():
            with suppress(NoState, Refused):  # of names that are ambiguous
                found.append(self.checkpoint.state_at(path))
        return found

    @cached_property
    def _rest(self) -> list[State]:
        """The states that do not change, but for those that hold one that does, or lie in one."""
        parts = [rest for each in self.changed if (rest := _complement(each)) is not None]
        return parts + [s for s in self._all if not any(_is_one(s, each) for each in self.changed)]

    def _ambiguous(self, optimizer: object, mine: State, other: State) -> Refused:
        where = place_of(self.checkpoint, optimizer)
        what = f"its optimizer '{where[:80]}' may be of '{mine.where[:80]}' or of '{other.where[:80]}'"
        why = "which both have its names and shapes, and only the first changes"
        return Refused(self.checkpoint.path, f"{what}, {why}", hint=leave_out(self.checkpoint.path, where))


def place_of(checkpoint: Checkpoint, optimizer: object) -> str:
    """Return the dotted path of an optimizer in its file."""
    return next((where for where, value in checkpoint.optimizers() if value is optimizer), "")


def other_states(checkpoint: Checkpoint, state: State) -> list[State]:
    """Return the other states of a file, without pickled models, whose keys can't be changed inside them."""
    states: dict[int, State] = {}
    for path in checkpoint.states():
        value = follow(checkpoint.tree, path)
        if isinstance(value, dict) and value is not state.anchor:
            states.setdefault(id(value), checkpoint.state_at(path))
    return list(states.values())


def with_copies(checkpoint: Checkpoint, where: str | None) -> list[State]:
    """Return a state and, if it is not named, its copies, such as averages of all or some parameters."""
    state = checkpoint.state(where)
    others = other_states(checkpoint, state) if where is None else []
    return [state, *(other for other in others if _is_copy(other, state))]


def _is_copy(other: State, state: State) -> bool:
    """Return whether two states share most names, or one has nothing but tensors of the other's forms."""
    mine, its = state.tensors.keys(), other.tensors.keys()
    if 2 * len(mine & its) > max(len(mine), len(its)):
        return True
    same = (state[name].shape == tensor.shape for name, tensor in other.items())
    return bool(its) and its <= mine and all(same)


def with_states(
    checkpoint: Checkpoint,
    new: Sequence[tuple[State, dict[Any, Any]]],
    moved: Renaming,
    take_along: Callable[[dict[Any, Any], Owners], dict[Any, Any]] | None,
    *,
    numbers: bool,
) -> Checkpoint:
    """Return a checkpoint with other dicts for some states, which the optimizers of their parameters follow.

    Args:
        checkpoint: the checkpoint; it stays as it is.
        new: states and their new dicts.
        moved: the new names of the first of them.
        take_along: returns an optimizer's state after the change; None leaves all as they are.
        numbers: as for `Owners.follows`.

    Raises:
        Refused: an optimizer may be of a state that changes or of one that does not.
    """
    first, *others = (state for state, _ in new)
    dicts = {id(state.container): changed for state, changed in new}
    owners = Owners(checkpoint, [first, *others])

    def change(value: object) -> object:
        if id(value) in dicts:
            return dicts[id(value)]
        if take_along and is_optimizer(value) and owners.follows(value, numbers=numbers):
            return take_along(value, owners)
        return value

    changed = checkpoint.changed(first, change, others)
    keys = (key for key in first.container if isinstance(key, str))
    return replace(changed, metadata=moved_kinds(checkpoint.metadata, keys, moved.names, moved.modules()))


def require_none(checkpoint: Checkpoint, state: State, new: State) -> None:
    """Raise Refused where an optimizer keeps momentum of a tensor that has another form in the new state."""
    owners = Owners(checkpoint, [state])
    views = {name: tensor.view for name, tensor in new.items()}
    changed = {name: None for name, tensor in state.items() if views.get(name) != tensor.view}
    for where, value in checkpoint.optimizers() if changed else ():
        if not owners.follows(value, numbers=True):
            continue
        prefix = owners.prefix(value)
        for kept in _listed(value):
            name = next(iter(changed)) if kept.name is None else kept.name.removeprefix(prefix)
            if name in changed and (kept.shape or _has_tensor(kept.entry)):
                what = f"its optimizer '{where[:80]}' keeps momentum of '{name[:80]}' as that was before"
                hint = f"{leave_out(checkpoint.path, where)}; a rule of --map takes it along"
                raise Refused(checkpoint.path, what, hint=hint)


def _has_tensor(entry: object) -> bool:
    """Return whether an optimizer keeps more of a parameter than single numbers."""
    tensors = map(plain_tensor, entry.values() if isinstance(entry, dict) else ())
    return any(tensor is not None and tensor.numel > 1 for tensor in tensors)


def _listed(optimizer: dict[Any, Any]) -> list[OptimizerParameter]:
    """Return the parameters of an optimizer; none where it has not the usual form."""
    try:
        return [*chain(*OptimizerView(optimizer).parameters())]
    except BadOptimizer:
        return []


def _complement(state: State) -> State | None:
    """Return what a part leaves of its state."""
    if state.part_of is None:
        return None
    prefix = state.prefix
    return part(state.part_of, prefix[1:] if prefix.startswith("!") else f"!{prefix}")


def _is_one(one: State, other: State) -> bool:
    """Return whether two states are the same, or one lies in the nested dicts of the other."""

    def lies(inner: Path, outer: State) -> bool:
        return inner == outer.path or (outer.nested is not None and inner[: len(outer.path)] == outer.path)

    return lies(one.path, other) or lies(other.path, one)


# ---- Optimizer states keyed by index or by parameter name.
#
# torch numbers the parameters through all groups, keys the state by these numbers, and loads by index
# alone. By name, `state` has parameter names for keys and each group lists names as its `params`:
# `torch.distributed.checkpoint` calls them fully qualified names. Both forms hold the same. One can be
# made from the other when it is known which parameter is which: from the names in the file
# (`param_names`), from the model's state in it, when only one assignment in any order fits the shapes of
# the momentum, or by the user's word that the optimizer lists its parameters in the order of that state
# or of a live model.


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
    trainable: Collection[str] = (),
    state: str | None = None,
    order: Order | None = None,
) -> tuple[Checkpoint, Rekeyed]:
    """Return a checkpoint whose optimizers are keyed by the names of parameters, or by numbers as torch does.

    "flat" is one flat dict by names, as torchtitan has it: `state.NAME.exp_avg`. `parameters` are a live
    model's, name -> shape, in its order, of which some are `trainable`. Nothing is guessed, added or dropped:
    what is unknown, or contradicts shapes, is Refused; without anything to change, NothingToDo.
    """
    if order == "model" and parameters is None:
        raise UsageFault("the order of a model needs the model", hint="give it: --model SPEC")
    optimizers = [*checkpoint.optimizers()]
    if not optimizers:
        hint = f"see what is in it: ckpttool inspect {shlex.quote(checkpoint.path)}"
        raise NothingToDo(f"{checkpoint.path}: holds no optimizer's state", hint=hint)
    live = None if parameters is None else {name: tuple(shape) for name, shape in parameters.items()}
    source = ParameterSource(checkpoint, live, state, order, trainable)
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
    return [
        [*map(repr, view.state)],
        *([group.get(name) for name in optimizer_view.LISTS] for group in view.groups),
    ]
