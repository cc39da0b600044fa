"""Turn the objects in a checkpoint into plain values, which `torch.load(weights_only=True)` takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, NamedTuple

from ..core.checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..core.checkpoint.dotted_names import MAX_NAMES, Path, dotted
from ..core.checkpoint.pickled_modules import BadModules, is_module, named, own_attributes
from ..core.checkpoint.special_tensors import SpecialTensor, require_plain, special_tensor
from ..core.inert_pickle import known_names, plain_objects, values
from ..core.inert_pickle.known_names import is_value, wraps
from ..core.inert_pickle.values import Global, OrderedDict_, Record, in_brief, tensor_of
from ..core.tensors.ref import TensorRef
from ..errors import CkptToolError, Refused, Unsupported


class Replacement(NamedTuple):
    """A value that became another."""

    name: str  # its dotted path
    was: str  # its type: `argparse.Namespace`
    now: str  # what it became: `dict`


@dataclass(frozen=True, slots=True)
class Disarmed:
    """What `disarm` changed.

    Attributes:
        changed: every value that became another.
        left_out: dotted paths of what has no place any more: attributes of pickled models but their state,
            and of tensors those that torch's own class computes; a defaultdict's factory, a deque's maxlen.
        dtensors: whether DTensors are left, for which torch.load needs `torch.distributed.tensor` imported.
    """

    changed: tuple[Replacement, ...]
    left_out: tuple[str, ...] = ()
    dtensors: bool = False


@takes_checkpoint
def disarm(checkpoint: Checkpoint, *, state: str | None = None) -> tuple[Checkpoint, Disarmed]:
    """Return a checkpoint of only tensors and plain values, which `torch.load(weights_only=True)` accepts.

    An object with attributes becomes a dict, a dict or list of another class a plain one, a pickled model its
    state dict, a NumPy scalar a number, an array a tensor (a list where torch lacks the type); a path, date,
    decimal number, UUID, class or function becomes text, a frozenset a set. A tensor of another class becomes
    torch's own. Any other object becomes a dict that says which callable would have made it of which
    arguments. One object in several places is one value in all of them. The model's state keeps its digest.

    Args:
        checkpoint: the checkpoint; it stays as it is. Nothing that it names is imported or called.
        state: dotted path of the state whose digest must stay; found when None.

    Raises:
        Refused: a tensor is of a kind that torch does not load without its class, such as ShardedTensor, or
            the contents are nested too deeply.
        Unsupported: the names of what changes would fill the memory.
        NoState: there is no state at `state`.

    Example:
        >>> with ckpttool.open("armed.pt") as checkpoint:
        ...     plain, disarmed = ckpttool.disarm(checkpoint)
        ...     saved = ckpttool.save(plain, "disarmed.pt")
        >>> ckpttool.verify("disarmed.pt", no_code=True).ok
        True
    """
    before = _state_of(checkpoint, state)
    # Where an array or an object would be taken for a state or a part of one, arrays become lists instead.
    new, changes = _Disarmer(checkpoint, apart=False).run()
    if before is not None and _state_of(new, state) != before:
        new, changes = _Disarmer(checkpoint, apart=True).run()
    return new, changes


def _state_of(checkpoint: Checkpoint, where: str | None) -> tuple[Path, tuple[str, ...]] | None:
    """Return the path and the tensors' names of a state; None where none was named and none is found."""
    try:
        state = checkpoint.state(where)
    except CkptToolError:
        if where is not None:
            raise
        return None
    return state.path, (*state.tensors, *state.likes)


class _Disarmer:
    """Copies one tree, each object as a plain value."""

    def __init__(self, checkpoint: Checkpoint, *, apart: bool) -> None:
        # True: arrays become lists, attributes with tensors lists of pairs: no state is looked for there.
        self.apart = apart
        self.checkpoint = checkpoint
        self.changed: list[Replacement] = []
        self.left_out: list[str] = []
        self.refused: dict[str, SpecialTensor] = {}
        self.done: dict[int, object] = {}
        self.making: dict[int, Path] = {}  # where those lie that are being made, each in the one before
        self.originals: list[object] = []  # they live as long as their ids are keys of `done`
        self.names_left = MAX_NAMES + 64 * checkpoint.nbytes

    def run(self) -> tuple[Checkpoint, Disarmed]:
        try:
            tree = self.value(self.checkpoint.tree, ())
        except (values.TooDeep, RecursionError):
            raise Refused(self.checkpoint.path, "its contents are nested too deeply to be copied") from None
        # Tensors that torch loads only with the code of their class
        state = self.checkpoint.found_state() if self.refused else None
        where = f"{state.where}." if state is not None and state.path else ""
        likes = {name.removeprefix(where): like for name, like in self.refused.items()}
        require_plain(self.checkpoint.path, likes, "can't be loaded by torch.load(weights_only=True)")
        names = known_names.names_in(tree)
        if others := names - known_names.NAMES:  # never, as each value was made here
            raise Refused(self.checkpoint.path, f"{min(map(str, others))} would be left in it")
        new = replace(self.checkpoint, tree=tree, protocol=2, names=frozenset(names), opened=())
        dtensors = not names.isdisjoint(known_names.DTENSOR_NAMES)
        return new, Disarmed(tuple(self.changed), tuple(self.left_out), dtensors)

    def refusal(self, path: Path, why: str) -> Refused:
        """Return the error for a value that has no plain form."""
        hint = f"its tensors alone: ckpttool convert {shlex.quote(self.checkpoint.path)} out.safetensors"
        return Refused(self.checkpoint.path, f"'{dotted(path)}' {why}", hint=hint)

    def note(self, path: Path, was: str, now: str) -> None:
        """Record a change."""
        self.changed.append(Replacement(self.noted(path, was, now), was, now))

    def leave_out(self, path: Path, names: Iterable[str]) -> None:
        """Record attributes that have no place any more."""
        self.left_out += [self.noted((*path, name)) for name in names]

    def noted(self, path: Path, *types: str) -> str:
        words = (*path, *types)
        self.names_left -= sum(map(len, words)) + len(words)
        if self.names_left < 0:
            raise Unsupported(self.checkpoint.path, "the names of its objects need too much memory")
        return dotted(path)

    def value(self, value: object, path: Path) -> object:
        """Return a value of the tree in its plain form."""
        if type(value) is int and value.bit_length() >= known_names.MAX_INTEGER:
            self.note(path, "int", "text")
            return hex(value)
        if type(value) is Global and value not in known_names.DTYPE_NAMES:
            self.note(path, str(value), "text")
            return str(value)
        if not isinstance(value, dict | list | tuple | set | frozenset | Record):
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        if id(value) in self.making:
            return self.inside_itself(value)
        if len(self.making) == values.MAX_DEPTH:
            raise values.TooDeep
        self.originals.append(value)
        self.making[id(value)] = path
        made = self.record(value, path) if isinstance(value, Record) else self.container(value, path)
        del self.making[id(value)]
        return self.done.setdefault(id(value), made)

    def inside_itself(self, value: object) -> object:
        """Return the list that a tuple becomes which holds itself, as torch can't read its pickle."""
        path = self.making[id(value)]
        if not isinstance(value, tuple):
            kind = value.type_name if isinstance(value, Record) else values.container_name(value)
            raise self.refusal(path, f"({kind}) holds itself, which torch.load(weights_only=True) can't load")
        self.note(path, "tuple that holds itself", "list")
        made: list[object] = []
        return self.done.setdefault(id(value), made)

    # Containers. Mutable ones are known before their contents, so that a cycle finds them.

    def container(self, value: Any, path: Path) -> object:
        if isinstance(value, dict):
            made = self.fill(type(value)(), value.items(), value, path)
            if isinstance(value, OrderedDict_) and value.attributes is not None:
                attributes = self.value(value.attributes, path)
                made.attributes = attributes if isinstance(attributes, dict) else None
                if made.attributes is None:
                    self.note(path, "attributes of an OrderedDict", "nothing")
            return made
        if isinstance(value, list):
            return self.items(value, value, path)
        if isinstance(value, tuple):
            items = [self.value(item, (*path, str(i))) for i, item in enumerate(value)]
            if id(value) not in self.done:
                return tuple(items)
            self.done[id(value)] += items  # type: ignore[operator]  # see inside_itself
            return self.done[id(value)]
        if isinstance(value, frozenset):
            self.note(path, "frozenset", "set")
        items = list(value)
        return values.Set_(self.plain_keys(items, [(*path, str(i)) for i in range(len(items))]))

    def fill(self, made: Any, items: Any, of: object, path: Path) -> Any:
        """Fill an empty dict, which takes the place of `of`."""
        self.done[id(of)] = made
        pairs = list(items)
        places = [(*path, in_brief(key)) for key, _ in pairs]
        keys = self.plain_keys([key for key, _ in pairs], places)
        for key, (_, item), at in zip(keys, pairs, places, strict=True):
            made[key] = self.value(item, at)
        return made

    def items(self, items: Any, of: object, path: Path) -> list[object]:
        """Return a list that takes the place of `of`."""
        made: list[object] = []
        self.done[id(of)] = made
        made.extend(self.value(item, (*path, str(i))) for i, item in enumerate(items))
        return made

    # Objects.

    def record(self, value: Record, path: Path) -> object:
        plain, like = tensor_of(value), special_tensor(value)
        if (plain or like) and known_names.is_tensor_taken(value) and not (plain and wraps(value).attributes):
            return value
        if plain is not None:
            return self.wrapped(value, plain, path)
        if like is not None:
            self.refused[dotted(path)] = like
            return None
        if is_value(value):
            return value
        if (number := plain_objects.scalar_of(value)) is not None:
            parts = number if isinstance(number, tuple) else None
            self.note(path, plain_objects.scalar_type(value), "complex" if parts else type(number).__name__)
            return Record("reduce", Global("builtins", "complex"), parts) if parts else number
        if (text := plain_objects.text_of(value)) is not None:
            self.note(path, value.type_name, "text")
            return text
        return self.other(value, path)

    def wrapped(self, value: Record, plain: TensorRef, path: Path) -> object:
        """Return a tensor of torch's own class, or a Parameter, with its attributes in their plain forms."""
        wrapping = wraps(value)
        # None stands for a Parameter that is made as one.
        if (kind := wrapping.kind) not in (None, Global("torch", "Tensor")):
            self.note(path, str(kind) if isinstance(kind, Global) else "object", "tensor")
        self.leave_out(path, wrapping.left_out)
        attributes = {name: self.value(item, (*path, name)) for name, item in wrapping.attributes.items()}
        return known_names.wrapped(plain, wrapping.requires_grad, attributes)

    def other(self, value: Record, path: Path) -> object:
        array, attributes = plain_objects.array_of(value), plain_objects.attributes_of(value)
        state = made = None
        with suppress(BadModules):
            state = [*named(value)] if is_module(value) else None
        if state is not None:
            self.note(path, value.type_name, "state dict")
            self.leave_out(path, (name for name, _ in own_attributes(value)))
            return self.fill(OrderedDict_(), state, value, path)
        with suppress(ValueError):  # of elements that have no plain form
            made = self.array(array, path) if array is not None else None
        if made is not None:
            self.note(path, "numpy.ndarray", "list" if isinstance(made, list) else "tensor")
            return made
        if isinstance(attributes, list):
            self.leave_out(path, plain_objects.settings_of(value))
            self.note(path, value.type_name, "list")
            return self.items(attributes, value, path)
        if attributes is not None and not (self.apart and _may_be_state(value, attributes)):
            self.leave_out(path, plain_objects.settings_of(value))
            self.note(path, value.type_name, "dict")
            return self.fill({}, attributes.items(), value, path)
        self.note(path, value.type_name, "record")
        return self.fill({}, self.parts(value), value, path)

    def array(self, array: plain_objects.PickledArray, path: Path) -> object:
        tensor = None if self.apart else array.tensor(self.checkpoint.path)
        return tensor or array.nested(lambda item: self.value(item, path))

    def parts(self, value: Record) -> Iterator[tuple[str, object]]:
        """Yield what an object is made of, each part by its name."""
        state = value.state
        if self.apart and isinstance(state, dict) and _may_be_state(value, state):
            state = [*map(list, state.items())]
        yield "callable", str(value.callable) if isinstance(value.callable, Global) else value.callable
        yield "args", value.args
        yield from [("kwargs", value.kwargs)] if value.kwargs else []
        yield from [("state", state)] if value.has_state else []
        yield from [("elements", [*value.elements])] if value.elements else []
        yield from [("items", [*map(list, value.items)])] if value.items else []

    # Keys of dicts and items of sets, which need a hash.

    def plain_keys(self, old: list[Any], places: list[Path]) -> list[Any]:
        """Return the keys of a dict or the items of a set in their plain forms, no two of them equal."""
        new = [key if type(key) is str else self.key(key, at) for key, at in zip(old, places, strict=True)]
        changes = [b is not a and (type(b) is not type(a) or b != a) for a, b in zip(old, new, strict=True)]
        taken = {key for key, is_changed in zip(new, changes, strict=True) if not is_changed}
        for number, is_changed in enumerate(changes):
            if is_changed:
                new[number] = _apart(new[number], taken)
                taken.add(new[number])
        return new

    def key(self, key: object, path: Path) -> object:
        """Return a key or an item of a set as something that has a hash."""
        if isinstance(key, values.FrozenSet_):
            self.note(path, "frozenset", "tuple")
        if isinstance(key, tuple | values.FrozenSet_):
            return tuple(self.key(item, path) for item in key)
        if not isinstance(key, Record) or tensor_of(key) is not None or is_value(key):
            return self.value(key, path)
        number = plain_objects.scalar_of(key)
        plain = number if isinstance(number, int | float | str | bytes) else plain_objects.text_of(key)
        try:
            plain = plain_objects.described(key) if plain is None else plain
        except plain_objects.NoText as why:
            what = f"is a key or an item of a set that can't become text: it holds {why}"
            raise self.refusal(path, what) from None
        self.note(path, key.type_name, type(plain).__name__)
        return plain


def _may_be_state(value: Record, attributes: Mapping[object, object]) -> bool:
    """Return whether the attributes of an object, as a dict, could be or complete a dict of tensors."""
    parts, array_of = values.walk(value), plain_objects.array_of
    return not attributes or any(isinstance(each, TensorRef) or array_of(each) is not None for each in parts)


def _apart(key: object, taken: set[Any]) -> object:
    """Return a key, with a number behind it if it is among those taken."""
    text = str(key) if isinstance(key, str | int | float | bytes) else in_brief(key)
    numbered = (f"{text}~{number}" for number in count(2))
    return next(name for name in chain([key], numbered) if name not in taken)
