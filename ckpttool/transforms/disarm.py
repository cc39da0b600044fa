"""Turn the objects in a checkpoint into plain values, which `torch.load(weights_only=True)` takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..checkpoint.checkpoint import Checkpoint, takes_checkpoint
from ..checkpoint.dotted_names import MAX_NAMES, Path, dotted
from ..checkpoint.pickled_modules import BadModules, is_module, named, own_attributes
from ..checkpoint.rebuilt_tensors import special_tensor
from ..checkpoint.special_tensors import SpecialTensor, require_plain
from ..errors import CkptToolError, Refused, Unsupported
from ..inert_pickle.known_names import (
    DTENSOR_NAMES,
    DTYPE_NAMES,
    MAX_INTEGER,
    NAMES,
    is_tensor_taken,
    is_value,
    names_in,
    wrapped,
    wraps,
)
from ..inert_pickle.numpy_values import Array, array_of, scalar_of, scalar_type
from ..inert_pickle.plain_objects import NoText, attributes_of, described, settings_of, text_of
from ..inert_pickle.values import (
    MAX_DEPTH,
    FrozenSet_,
    Global,
    OrderedDict_,
    Record,
    Set_,
    TooDeep,
    container_name,
    in_brief,
    tensor_of,
    walk,
)
from ..tensors.ref import TensorRef

COMPLEX = Global("builtins", "complex")
TORCHS_CLASSES = (None, Global("torch", "Tensor"))  # None stands for a Parameter that is made as one
CONTAINERS = (dict, list, tuple, set, frozenset, Record)


class Change(NamedTuple):
    """A value that became another.

    Attributes:
        name: its dotted path.
        was: its type: `argparse.Namespace`.
        now: what it became: `dict`.
    """

    name: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class Disarmed:
    """What `disarm` changed.

    Attributes:
        changed: every value that became another.
        left_out: dotted paths of what has no place any more: attributes of pickled models but their state,
            and of tensors those that torch's own class computes; a defaultdict's factory, a deque's maxlen.
        dtensors: whether DTensors are left, for which torch.load needs `torch.distributed.tensor` imported.
    """

    changed: tuple[Change, ...]
    left_out: tuple[str, ...] = ()
    dtensors: bool = False


@takes_checkpoint
def disarm(checkpoint: Checkpoint, *, state: str | None = None) -> tuple[Checkpoint, Disarmed]:
    """Return a checkpoint of tensors and plain values alone, which `torch.load(weights_only=True)` takes.

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
        self.changed: list[Change] = []
        self.left_out: list[str] = []
        self.refused: dict[str, SpecialTensor] = {}
        self.done: dict[int, object] = {}
        self.making: dict[int, Path] = {}  # where a value lies that is being made
        self.originals: list[object] = []  # they live as long as their ids are keys of `done`
        self.level = 0
        self.names_left = MAX_NAMES + 64 * checkpoint.nbytes

    def run(self) -> tuple[Checkpoint, Disarmed]:
        try:
            tree = self.value(self.checkpoint.tree, ())
        except (TooDeep, RecursionError):
            raise Refused(self.checkpoint.path, "its contents are nested too deeply to be copied") from None
        self.refuse()
        names = names_in(tree)
        if not names <= NAMES:  # never, as each value was made here
            raise Refused(self.checkpoint.path, f"{min(map(str, names - NAMES))} would be left in it")
        new = replace(self.checkpoint, tree=tree, protocol=2, names=frozenset(names), opened=())
        dtensors = not names.isdisjoint(DTENSOR_NAMES)
        return new, Disarmed(tuple(self.changed), tuple(self.left_out), dtensors)

    def refuse(self) -> None:
        """Raise Refused if there are tensors that torch loads only with the code of their class."""
        state = self.checkpoint.found_state() if self.refused else None
        where = f"{state.where}." if state is not None and state.path else ""
        likes = {name.removeprefix(where): like for name, like in self.refused.items()}
        require_plain(self.checkpoint.path, likes, "can't be loaded by torch.load(weights_only=True)")

    def refusal(self, path: Path, why: str) -> Refused:
        """Return the error for a value that has no plain form."""
        hint = f"its tensors alone: ckpttool convert {shlex.quote(self.checkpoint.path)} out.safetensors"
        return Refused(self.checkpoint.path, f"'{dotted(path)}' {why}", hint=hint)

    def note(self, path: Path, was: str, now: str) -> None:
        """Record a change."""
        self.count((*path, was, now))
        self.changed.append(Change(dotted(path), was, now))

    def leave_out(self, path: Path, names: Iterable[str]) -> None:
        """Record attributes that have no place any more."""
        for name in names:
            self.count((*path, name))
            self.left_out.append(dotted((*path, name)))

    def count(self, words: Path) -> None:
        self.names_left -= sum(map(len, words)) + len(words)
        if self.names_left < 0:
            raise Unsupported(self.checkpoint.path, "the names of its objects need too much memory")

    def value(self, value: object, path: Path) -> object:
        """Return a value of the tree in its plain form."""
        if type(value) is int and value.bit_length() >= MAX_INTEGER:
            self.note(path, "int", "text")
            return hex(value)
        if type(value) is Global and value not in DTYPE_NAMES:
            self.note(path, str(value), "text")
            return str(value)
        if not isinstance(value, CONTAINERS):
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        if id(value) in self.making:
            return self.inside_itself(value)
        if self.level == MAX_DEPTH:
            raise TooDeep
        self.level += 1
        self.originals.append(value)
        self.making[id(value)] = path
        made = self.record(value, path) if isinstance(value, Record) else self.container(value, path)
        del self.making[id(value)]
        self.level -= 1
        return self.done.setdefault(id(value), made)

    def inside_itself(self, value: object) -> object:
        """Return the list that a tuple becomes which holds itself, as torch can't read its pickle."""
        path = self.making[id(value)]
        if not isinstance(value, tuple):
            kind = value.type_name if isinstance(value, Record) else container_name(value)
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
        return Set_(self.plain_keys(items, [(*path, str(i)) for i in range(len(items))]))

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
        if plain is not None or like is not None:
            if is_tensor_taken(value) and (plain is None or not wraps(value).attributes):
                return value
            if plain is not None:
                return self.wrapped(value, plain, path)
            assert like is not None
            self.refused[dotted(path)] = like
            return None
        if is_value(value):
            return value
        number = scalar_of(value)
        if number is not None:
            parts = number if isinstance(number, tuple) else None
            self.note(path, scalar_type(value), "complex" if parts else type(number).__name__)
            return Record("reduce", COMPLEX, parts) if parts else number
        text = text_of(value)
        if text is not None:
            self.note(path, value.type_name, "text")
            return text
        return self.other(value, path)

    def wrapped(self, value: Record, plain: TensorRef, path: Path) -> object:
        """Return a tensor of torch's own class, or a Parameter, with its attributes in their plain forms."""
        wrapping = wraps(value)
        if wrapping.kind not in TORCHS_CLASSES:
            kind = wrapping.kind
            self.note(path, str(kind) if isinstance(kind, Global) else "object", "tensor")
        self.leave_out(path, wrapping.left_out)
        attributes = {name: self.value(item, (*path, name)) for name, item in wrapping.attributes.items()}
        return wrapped(plain, wrapping.requires_grad, attributes)

    def other(self, value: Record, path: Path) -> object:
        array, attributes = array_of(value), attributes_of(value)
        if (module := self.state_dict(value)) is not None:
            self.note(path, value.type_name, "state dict")
            self.leave_out(path, (name for name, _ in own_attributes(value)))
            return self.fill(OrderedDict_(), module, value, path)
        if array is not None and (made := self.array(array, path)) is not None:
            self.note(path, "numpy.ndarray", "list" if isinstance(made, list) else "tensor")
            return made
        if isinstance(attributes, list):
            self.leave_out(path, settings_of(value))
            self.note(path, value.type_name, "list")
            return self.items(attributes, value, path)
        if attributes is not None and not (self.apart and _may_be_state(value, attributes)):
            self.leave_out(path, settings_of(value))
            self.note(path, value.type_name, "dict")
            return self.fill({}, attributes.items(), value, path)
        self.note(path, value.type_name, "record")
        return self.fill({}, self.parts(value), value, path)

    def state_dict(self, value: Record) -> Iterable[tuple[str, object]] | None:
        """Return the entries of a pickled model's state dict; None for anything else."""
        try:
            return [*named(value)] if is_module(value) else None
        except BadModules:
            return None

    def array(self, array: Array, path: Path) -> object:
        """Return an array as a tensor, or as lists; None for elements that have no plain form."""
        tensor = None if self.apart else array.tensor(self.checkpoint.path)
        try:
            return tensor or array.nested(lambda item: self.value(item, path))
        except ValueError:
            return None

    def parts(self, value: Record) -> Iterator[tuple[str, object]]:
        """Yield what an object is made of, each part by its name."""
        yield "callable", str(value.callable) if isinstance(value.callable, Global) else value.callable
        yield "args", value.args
        if value.kwargs:
            yield "kwargs", value.kwargs
        if value.has_state:
            pairs = self.apart and isinstance(value.state, dict) and _may_be_state(value, value.state)
            yield "state", [*map(list, value.state.items())] if pairs else value.state  # type: ignore[attr-defined]
        if value.elements:
            yield "elements", [*value.elements]
        if value.items:
            yield "items", [*map(list, value.items)]

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
        if isinstance(key, tuple):
            return tuple(self.key(item, path) for item in key)
        if isinstance(key, FrozenSet_):
            self.note(path, "frozenset", "tuple")
            return tuple(self.key(item, path) for item in key)
        if not isinstance(key, Record) or tensor_of(key) is not None or is_value(key):
            return self.value(key, path)
        number = scalar_of(key)
        plain = number if isinstance(number, int | float | str | bytes) else text_of(key)
        if plain is None:
            plain = self.described(key, path)
        self.note(path, key.type_name, type(plain).__name__)
        return plain

    def described(self, key: Record, path: Path) -> str:
        try:
            return described(key)
        except NoText as why:
            what = f"is a key or an item of a set that can't become text: it holds {why}"
            raise self.refusal(path, what) from None


def _may_be_state(value: Record, attributes: Mapping[object, object]) -> bool:
    """Return whether the attributes of an object, as a dict, could be or complete a dict of tensors."""
    return not attributes or any(
        isinstance(part, TensorRef) or array_of(part) is not None for part in walk(value)
    )


def _apart(key: object, taken: set[Any]) -> object:
    """Return a key, with a number behind it if it is among those taken."""
    new, count = key, 1
    text = str(key) if isinstance(key, str | int | float | bytes) else in_brief(key)
    while new in taken:
        count += 1
        new = f"{text}~{count}"
    return new
