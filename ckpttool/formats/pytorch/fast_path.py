"""Tensors in a pickle as torch.save writes them, recognised at a glance.

Nearly every tensor of a checkpoint is a name and thirty opcodes that are always the same: the name
`_rebuild_tensor_v2`, a storage that was not met before, a shape, a stride, no hooks. One regular expression
finds them all, and the tensor is made without carrying them out, which is several times as fast. Most are
like one before, byte for byte but for what counts on, and are known by one comparison. Whatever is unusual in
any way is left to the machine: a tensor that is not accepted here is not a fault.

A checkpoint may hold 100,000 tensors, and each passes through the one loop below, which is written out for
speed.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...inert_pickle.machine import Machine, Skipped
from ...inert_pickle.opcodes import uint4
from ...inert_pickle.values import ORDERED_DICT, Global, OrderedDict_
from ...tensors.dtypes import STORAGE_DTYPES, DType
from ...tensors.ref import MAX_BYTES, TensorRef, extent
from .storage_id import STORAGE_MODULES, FindStorage, StorageForm

GET = rb"(h.|j....)"
PUT = rb"r(....)"
NUMBER = rb"(?:K.|M..|J....)"
EACH = re.compile(NUMBER, re.DOTALL)
SIZES = rb"(\)|%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)(?:r(....))?" % ((NUMBER,) * 4)
STORAGE = rb"\(%b%bX(.)\0\0\0([0-9]+)%b%b(%b)t%bQ" % (GET, GET, PUT, GET, NUMBER, PUT)
HOOKS = GET + rb"\)R" + PUT
TENSOR = rb"\(%b(%b)%b%b([\x88\x89])%bt%bR%b" % (STORAGE, NUMBER, SIZES, SIZES, HOOKS, PUT, PUT)
HERE = re.compile(rb"()()" + TENSOR, re.DOTALL)  # two empty groups, that all have one number in both
AFTER_NAME = re.compile(PUT + GET + TENSOR, re.DOTALL)
"""What follows the text of a tensor's name: the name's memo index first."""

TEXT = ord("X")
"""The opcode of text: four bytes of length, and the text."""

# Groups of the two, by number: references to the memo; numbers; the storage's key, with its length before it;
# and places in the memo: of the name, the storage's key and identity, shape and stride unless empty, hooks,
# arguments, tensor.
GETS, NUMBERS, LENGTH, DIGITS = (2, 3, 4, 8, 17), (9, 11, 12, 14, 16), 5, 6
PUTS, PUT_SIZES = (1, 7, 10, 13, 15, 18, 19, 20), (13, 15)
REBUILD = GETS[0]

WIDEST = 16
"""Bytes of the widest element."""


class _Form(NamedTuple):
    """What alike tensors have in common.

    Attributes:
        kind: the class under which torch pickles their storages.
        storage: what these have in common.
        end: bytes from the beginning of the storage to the end of the tensor; 0 where it has no elements.
        tensor: dtype, shape, stride, offset, requires_grad.
        kept: those of shape and stride that have a place in the memo, as all have that are not empty.
    """

    kind: Global
    storage: StorageForm
    end: int
    tensor: tuple[DType, tuple[int, ...], tuple[int, ...], int, bool]
    kept: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class _Stencil:
    """The opcodes of a tensor, to be matched against those of another.

    Read as one number, those of similar tensors differ only in the memo indices, which are consecutive, and
    in the digits of the storage's key. So the number of the next one is known beforehand.

    Attributes:
        form: what they mean.
        named: whether they follow the text of a name, and begin with that name's place in the memo.
        size: in bytes.
        rest: their number if the memo were empty and the digits were zero bytes.
        ones: what each value in the memo adds to that.
        made: how many values they add to the memo.
        key, shift: where the digits are, and by how many bits that shifts them in the number.
        next: what followed last time, and usually will again.
    """

    form: _Form
    named: bool
    size: int
    rest: int
    ones: int
    made: int
    key: slice
    shift: int
    next: _Stencil | None = None

    def key_at(self, data: bytes | mmap.mmap, begin: int, held: int) -> bytes:
        """The digits of the key, if these opcodes are here and the memo holds `held` values; else empty.

        At the end of the data there may be fewer bytes: missing ones count as zeros, as the last bytes of a
        memo index mostly are. `__call__` notices, as it reads the byte after them.
        """
        entry = data[begin : begin + self.size]
        digits = entry[self.key]
        number = self.rest + self.ones * held + (int.from_bytes(digits, "little") << self.shift)
        alike = int.from_bytes(entry, "little") == number
        return digits if alike and digits.isdigit() else b""


class TensorPattern:
    """A shortcut of the machine, to be taken after the name `_rebuild_tensor_v2`.

    Args:
        rebuild: that name.
        storage: finds the storage of a persistent id.
    """

    def __init__(self, rebuild: Global, storage: FindStorage) -> None:
        self.rebuild = rebuild
        self.storage = storage
        self.stencils: dict[tuple[object, ...], _Stencil] = {}
        self.last: _Stencil | None = None
        self.rewrites = 0

    def __call__(self, machine: Machine, position: int) -> int:
        """A tensor, and those that follow it under a name each: many entries of a dict in one go."""
        if machine.rewrites != self.rewrites:
            self.rewrites, self.last = machine.rewrites, None
            self.stencils.clear()
        if machine.far:
            return position
        data, memo, extend, storage = machine.data, machine.memo, machine.stack.extend, self.storage
        begin, text = position, 0  # of opcodes, and of the name before; the machine has read the first one's
        while True:
            stencil, digits = self.last and self.last.next, b""
            if stencil and stencil.named is (text > 0):
                digits = stencil.key_at(data, begin, len(memo))
            if not digits:
                stencil, digits = self.look(machine, begin, AFTER_NAME if text else HERE)
            if not stencil:
                return position
            if self.last:
                self.last.next = stencil
            self.last, form, key = stencil, stencil.form, digits.decode()
            try:
                names = (data[text:begin].decode(),) if text else ()
            except UnicodeDecodeError:
                return position
            found = storage(key, form.storage)
            if form.end > found.data.nbytes:
                return position
            tensor = TensorRef(found, *form.tensor)
            memo += (Skipped((len(memo), _values, names, key, form, tensor)),) * (stencil.made - 1)
            memo.append(tensor)
            extend((*names, tensor))
            position = begin + stencil.size
            if data[position] != TEXT:
                return position
            text = position + 5
            begin = text + uint4(data, position + 1)[0]

    def look(self, machine: Machine, begin: int, pattern: re.Pattern[bytes]) -> tuple[_Stencil | None, bytes]:
        """A tensor that is like none before, or not like the one that was expected, and its key."""
        match = pattern.match(machine.data, begin)
        if not match:
            return None, b""
        held, digits = len(machine.memo), match[DIGITS]
        puts = [int.from_bytes(put, "little") for put in match.group(*PUTS) if put]
        if puts != [*range(held, held + len(puts))] or match[LENGTH][0] != len(digits):
            return None, b""
        like = *match.group(*GETS, *NUMBERS, LENGTH), *map(bool, match.group(*PUT_SIZES))
        return self.stencils.get(like) or self.new_stencil(machine, match, like), digits

    def new_stencil(
        self, machine: Machine, match: re.Match[bytes], like: tuple[object, ...]
    ) -> _Stencil | None:
        """That of the first tensor of its kind, if it is one."""
        form = self.new_form(machine, match)
        if not form:
            return None
        begin, end = match.span()
        first, after = match.span(DIGITS)
        places = [place - begin for place, past in map(match.span, PUTS) if past > place]
        ones, shift = sum(1 << 8 * place for place in places), 8 * (first - begin)
        number = int.from_bytes(match[0], "little")
        stencil = _Stencil(
            form,
            named=bool(match[REBUILD]),
            size=end - begin,
            rest=number - ones * len(machine.memo) - (int.from_bytes(match[DIGITS], "little") << shift),
            ones=ones,
            made=len(places),
            key=slice(first - begin, after - begin),
            shift=shift,
        )
        self.stencils[like] = stencil
        return stencil

    def new_form(self, machine: Machine, match: re.Match[bytes]) -> _Form | None:
        """What references to the memo and numbers mean, if it is what a tensor needs and what fits a file."""
        count, start, shape, stride, grad = match.group(*NUMBERS)
        rebuild, word, kind, location, hooks = (self.referred(machine, match[at]) for at in GETS)
        dtype = STORAGE_DTYPES.get(kind.name) if type(kind) is Global else None
        if dtype is None or kind.module not in STORAGE_MODULES or type(location) is not str:
            return None
        if rebuild is not self.rebuild or word != "storage" or hooks is not ORDERED_DICT:
            return None
        sizes, steps, (numel, offset) = _numbers(shape), _numbers(stride), _numbers(count + start)
        if len(sizes) != len(steps) or min(numel, offset, *sizes, *steps) < 0:
            return None
        if extent(sizes) * WIDEST > MAX_BYTES:
            return None
        end = 0 if 0 in sizes else offset + 1 + sum((n - 1) * s for n, s in zip(sizes, steps, strict=True))
        width = dtype.itemsize
        tensor = dtype, tuple(sizes), tuple(steps), offset, grad == b"\x88"
        storage = StorageForm(kind.name, location, numel, numel * width)
        kept = tuple(each for each, put in zip(tensor[1:3], match.group(*PUT_SIZES), strict=True) if put)
        return _Form(kind, storage, end * width, tensor, kept)

    def referred(self, machine: Machine, get: bytes | None) -> Any:
        """What a reference to the memo means; at the first tensor there is none, but the name."""
        if not get:
            return self.rebuild
        index = int.from_bytes(get[1:], "little")
        return machine.memo[index] if index < len(machine.memo) else None


def _numbers(opcodes: bytes) -> list[int]:
    return [int.from_bytes(each[1:], "little", signed=each[:1] == b"J") for each in EACH.findall(opcodes)]


def _values(names: tuple[str, ...], key: str, form: _Form, tensor: TensorRef) -> list[object]:
    """What the machine would have put into its memo on the way to a tensor."""
    hooks = OrderedDict_()
    args = (tensor.storage, tensor.offset, tensor.shape, tensor.stride, tensor.requires_grad, hooks)
    return [
        *names,
        key,
        ("storage", form.kind, key, form.storage.location, form.storage.numel),
        *form.kept,
        hooks,
        args,
    ]
