"""What is in a tree of values under which dotted name: `optimizer.state.0.exp_avg`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..inert_pickle.values import LEAVES, MAX_DEPTH, OrderedDict_, Record, in_brief, tensor_of
from ..tensors.ref import TensorRef
from .pickled_modules import inside, is_module

MAX_NAMES = 16 << 20
"""Characters of all dotted names together that a file may have, whatever its size."""

Path = tuple[str, ...]
Entry = tuple[str | None, object]


def dotted(path: Path) -> str:
    return ".".join(path)


def contents(value: object) -> Iterable[Entry] | None:
    """What is in a container, or None for what is shown as one thing: a tensor, a number, a name."""
    return None if isinstance(value, LEAVES) or tensor_of(value) is not None else entries(value)


def entries(value: object) -> Iterator[Entry]:
    """What is directly in a container, under the name a person would use; None where it adds no name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield in_brief(key), item
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
        for key, item in value.items:
            yield in_brief(key), item
        if value.has_state:
            yield (None if isinstance(value.state, dict) else "state"), value.state


def _numbered(values: Iterable[object]) -> Iterator[Entry]:
    return ((str(index), item) for index, item in enumerate(values))


class TooManyNames(ValueError):
    """A tree repeats long names so often that they would fill the memory."""


def named_values(
    root: object, inside: Callable[[object], Iterable[Entry] | None], room: int
) -> Iterator[tuple[Path, object]]:
    """Every value of a tree with its path, in the file's order; a container before what is in it.

    A container that appears in several places is entered once, at the first, and none is entered deeper than
    any honest file goes.

    Args:
        inside: what is in a value, by name; None for a value that is not to be entered. It is not asked
            about tensors.
        room: characters of all paths together.

    Raises:
        TooManyNames: there is no more room.
    """
    seen: set[int] = set()
    stack: list[tuple[Path, object]] = [((), root)]
    while stack:
        path, value = stack.pop()
        found = None if type(value) is TensorRef else inside(value)
        if found is not None:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if len(path) < MAX_DEPTH:
                here = [(path if name is None else (*path, name), item) for name, item in found]
                room -= len(here) * sum(map(len, path)) + sum(len(at[-1]) for at, _ in here if at)
                if room < 0:
                    raise TooManyNames
                here.reverse()
                stack += here
        yield path, value
