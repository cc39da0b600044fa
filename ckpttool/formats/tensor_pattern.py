"""Tensors in a pickle as torch.save writes them, recognised at a glance.

Nearly every tensor of a checkpoint is a name and thirty opcodes that are always the same: the name
`_rebuild_tensor_v2`, a storage that was not met before, a shape, a stride, no hooks. One regular expression
finds them all, and the tensor is made without carrying them out, which is several times as fast. Whatever is
unusual in any way is left to the machine: a tensor that is not accepted here is not a fault.

A checkpoint may hold 100,000 tensors, and each passes through the one loop below, which is written out for
speed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..dtypes import STORAGE_DTYPES, DType
from ..inert import ORDERED_DICT, Global, OrderedDict_
from ..tensor import MAX_BYTES, TensorRef, extent, new_tensor
from .inert_machine import Machine
from .storage_id import STORAGE_MODULES, FindStorage, StorageForm

GET = rb"(h.|j....)"
PUT = rb"r(....)"
NUMBER = rb"(?:K.|M..|J....)"
EACH = re.compile(NUMBER, re.DOTALL)
SIZES = rb"(\)|%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)(?:r(....))?" % ((NUMBER,) * 4)
STORAGE = rb"\(%b%bX(.)\0\0\0([0-9]+)%b%b(%b)t%bQ" % (GET, GET, PUT, GET, NUMBER, PUT)
HOOKS = GET + rb"\)R" + PUT
TENSOR = rb"\(%b(%b)%b%b([\x88\x89])%bt%bR%b" % (STORAGE, NUMBER, SIZES, SIZES, HOOKS, PUT, PUT)
HERE = re.compile(rb"()()" + TENSOR, re.DOTALL)
AFTER_NAME = re.compile(PUT + GET + TENSOR, re.DOTALL)
"""What follows the text of the name that a tensor stands under: that name's place in the memo first."""

TEXT = b"X"
"""The opcode of text: four bytes of length, and the text."""

RISING = [(sum(1 << 32 * i for i in range(n)), sum(i << 32 * i for i in range(n))) for n in range(9)]
"""For n memo indices in a row: read as one number, those from `first` on are `first * ones + steps`. They are
that of the name, the storage's key and identity, shape and stride unless empty, hooks, arguments, tensor."""

WIDEST = 16
"""Bytes of the widest element."""


class _Form(NamedTuple):
    """What alike tensors have in common.

    Attributes:
        kind: the class under which torch pickles their storages.
        storage: what these have in common.
        end: bytes from the beginning of the storage to the end of the tensor; 0 where it has no elements.
        tensor: dtype, shape, stride, offset, requires_grad.
    """

    kind: Global
    storage: StorageForm
    end: int
    tensor: tuple[DType, tuple[int, ...], tuple[int, ...], int, bool]


class TensorPattern:
    """A shortcut of the machine, to be taken after the name `_rebuild_tensor_v2`.

    Args:
        rebuild: that name.
        storage: finds the storage of a persistent id.
    """

    def __init__(self, rebuild: Global, storage: FindStorage) -> None:
        self.rebuild = rebuild
        self.storage = storage
        self.forms: dict[tuple[bytes, ...], _Form] = {}
        self.rewrites = 0

    def __call__(self, machine: Machine, position: int) -> int:
        """A tensor, and those that follow it under a name each: many entries of a dict in one go."""
        data, memo, extend, skip, forms = (
            machine.data, machine.memo, machine.stack.extend, machine.skip, self.forms
        )  # fmt: skip
        if machine.rewrites != self.rewrites:
            self.rewrites = machine.rewrites
            forms.clear()
        text = slice(0)  # where a name lies; the machine has read that of the first
        match = None if machine.far else HERE.match(data, position)
        while match:
            (
                put_name, rebuild, storage, kind, length, digits, put_key, location, count, put_id, start,
                shape, put_shape, stride, put_stride, grad, hooks, put_hooks, put_args, put_tensor,
            ) = match.groups(b"")  # fmt: skip
            like = rebuild, storage, kind, location, hooks, count, start, shape, stride, grad
            form = forms.get(like) or self.new_form(machine, like)
            puts = b"".join(
                (put_name, put_key, put_id, put_shape, put_stride, put_hooks, put_args, put_tensor)
            )
            made = len(puts) // 4
            ones, steps = RISING[made]
            in_order = int.from_bytes(puts, "little") == len(memo) * ones + steps
            if form is None or not in_order or length[0] != len(digits):
                break
            try:
                names = (data[text].decode(),) if rebuild else ()
            except UnicodeDecodeError:
                break
            key = digits.decode()
            found = self.storage(key, form.storage)
            if form.end > found.nbytes:
                break
            tensor = new_tensor(found, *form.tensor)
            skip(made - 1, _skipped, (names, key, form, tensor, put_shape, put_stride))
            memo.append(tensor)
            extend((*names, tensor))
            position = match.end()
            head = data[position : position + 5]
            text = slice(position + 5, position + 5 + int.from_bytes(head[1:], "little"))
            match = AFTER_NAME.match(data, text.stop) if head[:1] == TEXT else None
        return position

    def new_form(self, machine: Machine, like: tuple[bytes, ...]) -> _Form | None:
        """What references to the memo and numbers mean, if it is what a tensor needs and what fits a file."""
        *gets, count, start, shape, stride, grad = like
        rebuild, word, kind, location, hooks = (self.referred(machine, get) for get in gets)
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
        self.forms[like] = _Form(kind, storage, end * width, tensor)
        return self.forms[like]

    def referred(self, machine: Machine, get: bytes) -> Any:
        """What a reference to the memo means; none stands at the first tensor, after the name was met."""
        if not get:
            return self.rebuild
        index = int.from_bytes(get[1:], "little")
        return machine.memo[index] if index < len(machine.memo) else None


def _numbers(opcodes: bytes) -> list[int]:
    return [int.from_bytes(each[1:], "little", signed=each[:1] == b"J") for each in EACH.findall(opcodes)]


def _skipped(
    names: tuple[str, ...], key: str, form: _Form, tensor: TensorRef, put_shape: bytes, put_stride: bytes
) -> list[object]:
    """What the machine would have put into its memo on the way to a tensor."""
    layout = [sizes for sizes, put in ((tensor.shape, put_shape), (tensor.stride, put_stride)) if put]
    hooks = OrderedDict_()
    args = (tensor.storage, tensor.offset, tensor.shape, tensor.stride, tensor.requires_grad, hooks)
    return [
        *names,
        key,
        ("storage", form.kind, key, form.storage.location, form.storage.numel),
        *layout,
        hooks,
        args,
    ]
