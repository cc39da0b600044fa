"""Dotted names of the values in a tree: `optimizer.state.0.exp_avg`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..inert_pickle.values import LEAVES, MAX_DEPTH, OrderedDict_, Record, in_brief, tensor_of
from ..tensors.ref import TensorRef
from .pickled_modules import inside, is_module

MAX_NAMES = 16 << 20
"""Characters that the dotted names of a file may have together, whatever its size."""

Path = tuple[str, ...]
Entry = tuple[str | None, object]


def dotted(path: Path) -> str:
    """Return a path as one dotted name."""
    return ".".join(path)


def contents(value: object) -> Iterable[Entry] | None:
    """Return the entries of a container; None for a leaf such as a tensor, a number or a name."""
    return None if isinstance(value, LEAVES) or tensor_of(value) is not None else entries(value)


def entries(value: object) -> Iterator[Entry]:
    """Yield the entries directly inside a container under the names a person would use.

    A name is None when the entry adds no step to the path, as the attributes of an object do not.
    """
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
    """The dotted names of a tree would fill the memory."""


def named_values(
    root: object, inside: Callable[[object], Iterable[Entry] | None], limit: int
) -> Iterator[tuple[Path, object]]:
    """Yield every value of a tree with its path, in the file's order, a container before its contents.

    A container that appears in several places is entered once, at the first. No container is entered below
    MAX_DEPTH levels, which no honest file reaches.

    Args:
        root: the tree.
        inside: returns the entries of a value by name, or None for a value not to be entered. Never called
            for tensors.
        limit: the most characters of all paths together.

    Raises:
        TooManyNames: the paths have more than `limit` characters.
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
                limit -= len(here) * sum(map(len, path)) + sum(len(at[-1]) for at, _ in here if at)
                if limit < 0:
                    raise TooManyNames
                here.reverse()
                stack += here
        yield path, value
