"""Tensors as torch.save writes them, matched whole by a regular expression instead of opcode by opcode.

Nearly every tensor of a checkpoint is a call of `_rebuild_tensor_v2` in thirty opcodes that are always the
same: a new storage, a shape, a stride, no hooks. Matching them at once takes a third of the time of running
them, and a checkpoint may hold 100,000 tensors. Anything unusual is left to the machine.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from ...inert_pickle.machine import Machine, PickleFault
from ...inert_pickle.opcodes import uint4
from ...inert_pickle.values import ORDERED_DICT, Global, OrderedDict_, in_brief
from ...tensors.dtypes import DTYPES, STORAGE_DTYPES, DType
from ...tensors.ref import MAX_BYTES, Storage, TensorRef, extent, is_count

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


# Named groups are what tensors of one form have in common, and the key; unnamed ones are memo indices.
GET = rb"(?:h.|j....)"
PUT = rb"r(....)"
NUMBER = rb"(?:K.|M..|J....)"
SIZES = rb"\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)r" % ((NUMBER,) * 4)
PUT_UNLESS_EMPTY = rb"(?:(?<=r)(....)|(?<=\)))"
TENSOR = (
    rb"(?P<storage>\(\((?P<word>%b)(?P<kind>%b)X(?P<length>.)\0\0\0)(?P<key>[0-9]+)%b" % (GET, GET, PUT)
    + rb"(?P<identity>(?P<location>%b)(?P<numel>%b)t)%bQ(?P<offset>%b)" % (GET, NUMBER, PUT, NUMBER)
    + rb"(?P<shape>%b)%b(?P<stride>%b)%b" % (SIZES, PUT_UNLESS_EMPTY, SIZES, PUT_UNLESS_EMPTY)
    + rb"(?P<end>(?P<grad>[\x88\x89])(?P<hooks>%b)\)R)%bt%bR%b" % (GET, PUT, PUT, PUT)
)
# What follows the name `_rebuild_tensor_v2`. Its two empty groups number the rest as in AFTER_NAME.
AFTER_REBUILD = re.compile(rb"()(?P<rebuild>)" + TENSOR, re.DOTALL)

# What follows the text of a tensor's name, from its memo index on.
AFTER_NAME = re.compile(PUT + rb"(?P<rebuild>%b)" % GET + TENSOR, re.DOTALL)

GROUPS = AFTER_NAME.groupindex
FORM = [GROUPS[name] for name in ("rebuild", "storage", "identity", "offset", "shape", "stride", "end")]
KEY = GROUPS["key"]
PUTS = [group for group in range(1, AFTER_NAME.groups + 1) if group not in GROUPS.values()]

# The opcode of text: four bytes of length, and the text.
TEXT = b"X"

# Bytes of the widest element.
WIDEST = 16


class _Form(NamedTuple):
    """What tensors of one form have in common."""

    kind: Global  # the class under which torch pickles their storages
    storage: StorageForm  # what their persistent ids say besides the key
    key_length: int  # of the storage's key, in bytes
    # bytes from the beginning of the storage to the end of the tensor; 0 for a tensor without elements.
    end: int
    # dtype, shape, stride, offset and requires_grad.
    tensor: tuple[DType, tuple[int, ...], tuple[int, ...], int, bool]
    memo_indices: struct.Struct  # unpacks the memo indices from the matched bytes


class TensorPattern:
    """A shortcut of the machine, taken after the name `_rebuild_tensor_v2`."""

    def __init__(self, rebuild: Global, find_storage: FindStorage) -> None:
        self.rebuild = rebuild
        self.find_storage = find_storage
        self.forms: dict[tuple[bytes, ...], _Form | None] = {}
        self.rewrites = 0

    def __call__(self, machine: Machine, position: int) -> int:
        """Push the tensor at `position`, and all that follow it under a name each, as in a state dict."""
        if machine.rewrites != self.rewrites:  # what the forms refer to may be replaced
            self.rewrites = machine.rewrites
            self.forms.clear()
        if machine.far:
            return position
        data = machine.data
        match, name = AFTER_REBUILD.match(data, position), None
        while match and self._push(machine, match, name):
            position = match.end()
            if data[position : position + 1] != TEXT:
                break
            begin = position + 5
            end = begin + uint4(data, position + 1)[0]
            match = AFTER_NAME.match(data, end)
            try:
                name = data[begin:end].decode() if match else None
            except UnicodeDecodeError:
                break
        return position

    def _push(self, machine: Machine, match: re.Match[bytes], name: str | None) -> bool:
        """Push a matched tensor and its name; return False, having changed nothing, where it is unusual."""
        memo, stack = machine.memo, machine.stack
        like = match.group(*FORM)
        form = self.forms.get(like)
        if form is None:
            form = self.forms[like] = self._form(machine, match)
            if form is None:
                return False
        key = match[KEY].decode()
        indices = form.memo_indices.unpack_from(machine.data, match.start())
        if len(key) != form.key_length or indices != (*range(len(memo), len(memo) + len(indices)),):
            return False
        storage = self.find_storage(key, form.storage)
        if form.end > storage.data.nbytes:
            return False
        tensor = TensorRef(storage, *form.tensor)
        if name is not None:
            memo.append(name)
            stack.append(name)
        stack.append(tensor)
        _, shape, stride, offset, requires_grad = form.tensor
        hooks = OrderedDict_()
        memo += key, ("storage", form.kind, key, form.storage.location, form.storage.numel)
        memo += filter(None, (shape, stride))  # an empty tuple is not stored
        memo += hooks, (storage, offset, shape, stride, requires_grad, hooks), tensor
        return True

    def _form(self, machine: Machine, match: re.Match[bytes]) -> _Form | None:
        """What the references and numbers of a match mean; None unless it is a tensor that fits a file."""
        gets = match.group("rebuild", "word", "kind", "location", "hooks")
        rebuild, word, kind, location, hooks = (self._referred(machine, get) for get in gets)
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
        return _Form(
            kind,
            StorageForm(kind.name, location, numel, numel * dtype.itemsize),
            key_length=match["length"][0],
            end=0 if 0 in shape else (last + 1) * dtype.itemsize,
            tensor=(dtype, shape, stride, offset, match["grad"] == b"\x88"),
            memo_indices=_memo_indices(match),
        )

    def _referred(self, machine: Machine, get: bytes) -> Any:
        """What a reference to the memo means; an empty one stands for the name that was just read."""
        if not get:
            return self.rebuild
        index = int.from_bytes(get[1:], "little")
        return machine.memo[index] if index < len(machine.memo) else None


def _memo_indices(match: re.Match[bytes]) -> struct.Struct:
    """Unpacks every memo index of a match from its bytes."""
    layout, position = "<", match.start()
    for begin, end in map(match.span, PUTS):
        if end > begin:
            layout += f"{begin - position}xI"
            position = end
    return struct.Struct(layout)


def _numbers(opcodes: bytes) -> tuple[int, ...]:
    numbers = re.findall(NUMBER, opcodes, re.DOTALL)
    return tuple(int.from_bytes(number[1:], "little", signed=number[:1] == b"J") for number in numbers)
