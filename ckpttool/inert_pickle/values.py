"""What a pickle holds, as values that can't do anything.

Python's own plain values (None, bool, int, float, str, bytes, tuple, list, dict, set) are kept as they are.
Everything else that a pickle can name becomes one of three records: a `Global` for a name, a `Record` for
what calling that name would have made, and an `OrderedDict_` for the one class that every state dict is. Sets
keep the order of the file (`Set_`, `FrozenSet_`).
None of them imports, calls or hashes what the file says; each keeps all that is needed to write it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..tensors.ref import Storage, TensorRef

MAX_DEPTH = 200
"""Levels of nesting that can be written. Python's own pickler gives up at some 300; honest files reach 60."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle mentions: a class, a function, a dtype. Never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """An object as its pickle describes it.

    The attributes that the object would have are read like its own: `tree["args"].lr` of an
    argparse.Namespace. They come from its pickled state, and no code runs. A name of the record's own
    (`args`, `items`, `state`, …) or one that begins with two underscores is never looked up there:
    `record.state["items"]` has it.

    Attributes:
        how: the opcode that would have made it: `reduce` calls `callable(*args)`, `newobj` calls
            `callable.__new__(callable, *args, **kwargs)`.
        callable: usually a Global.
        state: what BUILD would have handed to `__setstate__`; None when there is none.
        has_state: distinguishes a state of None from no state.
        elements: what would have been appended, for subclasses of list (and sets).
        items: what would have been set by key, for subclasses of dict.
    """

    how: str
    callable: object
    args: object = ()
    kwargs: object = None
    state: object = None
    has_state: bool = False
    elements: list[object] | tuple[()] = ()
    items: list[tuple[object, object]] | tuple[()] = ()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute from the pickled state: a dict, or a pair of a dict and a dict of slots.

        Raises:
            AttributeError: the state has no such name, or it begins with two underscores.
        """
        if name.startswith("__") or name in Record.__slots__:
            raise AttributeError(name)
        state = self.state
        for found in state if isinstance(state, tuple) else (state,):
            if isinstance(found, dict) and name in found:
                return found[name]
        raise AttributeError(f"'{self.type_name}' has no attribute '{name}' in its pickled state")

    @property
    def type_name(self) -> str:
        """The name to show: `argparse.Namespace`."""
        named = self.callable
        if named == Global("copyreg", "_reconstructor") or named == Global("copy_reg", "_reconstructor"):
            named = self.args[0] if isinstance(self.args, tuple) and self.args else named
        return str(named) if isinstance(named, Global) else "object"


class OrderedDict_(dict[Any, Any]):
    """`collections.OrderedDict` as the file has it.

    `attributes` is its instance state, or None: where a state dict keeps `_metadata`.
    """

    attributes: object = None


class Set_(set[Any]):
    """A set in the order of the file.

    Tensors and objects are told apart by identity alone: a plain set would give them another order, and so
    other names, each time they are read.
    """

    __slots__ = ("order",)

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.order = dict.fromkeys(items)
        super().__init__(self.order)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)

    def __reduce__(self) -> tuple[Any, ...]:
        return set, (list(self),)  # to others, such as DCP's library, it is a set

    def update(self, *groups: Iterable[Any]) -> None:
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
    """What Python calls the type of a container, an OrderedDict too: `dict`."""
    return next((kind.__name__ for kind in CONTAINERS if isinstance(value, kind)), type(value).__name__)


def remade(original: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of the same kind and with the same attributes, holding other items."""
    new = type(original)(items)
    if isinstance(new, OrderedDict_) and isinstance(original, OrderedDict_):
        new.attributes = original.attributes
    return new


ORDERED_DICT = Global("collections", "OrderedDict")

# What a tensor with a type or attributes of its own (nn.Buffer, a subclass) is pickled as: a call on the
# function that makes a tensor and its arguments. Here the tensor itself takes their place; the writer
# writes the two again.
FROM_TYPE = {
    Global("torch._tensor", "_rebuild_from_type_v2"),
    Global("torch._tensor", "_rebuild_from_type"),
    Global("torch.tensor", "_rebuild_from_type"),
}

PARAMETER = {
    Global("torch._utils", "_rebuild_parameter"),
    Global("torch._utils", "_rebuild_parameter_with_state"),
}

# What wraps a tensor without changing its values: the inner tensor is the first argument.
WRAPPERS = PARAMETER | FROM_TYPE


def tensor_of(value: object) -> TensorRef | None:
    """The tensor that a value is, or that a saved `nn.Parameter` wraps; None when it is not a tensor."""
    if isinstance(value, TensorRef):
        return value
    if isinstance(value, Record) and value.callable in WRAPPERS and isinstance(value.args, tuple):
        inner = value.args[0] if value.args else None
        return inner if isinstance(inner, TensorRef) else None
    return None


def with_tensor(value: object, tensor: TensorRef) -> object:
    """The same value around another tensor: what wraps one still does, and a bare one is replaced."""
    if isinstance(value, Record) and isinstance(value.args, tuple):
        return replace(value, args=(tensor, *value.args[1:]))
    return tensor


def children(value: object) -> Iterator[object]:
    """The values directly inside a value."""
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
        for key, item in value.items:
            yield key
            yield item


def in_brief(value: object) -> str:
    """A key or an operand in a few words: to print a value from a file in full may take for ever, or fail."""
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


def walk(root: object) -> Iterator[object]:
    """Every container of a tree once, however often it is referred to, and all leaves; no recursion."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if not isinstance(value, LEAVES):
            if id(value) in seen:
                continue
            seen.add(id(value))
            stack.extend(children(value))
        yield value


def is_plain(value: object) -> bool:
    """Whether a value is made of only containers, tensors, numbers and text, and needs no code to exist."""
    return all(
        each is None or isinstance(each, (dict, list, tuple, TensorRef, str, int, float, complex, bytes))
        for each in walk(value)
    )


def rebuild(root: object, change: Callable[[object], object]) -> object:
    """A copy of a tree in which `change` may put another value in place of any container.

    `change(value)` gets each dict, list, tuple, set and Record once and returns it, or what replaces it.
    Values that were in several places are one value in the copy too. Leaves are shared with the original.

    Raises:
        TooDeep: the nesting is deeper than MAX_DEPTH, or a tuple contains itself.
    """
    return _Copier(change).copy(root)


class TooDeep(ValueError):
    """A tree is nested deeper than any ordinary one."""


class _Copier:
    """One copy of a tree: remembers what each container became, so that sharing and cycles survive."""

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
        new = self._container(id(value), self.change(value))
        self.level -= 1
        return new

    def _container(self, key: int, value: object) -> object:
        """Mutable containers are entered before their contents, so that a cycle finds them."""
        if isinstance(value, dict):
            made = type(value)()
            self.done[key] = made
            made.update((self.copy(name), self.copy(item)) for name, item in value.items())
            if isinstance(value, OrderedDict_) and isinstance(made, OrderedDict_):
                made.attributes = self.copy(value.attributes)
        elif isinstance(value, list):
            items: list[object] = []
            self.done[key] = items
            items.extend(map(self.copy, value))
        elif isinstance(value, Record):
            record = Record(value.how, value.callable)
            self.done[key] = record
            self._fill(record, value)
        elif isinstance(value, tuple | set | frozenset):
            made_of = type(value)(map(self.copy, value))
            self.done.setdefault(key, made_of)  # a tuple inside a list inside it was copied on the way
        else:
            self.done[key] = value
        return self.done[key]

    def _fill(self, new: Record, old: Record) -> None:
        new.callable, new.args, new.kwargs = map(self.copy, (old.callable, old.args, old.kwargs))
        new.state, new.has_state = self.copy(old.state), old.has_state
        new.elements = list(map(self.copy, old.elements))
        new.items = [(self.copy(key), self.copy(value)) for key, value in old.items]
