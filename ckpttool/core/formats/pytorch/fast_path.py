"""What tensors of one form have in common in a pickle of torch's: their opcodes but for a key and places."""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

from ...inert_pickle.machine import Machine, PickleFault
from ...inert_pickle.operands import uint4
from ...inert_pickle.values import ORDERED_DICT, Global, OrderedDict_, in_brief
from ...tensors.ref import DTYPES, MAX_BYTES, STORAGE_DTYPES, DType, Storage, TensorRef, extent, is_count

# Named groups are what tensors of one form have in common, and the key; unnamed ones are memo indices.
GET = rb"(?:h.|j....)"
PUT = rb"r(....)"
NUMBER = rb"(?:K.|M..|J....)"
SIZES = rb"\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)r" % ((NUMBER,) * 4)
PUT_UNLESS_EMPTY = rb"(?:(?<=r)(....)|(?<=\)))"
TENSOR = re.compile(
    rb"(?P<rebuild>%b)(?P<storage>\(\((?P<word>%b)(?P<kind>%b)X)(.\0\0\0)(?P<key>[0-9]+)" % (GET, GET, GET)
    + rb"%b(?P<identity>(?P<location>%b)(?P<numel>%b)t)%bQ(?P<offset>%b)" % (PUT, GET, NUMBER, PUT, NUMBER)
    + rb"(?P<shape>%b)%b(?P<stride>%b)%b" % (SIZES, PUT_UNLESS_EMPTY, SIZES, PUT_UNLESS_EMPTY)
    + rb"(?P<end>(?P<grad>[\x88\x89])(?P<hooks>%b)\)R)%bt%bR%b" % (GET, PUT, PUT, PUT),
    re.DOTALL,
)
GROUPS = TENSOR.groupindex
FORM = [GROUPS[name] for name in ("rebuild", "storage", "identity", "offset", "shape", "stride", "end")]
KEY = GROUPS["key"]
PUTS = [group for group in range(KEY + 1, TENSOR.groups + 1) if group not in GROUPS.values()]

MOST_FORMS = 4096  # that are remembered: honest files have a few dozen


class OpcodeTemplate:
    """The opcodes of all tensors of one form: they differ in the storage's key and the places in the memo."""

    __slots__ = ("count", "head", "numbers")

    def __init__(self, match: re.Match[bytes]) -> None:
        """Take the form of a tensor that matched."""
        self.head = match["rebuild"] + match["storage"]
        holes = [match.start(group) - match.end(KEY) for group in PUTS if match[group] is not None]
        self.count = len(holes)  # values that one of them puts into the memo
        # What follows the key is a number in base 256: each place in the memo is a few of its digits, and
        # all places go up by the same.
        tail = bytearray(match[0][match.end(KEY) - match.start() :])
        for number, hole in enumerate(holes):
            tail[hole : hole + 4] = number.to_bytes(4, "little")
        # That number for the place 0, what each place adds to it, its bytes, and how many places there are.
        step = sum(1 << 8 * hole for hole in holes)
        self.numbers = int.from_bytes(tail, "little"), step, len(tail), self.count

    def written(self, key: bytes, index: int) -> bytes:
        """Return the opcodes of a tensor whose first value gets this place in the memo."""
        base, step, size, _ = self.numbers
        tail = (base + index * step).to_bytes(size, "little")
        return b"%b%b\0\0\0%b%b" % (self.head, bytes((len(key),)), key, tail)


# ---- Reading: one regular expression matches a whole tensor.
#
# Nearly every tensor of a checkpoint is a call of `_rebuild_tensor_v2` in thirty opcodes that are always
# the same: a new storage, a shape, a stride, no hooks. Matching them at once takes a third of the time of
# running them, and a checkpoint may hold 100,000 tensors. Anything unusual is left to the machine.


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
GETS = {b"h": 2, b"j": 5}  # and of a reference to one, with its bytes

WIDEST = 16  # bytes of the widest element
TOGETHER = 1000  # storages that are found together
NOWHERE: Any = None  # the storage of a tensor until it is found
NONE = StorageForm("", "", 0, 0)


# What is compared of a tensor: the opcodes before the key of its storage, where the key begins and ends, and
# the template of what follows.
_Parts = tuple[bytes, int, int, int, int, int, int]
# A tensor's dtype, shape, stride, offset and requires_grad.
_Description = tuple[DType, tuple[int, ...], tuple[int, ...], int, bool]


class _Form:
    """What tensors of one form have in common, with the number of digits in the key of their storage."""

    __slots__ = ("following", "kind", "parts", "storage", "tensor")

    def __init__(self, parts: _Parts, kind: Global, storage: StorageForm, tensor: _Description) -> None:
        self.parts = parts
        self.kind = kind  # the class under which torch pickles their storages
        self.storage = storage  # what their persistent ids say besides the key
        self.tensor = tensor
        self.following = self  # which form came behind this one the last time

    def values(self, name: str | None, key: str, tensor: TensorRef) -> list[object]:
        """Return what the opcodes of a tensor, and of the name before it, put into the memo."""
        _, shape, stride, offset, requires_grad = self.tensor
        hooks = OrderedDict_()
        identity = "storage", self.kind, key, self.storage.location, self.storage.numel
        arguments = tensor.storage, offset, shape, stride, requires_grad, hooks
        sizes = filter(None, (shape, stride))  # an empty tuple is not stored
        return [*([] if name is None else [name]), key, identity, *sizes, hooks, arguments, tensor]


class TensorPattern:
    """A shortcut of the machine, taken before the name `_rebuild_tensor_v2`.

    Tensors are pushed before their storages are known; `find` finds those of all that were pushed.
    """

    def __init__(self, rebuild: Global, find_storages: FindStorages) -> None:
        self.rebuild = rebuild
        self.find_storages = find_storages
        self.rewrites = 0
        self._begin_again()
        # Of each tensor whose values are not yet in the memo: where they belong, and what they are made of.
        self.places = array("Q")
        self.forms = list[_Form]()
        self.names = list[str | None]()
        self.keys = list[bytes]()
        self.tensors = list[TensorRef]()
        self.resolved = 0  # how many of these have their storages

    def _begin_again(self) -> None:
        self.known: dict[tuple[bytes | int, ...], _Form | None] = {}
        self.last = _Form((b"", 0, 0, 0, 0, 0, 0), self.rebuild, NONE, (DTYPES["uint8"], (), (), 0, False))

    def __call__(self, machine: Machine, position: int) -> int:
        """Push the tensor at `position`, and all that follow it under a name each, as in a state dict."""
        if machine.rewrites != self.rewrites:
            self.rewrites = machine.rewrites  # what the forms refer to may have been replaced
            self._begin_again()
        if machine.far:
            return position
        data, memo, push = machine.data, machine.memo, machine.stack.append
        startswith, form = data.startswith, self.last
        at, index, name, is_new = position, len(memo), None, False
        end = index
        while True:
            before, form = form, form.following
            head, key_at, key_end, base, step, size, count = form.parts
            key, tail = data[at + key_at : at + key_end], (base + index * step).to_bytes(size, "little")
            if not (startswith(head, at) and key.isdigit() and startswith(tail, at + key_end)):
                new, form = self._at(machine, at), before
                if new is None or new is form.following:  # it was compared just now
                    break
                form.following = new
                continue
            tensor = TensorRef(NOWHERE, *form.tensor)
            self.places.append(index - is_new)
            self.forms.append(form)
            self.names.append(name if is_new else None)
            self.keys.append(key)
            self.tensors.append(tensor)
            if name is not None:
                push(name)
            push(tensor)
            position, end = at + key_end + size, index + count
            following = self._name(machine, position, end)
            if following is None:
                break
            name, is_new, at = following
            index = end + is_new
        self.last = form
        memo += repeat(None, end - len(memo))
        return position

    def _name(self, machine: Machine, position: int, index: int) -> tuple[str | None, bool, int] | None:
        """Return the name before a tensor, whether it gets this place in the memo, and where it ends.

        The tensors of a list have none; the names of an optimizer's have a place already.
        """
        data = machine.data
        opcode = data[position : position + 1]
        if opcode == TEXT:
            begin = position + 5
            end = begin + uint4(data, position + 1)[0]
            if data[end : end + 5] != LONG_BINPUT + index.to_bytes(4, "little"):
                return None
            try:
                return data[begin:end].decode(), True, end + 5
            except UnicodeDecodeError:
                return None
        end = position + GETS.get(opcode, 0)
        value = _referred(machine, data[position:end]) if position < end <= machine.size else None
        if value is self.rebuild:
            return None, False, position
        return (value, False, end) if type(value) is str else None

    def find(self) -> None:
        """Find the storages of all tensors that were pushed."""
        first, self.resolved = self.resolved, len(self.keys)
        for begin in range(first, self.resolved, TOGETHER):
            some = slice(begin, begin + TOGETHER)
            keys = b" ".join(self.keys[some]).decode().split(" ")
            storages = self.find_storages(keys, [form.storage for form in self.forms[some]])
            for tensor, storage in zip(self.tensors[some], storages, strict=True):
                tensor.storage = storage

    def recall(self, machine: Machine, index: int) -> None:
        """Put the values of the tensor that has a place in the memo there."""
        number = bisect_right(self.places, index) - 1
        if number >= 0:
            self.find()
            first, name, key = self.places[number], self.names[number], self.keys[number].decode()
            values = self.forms[number].values(name, key, self.tensors[number])
            if index < first + len(values):
                machine.memo[first : first + len(values)] = values

    def settle(self, machine: Machine) -> None:
        """Put the values of all tensors into the memo."""
        self.find()
        for place in self.places:
            if machine.memo[place] is None:
                self.recall(machine, place)
        self.places, self.resolved = array("Q"), 0
        self.forms, self.names, self.keys, self.tensors = [], [], [], []

    def _at(self, machine: Machine, position: int) -> _Form | None:
        """Return the form of the tensor at a position, which may have been there before."""
        match = TENSOR.match(machine.data, position)
        if match is None:
            return None
        like = (*match.group(*FORM), len(match["key"]))
        if like not in self.known:
            if len(self.known) >= MOST_FORMS:
                self._begin_again()
            self.known[like] = self._new_form(machine, match)
        return self.known[like]

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
        template, digits = OpcodeTemplate(match), len(match["key"])
        head = template.head + digits.to_bytes(4, "little")
        parts = (head, len(head), len(head) + digits, *template.numbers)
        return _Form(parts, kind, storage, tensor)


def _referred(machine: Machine, get: bytes) -> Any:
    """Return what a reference to the memo means."""
    index = int.from_bytes(get[1:], "little")
    return machine.value_at(index) if index < len(machine.memo) else None


def _numbers(opcodes: bytes) -> tuple[int, ...]:
    numbers = re.findall(NUMBER, opcodes, re.DOTALL)
    return tuple(int.from_bytes(number[1:], "little", signed=number[:1] == b"J") for number in numbers)


# ---- Writing: one template for all tensors of a form.
#
# Tensors of one form differ in the key of their storage and in places of the memo alone.


UINT4 = struct.Struct("<I").pack

# What tensors of one form share: also where they are tagged to lie, which decides what is written of that.
LIKE = attrgetter(
    *("storage.kind", "storage.location", "storage.data.nbytes", "dtype.name"),
    *("offset", "shape", "stride", "conj", "neg", "requires_grad"),
)


class WrittenTensors:
    """What `fast_path` is for the reader: what was written of one tensor is the template of others."""

    def __init__(self, key_of: Callable[[Storage], str]) -> None:
        self.key_of = key_of
        self.templates: dict[tuple[object, ...], OpcodeTemplate] = {}

    def written(self, tensor: TensorRef, index: int) -> tuple[bytes, int] | None:
        """Return a tensor's opcodes, and how many values they put into the memo; None for a new form."""
        template = self.templates.get(LIKE(tensor))
        if template is None:
            return None
        return template.written(self.key_of(tensor.storage).encode(), index), template.count

    def in_a_row(
        self, items: Sequence[tuple[object, object]], begin: int, memo: dict[object, int], index: int
    ) -> tuple[list[bytes], int]:
        """Return the opcodes of names and tensors from `begin` on, to the first that does not fit."""
        opcodes, known, key_of = list[bytes](), self.templates, self.key_of
        for name, tensor in map(items.__getitem__, range(begin, len(items))):
            if type(name) is not str or type(tensor) is not TensorRef or id(tensor) in memo:
                break
            if (template := known.get(LIKE(tensor))) is None:
                break
            if (place := memo.get(name)) is None:
                memo[name] = index
                raw = name.encode("utf-8", "surrogatepass")
                named = b"X%b%br%b" % (UINT4(len(raw)), raw, UINT4(index))
                index += 1
            else:  # one of an optimizer's
                named = b"h%c" % place if place < 256 else b"j%b" % UINT4(place)
            # OpcodeTemplate.written, inlined: a call for each of 100,000.
            key, (base, step, size, count) = key_of(tensor.storage).encode(), template.numbers
            tail = (base + index * step).to_bytes(size, "little")
            opcodes.append(b"%b%b%c\0\0\0%b%b" % (named, template.head, len(key), key, tail))
            index += count
            memo[id(tensor)] = index - 1  # the last value is the tensor itself
        return opcodes, index

    def learn(self, tensor: TensorRef, opcodes: bytes, index: int) -> None:
        """Take what was written of a tensor for others of its form, unless it holds more than a template."""
        match = TENSOR.fullmatch(opcodes)
        if match and len(self.templates) < MOST_FORMS:
            template = OpcodeTemplate(match)
            if template.written(match["key"], index) == opcodes:
                self.templates[LIKE(tensor)] = template
