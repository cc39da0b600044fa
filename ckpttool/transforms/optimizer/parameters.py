"""Which parameter each place of an optimizer belongs to, by a file's names and states or a live model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.dotted_names import dotted
from ...checkpoint.flat_optimizers import BadOptimizer
from ...checkpoint.optimizer_view import OptimizerGroups, OptimizerParameter
from ...checkpoint.special_tensors import Shape
from ...checkpoint.states import BUFFERS
from ...inert_pickle.values import PARAMETER, Record, tensor_of

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
        self, checkpoint: Checkpoint, live: Mapping[str, Shape] | None, state: str | None, order: Order | None
    ) -> None:
        where = [state] if state is not None else [dotted(path) for path in checkpoint.states()]
        self.live, self.order = live, order
        self.states = [parameters_of(checkpoint, path, live) for path in where]

    def named(self, groups: OptimizerGroups, *, needed: bool) -> tuple[OptimizerGroups, bool]:
        """Return the parameters with their names, and whether an order was assumed to find them."""
        if is_named := all(kept.name is not None for group in groups for kept in group):
            self._check([kept for group in groups for kept in group])
        if is_named or not needed:
            return groups, False
        shapes = [[kept.shape for kept in group] for group in groups]
        ways, ordered = self._by_shapes(shapes), False
        if len(ways) > 1 and (self.order or self.live):
            ways, ordered = self._in_order(shapes), True
        if len(ways) != 1:
            raise self._unnamed(several=bool(ways), ordered=ordered)
        names = iter(ways[0])
        return [[kept._replace(name=next(names)) for kept in group] for group in groups], ordered

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
    bare = dict(zip(state.tensors, without_prefix(state.tensors, live or {}), strict=True))
    listed: dict[tuple[object, ...], tuple[str, Shape]] = {}  # by the memory of each
    for name, tensor in state.tensors.items():
        floats = tensor.dtype.name.startswith(FLOATING) and not name.endswith(BUFFERS)
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
        raise BadOptimizer(
            f"keeps momentum of shape {list(kept.shape or ())} for '{kept.name}', "
            f"whose shape in {where} is {list(shape)}"
        )


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
