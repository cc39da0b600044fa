"""Tensors in a pickle as torch.save writes them, recognised at a glance.

Nearly every tensor of a checkpoint is the same thirty opcodes after the name `_rebuild_tensor_v2`: a storage
that was not met before, a shape, a stride, no hooks. One regular expression finds them all, and the tensor is
made without carrying them out, which is several times as fast. Whatever is unusual in any way is left to the
machine: a tensor that is not accepted here is not a fault.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..inert import ORDERED_DICT, Global, OrderedDict_
from ..tensor import MAX_BYTES, STORAGE_DTYPES, DType, Storage, TensorRef, extent, new_tensor
from .inert_machine import Machine
from .storage_id import STORAGE_MODULES, StorageId

GET = rb"(h.|j....)"
PUT = rb"r(....)"
NUMBER = rb"(?:K.|M..|J....)"
EACH = re.compile(NUMBER, re.DOTALL)
SIZES = rb"(\)|%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)(?:r(....))?" % ((NUMBER,) * 4)
STORAGE = rb"\(%b%bX(.)\0\0\0([0-9]+)%b%b(%b)t%bQ" % (GET, GET, PUT, GET, NUMBER, PUT)
TENSOR = re.compile(
    rb"\(%b(%b)%b%b([\x88\x89])%b\)R%bt%bR" % (STORAGE, NUMBER, SIZES, SIZES, GET, PUT, PUT), re.DOTALL
)

PUTS = {count: struct.Struct(f"<{count}I") for count in range(4, 7)}
"""Memo indices: of the storage's key and identity, shape and stride unless empty, hooks, arguments."""

WIDEST = 16
"""Bytes of the widest element."""


class _Context(NamedTuple):
    """What the four references of a tensor stand for."""

    kind: Global
    dtype: DType
    location: str


class _Layout(NamedTuple):
    """A shape and its stride; `end` is the elements from the first one to behind the last, 0 without any."""

    shape: list[int]
    stride: list[int]
    end: int


class TensorPattern:
    """A shortcut of the machine, to be taken after the name `_rebuild_tensor_v2`.

    Args:
        storage: finds the storage of a persistent id.
    """

    def __init__(self, storage: Callable[[StorageId], Storage]) -> None:
        self.storage = storage
        self.contexts: dict[tuple[bytes, ...], _Context] = {}
        self.rewrites = 0
        self.layouts: dict[tuple[bytes, bytes], _Layout] = {}
        self.numbers: dict[bytes, int] = {}

    def __call__(self, machine: Machine, position: int) -> int:
        match = TENSOR.match(machine.data, position)
        if match is None:
            return position
        (
            storage, kind, length, digits, put_key, location, count, put_id, start,
            shape, put_shape, stride, put_stride, grad, hooks, put_hooks, put_args,
        ) = match.groups(b"")  # fmt: skip
        context = self.context(machine, (storage, kind, location, hooks))
        layout = self.layouts.get((shape, stride)) or self.layout(shape, stride)
        offset, numel = self.number(start), self.number(count)
        puts = put_key + put_id + put_shape + put_stride + put_hooks + put_args
        first, key = len(machine.memo), digits.decode()
        after = first + len(puts) // 4
        if (
            context is None
            or layout is None
            or offset < 0
            or numel < 0
            or length[0] != len(key)
            or PUTS[after - first].unpack(puts) != (*range(first, after),)
            or machine.far
        ):
            return position
        found = self.storage(StorageId(context.kind.name, key, context.location, numel))
        if layout.end and (offset + layout.end) * context.dtype.itemsize > found.nbytes:
            return position
        # Each tensor has a shape and a stride of its own, as if they had been read one by one.
        sizes, steps = (*layout.shape,), (*layout.stride,)
        tensor = new_tensor(found, context.dtype, sizes, steps, offset, grad == b"\x88")
        machine.skip(after - first, partial(_skipped, tensor, context, key, numel, put_shape, put_stride))
        machine.stack.append(tensor)
        return match.end()

    def context(self, machine: Machine, gets: tuple[bytes, ...]) -> _Context | None:
        """What references to the memo stand for, if it is what a tensor needs."""
        if machine.rewrites != self.rewrites:
            self.rewrites = machine.rewrites
            self.contexts.clear()
        return self.contexts.get(gets) or self.new_context(machine, gets)

    def new_context(self, machine: Machine, gets: tuple[bytes, ...]) -> _Context | None:
        indices = [int.from_bytes(get[1:], "little") for get in gets]
        if max(indices) >= len(machine.memo):
            return None
        storage, kind, location, hooks = (machine.memo[index] for index in indices)
        if storage != "storage" or type(location) is not str or hooks is not ORDERED_DICT:
            return None
        dtype = STORAGE_DTYPES.get(kind.name) if type(kind) is Global else None
        if dtype is None or kind.module not in STORAGE_MODULES:
            return None
        self.contexts[gets] = _Context(kind, dtype, location)
        return self.contexts[gets]

    def layout(self, shape: bytes, stride: bytes) -> _Layout | None:
        """A shape and a stride, if they fit each other and any file."""
        sizes, steps = _numbers(shape), _numbers(stride)
        if len(sizes) != len(steps) or min((*sizes, *steps), default=0) < 0:
            return None
        if extent(sizes) * WIDEST > MAX_BYTES:
            return None
        end = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, steps, strict=True))
        self.layouts[shape, stride] = _Layout(sizes, steps, end)
        return self.layouts[shape, stride]

    def number(self, opcode: bytes) -> int:
        if opcode not in self.numbers:
            self.numbers[opcode] = _numbers(opcode)[0]
        return self.numbers[opcode]


def _numbers(opcodes: bytes) -> list[int]:
    return [int.from_bytes(each[1:], "little", signed=each[:1] == b"J") for each in EACH.findall(opcodes)]


def _skipped(
    tensor: TensorRef, context: _Context, key: str, numel: int, put_shape: bytes, put_stride: bytes
) -> list[object]:
    """What the machine would have put into its memo on the way to a tensor."""
    kind, _, location = context
    layout = [sizes for sizes, put in ((tensor.shape, put_shape), (tensor.stride, put_stride)) if put]
    hooks = OrderedDict_()
    args = (tensor.storage, tensor.offset, tensor.shape, tensor.stride, tensor.requires_grad, hooks)
    return [key, ("storage", kind, key, location, numel), *layout, hooks, args]
