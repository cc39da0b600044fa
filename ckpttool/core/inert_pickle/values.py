"""Values of a pickle that run nothing.

Python's plain values (None, bool, int, float, str, bytes, tuple, list, dict) stay themselves. Anything else
is a `Global` for a name, a `Record` for an object that a call would have made, or an `OrderedDict_`, the
class of every state dict. Sets keep the order of the file (`Set_`, `FrozenSet_`). No value imports or calls
what the file names, and each keeps all that is needed to write it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, TypeGuard

from ..tensors.ref import Storage, TensorRef

# Levels of nesting that can be written. Python's own pickler gives up at about 300; honest files reach 60.
MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions, of a class, a function or a dtype. Never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def names_of(table: str) -> frozenset[Global]:
    """Read names from lines of `module module: name name`, each name being in each of its modules."""
    rows = (map(str.split, line.split(":")) for line in table.split("\n") if line.strip())
    return frozenset(Global(module, name) for row in rows for module, name in product(*row))


@dataclass(slots=True, eq=False)
class Record:
    """An object as its pickle describes it.

    The attributes that the object would have are read like its own: `tree["args"].lr` of an
    argparse.Namespace. They come from its pickled state, and no code runs. A name of the record's own
    (`args`, `items`, `state`, …) or one that begins with two underscores is never looked up there:
    `record.state["items"]` has it.
    """

    # The opcode that would have made it: `reduce` calls `callable(*args)`, `newobj` calls
    # `callable.__new__(callable, *args, **kwargs)`.
    how: str
    callable: object
    args: object = ()
    kwargs: object = None
    state: object = None  # what BUILD would have passed to `__setstate__`
    has_state: bool = False  # tells a state of None from no state
    elements: list[object] | tuple[()] = ()  # that would have been appended, for subclasses of list
    items: list[tuple[object, object]] | tuple[()] = ()  # that would have been set, for subclasses of dict

    def __getattr__(self, name: str) -> Any:
        """Return an attribute from the pickled state: a dict, or a pair of a dict and a dict of slots."""
        if name.startswith("__") or name in Record.__slots__:
            raise AttributeError(name)
        for attributes in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(attributes, dict) and name in attributes:
                return attributes[name]
        raise AttributeError(f"'{self.type_name}' has no attribute '{name}' in its pickled state")

    @property
    def type_name(self) -> str:
        """The name to show: `argparse.Namespace`."""
        named = self.callable
        if named in RECONSTRUCTOR:
            named = self.args[0] if isinstance(self.args, tuple) and self.args else named
        return str(named) if isinstance(named, Global) else "object"


RECONSTRUCTOR = names_of("copyreg copy_reg: _reconstructor")


class OrderedDict_(dict[Any, Any]):
    """A `collections.OrderedDict`."""

    # Its instance `__dict__`, in which a state dict keeps `_metadata`.
    attributes: object = None


class Set_(set[Any]):
    """A set in the order of the file."""

    # Tensors and objects are hashed by identity: a plain set would have another order at each reading.

    __slots__ = ("order",)

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.order = dict.fromkeys(items)
        super().__init__(self.order)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __reduce__(self) -> tuple[Any, ...]:
        return set, (list(self),)  # other picklers, such as DCP's, write a plain set

    def update(self, *groups: Iterable[Any]) -> None:
        """Add all items of each group."""
        for items in groups:
            new = dict.fromkeys(items)
            self.order |= new
            super().update(new)


class FrozenSet_(frozenset[Any]):
    """A frozenset in the order of the file."""

    __slots__ = ("order",)
    order: dict[Any, None]

    def __new__(cls, items: Iterable[Any] = ()) -> FrozenSet_:
        order = dict.fromkeys(items)
        new = super().__new__(cls, order)
        new.order = order
        return new

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __reduce__(self) -> tuple[Any, ...]:
        return frozenset, (list(self),)


CONTAINERS = (dict, list, tuple, set, frozenset, bytearray)


def container_name(value: object) -> str:
    """Return the name of a container's type: `dict` for every kind of dict."""
    return next((kind.__name__ for kind in CONTAINERS if isinstance(value, kind)), type(value).__name__)


def remade(original: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of the type and with the attributes of `original`, holding other items."""
    new = type(original)(items)
    if isinstance(new, OrderedDict_) and isinstance(original, OrderedDict_):
        new.attributes = original.attributes
    return new


ORDERED_DICT = Global("collections", "OrderedDict")

# A tensor with a type or attributes of its own (nn.Buffer, a subclass) is pickled as a call of one of these
# on the function that makes a tensor and its arguments. In a Record the tensor takes the place of both.
FROM_TYPE = names_of(
    "torch._tensor: _rebuild_from_type_v2 _rebuild_from_type\n torch.tensor: _rebuild_from_type"
)

PARAMETER = names_of("torch._utils: _rebuild_parameter _rebuild_parameter_with_state")

# Calls that wrap a tensor without changing its values; the tensor is the first argument.
WRAPPERS = PARAMETER | FROM_TYPE


def has_text_keys(value: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is a dict whose keys are all text; so is an empty one."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def is_state(value: object) -> bool:
    """Return whether a value can be the state of an OrderedDict: attributes, or what a call gives."""
    return isinstance(value, Record) or has_text_keys(attributes_in(value))


def attributes_in(state: object) -> dict[Any, Any] | None:
    """Return the attributes in a pickled state, slots included; None where it is something else."""
    parts: tuple[Any, ...] = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    if not all(part is None or isinstance(part, dict) for part in parts):
        return None
    return {name: value for part in parts if part for name, value in part.items()}


def tensor_of(value: object) -> TensorRef | None:
    """Return the tensor that a value is or wraps, as a saved `nn.Parameter` does; None for anything else."""
    if isinstance(value, TensorRef):
        return value
    match value:
        case Record(callable=name, args=(TensorRef() as inner, *_)) if name in WRAPPERS:
            return inner
    return None


def with_tensor(value: object, tensor: TensorRef) -> object:
    """Return a copy of a value that is or wraps a tensor, with `tensor` in its place."""
    if isinstance(value, Record) and isinstance(value.args, tuple):
        return replace(value, args=(tensor, *value.args[1:]))
    return tensor


def children(value: object) -> Iterator[object]:
    """Yield the values directly inside a value; of a dict, keys that are not text too."""
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
        yield from value.values()
        if isinstance(value, OrderedDict_) and value.attributes is not None:
            yield value.attributes
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, Record):
        yield from (value.callable, value.args, value.kwargs, value.state)
        yield from value.elements
        yield from chain.from_iterable(value.items)


def in_brief(value: object) -> str:
    """Describe a key or an operand in a few words: printing it whole may never finish, or fail."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and value.bit_length() > 256:
        return "a large number"
    if isinstance(value, int | float | type(None) | Global):
        return str(value)
    if isinstance(value, bytes):
        return str(value[:80])
    if isinstance(value, tuple) and len(value) <= 8 and not any(isinstance(part, tuple) for part in value):
        return f"({', '.join(in_brief(part)[:80] for part in value)})"
    return value.type_name if isinstance(value, Record) else container_name(value)


LEAVES = (TensorRef, str, int, float, bytes, bytearray, complex, type(None), Global, Storage)


LEAF_TYPES = frozenset(LEAVES)


def walk(root: object, inside: Callable[[Any], Iterable[object]] = children) -> Iterator[Any]:
    """Yield every container of a tree once, however often it is referred to, and all leaves; no recursion.

    `inside` returns what is directly in a container and belongs to the tree.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if not isinstance(value, LEAVES):
            if id(value) in seen:
                continue
            seen.add(id(value))
            stack.extend(inside(value))
        yield value


def is_plain(value: object) -> bool:
    """Whether a tree is made of containers, tensors, numbers and text alone, so that no code makes it."""
    plain = (dict, list, tuple, TensorRef, str, int, float, complex, bytes, type(None))
    return all(isinstance(part, plain) for part in walk(value))


def rebuild(root: object, change: Callable[[object], object]) -> object:
    """Return a copy of a tree in which `change` may replace any container; raise TooDeep."""
    # Values that were in several places are one value in the copy too. Leaves are shared with the original.
    return _Copier(change).copy(root)


class TooDeep(ValueError):
    """A tree is nested deeper than MAX_DEPTH."""


class _Copier:
    """Copies one tree, and remembers each container's copy, so that sharing and cycles survive."""

    def __init__(self, change: Callable[[object], object]) -> None:
        self.change = change
        self.done: dict[int, object] = {}
        self.kept: list[object] = []  # originals live as long as their ids are keys of `done`
        self.level = 0

    def copy(self, value: object) -> object:
        if isinstance(value, LEAVES):
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        if self.level == MAX_DEPTH:
            raise TooDeep
        self.level += 1
        self.kept.append(value)
        self._container(id(value), self.change(value))
        self.level -= 1
        return self.done[id(value)]

    def _container(self, key: int, value: object) -> None:
        """Copy a container. Mutable ones are remembered before their contents, so that a cycle finds them."""
        if isinstance(value, dict):
            self.done[key] = made = type(value)()
            if {*map(type, value), *map(type, value.values())} <= LEAF_TYPES:
                made.update(value)
            else:
                made.update((self.copy(name), self.copy(item)) for name, item in value.items())
            if isinstance(value, OrderedDict_) and isinstance(made, OrderedDict_):
                made.attributes = self.copy(value.attributes)
        elif isinstance(value, list):
            self.done[key] = items = list[object]()
            items.extend(map(self.copy, value))
        elif isinstance(value, Record):
            self.done[key] = record = Record(value.how, value.callable)
            self._fill(record, value)
        elif isinstance(value, tuple | set | frozenset):
            made_of = type(value)(map(self.copy, value))
            self.done.setdefault(key, made_of)  # a tuple inside a list inside it was copied on the way
        else:
            self.done[key] = value

    def _fill(self, new: Record, old: Record) -> None:
        new.callable, new.args, new.kwargs = map(self.copy, (old.callable, old.args, old.kwargs))
        new.state, new.has_state = self.copy(old.state), old.has_state
        new.elements = list(map(self.copy, old.elements))
        new.items = [(self.copy(key), self.copy(value)) for key, value in old.items]
