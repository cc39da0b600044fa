"""What else of a file changes with a state: its copies, and the optimizers of their parameters; no other.

A file may hold two models of the same names, each with its optimizer, or a model and its average. Names and
shapes say whose parameters an optimizer keeps; an average has none. An optimizer of a whole model knows the
parameters of a part of it by their names in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import Path, dotted, follow, leave_out
from ...checkpoint.flat_optimizers import BadOptimizer
from ...checkpoint.module_kinds import moved_kinds
from ...checkpoint.optimizer_view import OptimizerParameter, OptimizerView, is_optimizer
from ...checkpoint.rebuilt_tensors import plain_tensor
from ...checkpoint.state import State, part
from ...checkpoint.states import is_average
from ...errors import NoState, Refused
from ..renaming import Renaming
from .parameters import by_shapes, parameters_of


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
        return all(
            kept.name in names and kept.shape in (None, shapes.get(str(kept.name), kept.shape))
            for kept in listed
        )

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
    return (
        bool(its) and its <= mine and all(state[name].shape == tensor.shape for name, tensor in other.items())
    )


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
