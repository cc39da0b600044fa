"""Tensors as torch.save writes them, matched whole by a regular expression instead of opcode by opcode.

Nearly every tensor of a checkpoint is a call of `_rebuild_tensor_v2` in thirty opcodes that are always the
same: a new storage, a shape, a stride, no hooks. Matching them at once takes a third of the time of running
them, and a checkpoint may hold 100,000 tensors. Anything unusual is left to the machine.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import Any, NamedTuple

from ...inert_pickle.machine import Machine, PickleFault
from ...inert_pickle.opcodes import uint4
from ...inert_pickle.values import ORDERED_DICT, Global, OrderedDict_, in_brief
from ...tensors.dtypes import DTYPES, STORAGE_DTYPES, DType
from ...tensors.ref import MAX_BYTES, Storage, TensorRef, extent, is_count
from .templates import FORM, NUMBER, TENSOR, Template

UNTYPED = Global("torch.storage", "UntypedStorage")
STORAGE_MODULES = ("torch", "torch.cuda", "torch.storage")


class StorageForm(NamedTuple):
    """What a persistent id says of a storage besides its key. `numel` counts elements of the class `kind`."""

    kind: str
    location: str
    numel: int
    nbytes: int


# Returns the storage of a key, the same object each time.
FindStorage = Callable[[str, StorageForm], Storage]
# Returns those of several keys, each of the size that its form states.
FindStorages = Callable[[Sequence[str], Sequence[StorageForm]], Sequence[Storage]]


def element_type(kind: str) -> DType:
    """Return the element type of a storage class; `uint8` for an untyped storage, which counts bytes."""
    return STORAGE_DTYPES.get(kind, DTYPES["uint8"])


def itemsize(kind: str) -> int:
    """Return the bytes of an element of a storage class."""
    return element_type(kind).itemsize


def storage_id(identity: object) -> tuple[str, StorageForm, tuple[str, int, int] | None]:
    """Check a persistent id; return its key, its form, and of a view key, offset and number of elements."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise PickleFault(f"its pickle refers to something that is not a storage: {in_brief(identity)[:60]}")
    _, kind, key, location, numel = identity[:5]
    view = identity[5] if len(identity) == 6 else None
    is_known = isinstance(kind, Global) and kind.module in STORAGE_MODULES
    if not is_known or (kind.name not in STORAGE_DTYPES and kind.name != UNTYPED.name):
        raise PickleFault(f"its pickle has a storage of unknown class {in_brief(kind)[:60]}")
    if not isinstance(key, str) or not isinstance(location, str) or not is_count(numel):
        raise PickleFault("its pickle has a malformed storage")
    if view is not None:
        is_triple = isinstance(view, tuple) and len(view) == 3 and isinstance(view[0], str)
        if not is_triple or not all(map(is_count, view[1:])) or sum(view[1:]) > numel:
            raise PickleFault(f"its pickle has a malformed view of storage '{key[:80]}'")
    return key, StorageForm(kind.name, location, numel, numel * itemsize(kind.name)), view


# The opcodes of text, four bytes of length and the text, and of a place in the memo.
TEXT, LONG_BINPUT = b"X", b"r"

WIDEST = 16  # bytes of the widest element
MOST_FORMS = 4096  # that are remembered: honest files have a few dozen


class _Form:
    """What tensors of one form have in common."""

    __slots__ = ("following", "kind", "storage", "template", "tensor")

    def __init__(
        self,
        template: Template,
        kind: Global,
        storage: StorageForm,
        tensor: tuple[DType, tuple[int, ...], tuple[int, ...], int, bool],
    ) -> None:
        self.template = template
        self.kind = kind  # the class under which torch pickles their storages
        self.storage = storage  # what their persistent ids say besides the key
        self.tensor = tensor  # dtype, shape, stride, offset and requires_grad
        self.following = self  # which form came behind this one the last time

    def values(self, name: str | None, key: str, tensor: TensorRef) -> list[object]:
        """Return what the opcodes of a tensor, and of the name before it, put into the memo."""
        _, shape, stride, offset, requires_grad = self.tensor
        hooks, identity = (
            OrderedDict_(),
            ("storage", self.kind, key, self.storage.location, self.storage.numel),
        )
        arguments = tensor.storage, offset, shape, stride, requires_grad, hooks
        sizes = filter(None, (shape, stride))  # an empty tuple is not stored
        return [*([] if name is None else [name]), key, identity, *sizes, hooks, arguments, tensor]


class TensorPattern:
    """A shortcut of the machine, taken before the name `_rebuild_tensor_v2`."""

    def __init__(self, rebuild: Global, find_storages: FindStorages) -> None:
        self.rebuild = rebuild
        self.find_storages = find_storages
        self.rewrites = 0
        self._begin_again()
        # Of each tensor whose values are not yet in the memo: where they belong, and what they are made of.
        self.places = array("Q")
        # (forms, names, keys and tensors, each in a list)
        self.made: list[list[Any]] = [[], [], [], []]

    def _begin_again(self) -> None:
        self.forms: dict[tuple[bytes, ...], _Form | None] = {}
        self.last: _Form | None = None

    def __call__(self, machine: Machine, position: int) -> int:
        """Push the tensor at `position`, and all that follow it under a name each, as in a state dict."""
        if machine.rewrites != self.rewrites:
            self.rewrites = machine.rewrites  # what the forms refer to may have been replaced
            self._begin_again()
        if machine.far:
            return position
        data, index = machine.data, len(machine.memo)
        places, forms, names, keys = array("Q"), list[_Form](), list[str | None](), list[str]()
        at, name = position, None
        while found := self._at(machine, at, index):
            form, key = found
            forms.append(form)
            names.append(name)
            keys.append(key.decode())
            places.append(index - (name is not None))
            index += form.template.count
            position = at + form.template.size(key)
            if data[position : position + 1] != TEXT:
                break
            begin = position + 5
            end = at = begin + uint4(data, position + 1)[0]
            if data[end : end + 5] != LONG_BINPUT + index.to_bytes(4, "little"):
                break
            try:
                name = data[begin:end].decode()
            except UnicodeDecodeError:
                break
            at, index = end + 5, index + 1
        if forms:
            self._push(machine, places, forms, names, keys)
        return position

    def _push(
        self,
        machine: Machine,
        places: array[int],
        forms: list[_Form],
        names: list[str | None],
        keys: list[str],
    ) -> None:
        """Push tensors, each but the first behind its name, and leave out what they put into the memo."""
        storages = self.find_storages(keys, [form.storage for form in forms])
        tensors = [TensorRef(each, *form.tensor) for each, form in zip(storages, forms, strict=True)]
        machine.stack += islice(chain.from_iterable(zip(names, tensors, strict=True)), 1, None)
        machine.memo += repeat(None, places[-1] + (len(names) > 1) + forms[-1].template.count - places[0])
        self.places += places
        made: tuple[list[Any], ...] = forms, names, keys, tensors
        for kept, new in zip(self.made, made, strict=True):
            kept += new

    def recall(self, machine: Machine, index: int) -> None:
        """Put the values of the tensor that has a place in the memo there."""
        number = bisect_right(self.places, index) - 1
        if number >= 0:
            forms, *made = self.made
            first, (name, key, tensor) = self.places[number], (column[number] for column in made)
            values = forms[number].values(name, key, tensor)
            if index < first + len(values):
                machine.memo[first : first + len(values)] = values

    def settle(self, machine: Machine) -> None:
        """Put the values of all tensors into the memo."""
        for place in self.places:
            if machine.memo[place] is None:
                self.recall(machine, place)
        self.places, self.made = array("Q"), [[], [], [], []]

    def _at(self, machine: Machine, position: int, index: int) -> tuple[_Form, bytes] | None:
        """Return the form and the key of the tensor at a position; None unless it is one that fits a file."""
        last = self.last
        if last is not None:
            form = self.last = last.following
            if (key := form.template.key_at(machine.data, position, index)) is not None:
                return form, key
        match = TENSOR.match(machine.data, position)
        new = self._form(machine, match) if match else None
        if new is None or (key := new.template.key_at(machine.data, position, index)) is None:
            return None
        if last is not None:
            last.following = new
        self.last = new
        return new, key

    def _form(self, machine: Machine, match: re.Match[bytes]) -> _Form | None:
        """Return the form of a match, which may have been there before."""
        like = match.group(*FORM)
        if like not in self.forms:
            if len(self.forms) >= MOST_FORMS:
                self._begin_again()
            self.forms[like] = self._new_form(machine, match)
        return self.forms[like]

    def _new_form(self, machine: Machine, match: re.Match[bytes]) -> _Form | None:
        """Return what the references and numbers of a match mean; None unless it is a tensor of torch's."""
        gets = match.group("rebuild", "word", "kind", "location", "hooks")
        rebuild, word, kind, location, hooks = (_referred(machine, get) for get in gets)
        dtype = STORAGE_DTYPES.get(kind.name) if type(kind) is Global else None
        if dtype is None or kind.module not in STORAGE_MODULES or type(location) is not str:
            return None
        if rebuild is not self.rebuild or word != "storage" or hooks is not ORDERED_DICT:
            return None
        shape, stride = _numbers(match["shape"]), _numbers(match["stride"])
        numel, offset = _numbers(match["numel"] + match["offset"])
        is_sized = len(shape) == len(stride) and min(numel, offset, *shape, *stride) >= 0
        if not is_sized or extent(shape) * WIDEST > MAX_BYTES:
            return None
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if 0 not in shape and last >= numel:
            return None
        storage = StorageForm(kind.name, location, numel, numel * dtype.itemsize)
        tensor = dtype, shape, stride, offset, match["grad"] == b"\x88"
        return _Form(Template(match), kind, storage, tensor)


def _referred(machine: Machine, get: bytes) -> Any:
    """Return what a reference to the memo means."""
    index = int.from_bytes(get[1:], "little")
    return machine.value_at(index) if index < len(machine.memo) else None


def _numbers(opcodes: bytes) -> tuple[int, ...]:
    numbers = re.findall(NUMBER, opcodes, re.DOTALL)
    return tuple(int.from_bytes(number[1:], "little", signed=number[:1] == b"J") for number in numbers)


# What tensors of one form share: also where they are tagged to lie, which decides what is written of that.
LIKE = attrgetter(
    *("storage.kind", "storage.location", "storage.data.nbytes", "dtype.name"),
    *("offset", "shape", "stride", "conj", "neg", "requires_grad"),
)


class WrittenTensors:
    """The same shortcut for what writes a pickle: what was written of one is the template of others."""

    def __init__(self, key_of: Callable[[Storage], str]) -> None:
        self.key_of = key_of
        self.templates: dict[tuple[object, ...], Template] = {}

    def written(self, tensor: TensorRef, index: int) -> tuple[bytes, int] | None:
        """Return a tensor's opcodes, and how many values they put into the memo; None for a new form."""
        template = self.templates.get(LIKE(tensor))
        if template is None:
            return None
        return template.written(self.key_of(tensor.storage).encode(), index), template.count

    def learn(self, tensor: TensorRef, opcodes: bytes, index: int) -> None:
        """Take what was written of a tensor for others of its form, unless it holds more than a template."""
        match = TENSOR.fullmatch(opcodes)
        if match and len(self.templates) < MOST_FORMS:
            template = Template(match)
            if template.written(match["key"], index) == opcodes:
                self.templates[LIKE(tensor)] = template
