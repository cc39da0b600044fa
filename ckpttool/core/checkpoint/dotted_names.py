"""Dotted names of the values in a tree: `optimizer.state.0.exp_avg`; nested dicts under such names."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..inert_pickle.values import LEAVES, MAX_DEPTH, OrderedDict_, Record, in_brief, remade, tensor_of, walk
from ..tensors.ref import TensorRef
from .optimizer_view import is_nested_optimizer
from .pickled_modules import inside, is_module
from .special_tensors import plain_tensor, special_tensor

# Characters that the dotted names of a file may have together, whatever its size.
MAX_NAMES = 16 << 20

Path = tuple[str, ...]
Entry = tuple[str | None, object]


def dotted(path: Path) -> str:
    """Return a path as one dotted name."""
    return ".".join(path)


def leave_out(file: str, where: str) -> str:
    """Return the hint to leave out first what a file holds at a dotted name, such as an optimizer."""
    return f"leave it out first: ckpttool convert {shlex.quote(file)} OUT --drop {shlex.quote(where)}"


def follow(root: object, path: Path) -> object:
    """Return the value at a path; None when there is none."""
    value = root
    for name in path:
        value = value[name] if isinstance(value, dict) else None
    return value


def contents(value: object) -> Iterable[Entry] | None:
    """Return the entries of a container; None for a leaf such as a tensor, a number or a name."""
    return None if isinstance(value, LEAVES) or tensor_of(value) is not None else entries(value)


def entries(value: object) -> Iterator[Entry]:
    """Yield the entries directly inside a container under the names a person would use."""
    # A name is None if the entry adds no step to the path, as the attributes of an object do not.
    if isinstance(value, dict):
        yield from ((key if type(key) is str else in_brief(key), item) for key, item in value.items())
        if isinstance(value, OrderedDict_) and value.attributes is not None:
            yield None, value.attributes
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _numbered(value)
    elif is_module(value):
        yield from inside(value)
    elif isinstance(value, Record):
        yield from _numbered(value.args if isinstance(value.args, tuple) else ())
        if value.kwargs:
            yield None, value.kwargs
        yield from _numbered(value.elements)
        yield from ((in_brief(key), item) for key, item in value.items)
        if value.has_state:
            yield (None if isinstance(value.state, dict) else "state"), value.state


def _numbered(values: Iterable[object]) -> Iterator[Entry]:
    return ((str(index), item) for index, item in enumerate(values))


@dataclass(frozen=True, slots=True)
class Again:
    """A container at a further place of a tree."""

    value: object
    first: Path


class TooManyNames(ValueError):
    """The dotted names of a tree would fill the memory."""


def named_values(
    root: object, inside: Callable[[object], Iterable[Entry] | None], limit: int, *, again: bool = False
) -> Iterator[tuple[Path, object]]:
    """Yield every value of a tree with its path, in the file's order, a container before its contents.

    `inside` returns the entries of a container, or None for a value not to be entered. A container is entered
    once, at its first place, and not below MAX_DEPTH levels, which no honest file reaches; `again` yields an
    Again at the others. TooManyNames if the paths have more than `limit` characters.
    """
    seen: dict[int, Path] = {}
    stack: list[tuple[Path, object]] = [((), root)]
    while stack:
        path, value = stack.pop()
        inner = None if type(value) is TensorRef else inside(value)
        if inner is not None:
            if id(value) in seen:
                if again:
                    yield path, Again(value, seen[id(value)])
                continue
            seen[id(value)] = path
            if len(path) < MAX_DEPTH:
                here = [(path if name is None else (*path, name), item) for name, item in inner]
                limit -= len(here) * sum(map(len, path)) + sum([len(at[-1]) for at, _ in here if at])
                if limit < 0:
                    raise TooManyNames
                if {type(item) for _, item in here} == {TensorRef}:  # 100,000 of them, in a state
                    yield path, value
                    yield from here
                    continue
                here.reverse()
                stack += here
        yield path, value


Container = dict[object, object]

# The end of the name under which a module keeps what it likes: one entry, even when it is a dict.
EXTRA_STATE = "_extra_state"

# Characters that each name counts on top of its own, as shared dicts can have very many short names.
PER_NAME = 100


class TwiceNamed(ValueError):
    """Two entries of nested dicts have one dotted name; the message is the name."""


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of any kind."""
    return plain_tensor(value) is not None or special_tensor(value) is not None


def holds_only_tensors(root: Container) -> bool:
    """Return whether a dict has dicts inside, and these nothing but tensors (or `_extra_state`) by text."""
    has_tensor, dicts = False, 0
    for container in walk(root, lambda value: [item for item in value.values() if isinstance(item, dict)]):
        dicts += 1
        for key, value in container.items():
            if not isinstance(key, str):
                return False
            if is_tensor(value):
                has_tensor = True
            elif not isinstance(value, dict) and not key.endswith(EXTRA_STATE):
                return False
    return has_tensor and dicts > 1


def flattened(root: Container, limit: int) -> dict[str, Path]:
    """Return the path of each entry of nested dicts by its dotted name. Raises TooManyNames, TwiceNamed."""
    # A dict is opened when its keys are text and a tensor is inside; otherwise it is an entry itself.
    places: dict[str, Path] = {}
    opened = _with_tensors(root)
    stack: list[tuple[Path, object]] = [((), root)]
    while stack:
        path, value = stack.pop()
        is_extra = bool(path) and path[-1].endswith(EXTRA_STATE)
        if not isinstance(value, dict) or id(value) not in opened or is_extra:
            name = dotted(path)
            if name in places:
                raise TwiceNamed(name)
            places[name] = path
            continue
        limit -= len(value) * (sum(map(len, path)) + PER_NAME)
        if limit < 0 or len(path) > MAX_DEPTH:
            raise TooManyNames
        stack.extend(((*path, str(key)), item) for key, item in reversed(value.items()))
    return places


def _with_tensors(root: Container) -> set[int]:
    """Return the ids of the dicts by text, from the root on, in which a tensor is, at whatever depth."""
    inside: dict[int, list[int]] = {}  # the dicts that hold a dict
    stack, seen, ready = [root], {id(root)}, []
    while stack:
        value = stack.pop()
        if not all(isinstance(key, str) for key in value) or is_nested_optimizer(value):
            continue  # an optimizer's state is no model's
        if any(map(is_tensor, value.values())):
            ready.append(id(value))
        for item in value.values():
            if isinstance(item, dict):
                inside.setdefault(id(item), []).append(id(value))
                if id(item) not in seen:
                    seen.add(id(item))
                    stack.append(item)
    with_tensors = {id(root)}
    while ready:
        container = ready.pop()
        with_tensors.add(container)
        ready += inside.pop(container, ())
    return with_tensors


def regrouped(root: Container, places: Mapping[str, Path], entries: Mapping[object, object]) -> Container:
    """Return nested dicts like those that `entries` were flattened from; or `entries`, when names changed."""
    if not all(name in places for name in entries):
        return dict(entries)
    made: dict[Path, Container] = {(): remade(root, ())}

    def at(path: Path) -> Container:
        if path not in made:
            old = follow(root, path)
            assert isinstance(old, dict)
            made[path] = at(path[:-1])[path[-1]] = remade(old, ())
        return made[path]

    for name, value in entries.items():
        *above, key = places[str(name)]
        at(tuple(above))[key] = value
    return made[()]
