"""Write inert values as a pickle: the same names, calls, sharing and order as were read.

A Record is written as the opcodes that it was read from. Protocol 2 is torch's; a tree that was read under a
newer protocol is written under that one, as protocols differ in how names are looked up (`__builtin__`,
dotted names).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Protocol

from ..tensors.ref import Storage, TensorRef
from . import values as inert
from .values import FROM_TYPE, ORDERED_DICT, FrozenSet_, Global, OrderedDict_, Record, Set_

BATCH = 1000  # items of one SETITEMS or APPENDS, as in Python's pickler

PersistentId = Callable[[Storage], tuple[object, ...]]
ReduceTensor = Callable[[TensorRef], tuple[Global, tuple[object, ...]]]


class WriterShortcut(Protocol):
    """Writes tensors that are like one before in one step."""

    def written(self, tensor: TensorRef, index: int) -> tuple[bytes, int] | None:
        """Return opcodes that put so many values into the memo, from `index` on; None for a new form."""

    def in_a_row(
        self, items: Sequence[tuple[object, object]], begin: int, memo: dict[object, int], index: int
    ) -> tuple[list[bytes], int]:
        """Return the opcodes of names and tensors from `begin` to the first that is none, or of a new form.

        Reads no item before `begin`. Puts names and tensors into the memo, and returns where the next value
        belongs there.
        """

    def learn(self, tensor: TensorRef, opcodes: bytes, index: int) -> None:
        """Take note of a tensor's opcodes, whose first value got this place in the memo."""


def write_pickle(
    value: object,
    *,
    protocol: int = 2,
    persistent_id: PersistentId,
    reduce_tensor: ReduceTensor,
    shortcut: WriterShortcut | None = None,
) -> bytes:
    """Return the pickle of a value; raise TooDeep, or ValueError for what no pickle of ours can hold."""
    writer = _Writer(max(protocol, 2), persistent_id, reduce_tensor, shortcut)
    writer.save(value)
    writer.out += b"."
    return bytes(writer.out)


class _Writer:
    def __init__(
        self,
        protocol: int,
        persistent_id: PersistentId,
        reduce_tensor: ReduceTensor,
        shortcut: WriterShortcut | None,
    ) -> None:
        self.out = bytearray(b"\x80" + bytes([protocol]))
        self.builtins = "__builtin__" if protocol < 3 else "builtins"
        self.protocol = protocol
        self.persistent_id = persistent_id
        self.reduce_tensor = reduce_tensor
        self.shortcut = shortcut
        self.count = 0  # values in the reader's memo
        self.memo: dict[object, int] = {}  # by id; text and names by value
        self.kept: list[object] = []  # keeps the values alive, so that no other gets an id in `memo`
        self.level = 0

    def save(self, value: object) -> None:
        if self.level == inert.MAX_DEPTH:
            raise inert.TooDeep
        self.level += 1
        kind = type(value)
        if kind in SCALARS:
            self.out += SCALARS[kind](value)
        elif kind in SHARED:
            key = value if kind in (str, Global) else id(value)
            if key in self.memo:
                self.refer(self.memo[key])
            else:
                SHARED[kind](self, value)
        else:
            raise ValueError(f"can't write a {kind.__name__}")
        self.level -= 1

    # The memo.

    def refer(self, index: int) -> None:
        self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)

    def remember(self, value: object) -> None:
        index, self.count = self.count, self.count + 1
        self.memo[value if isinstance(value, str | Global) else id(value)] = index
        self.kept.append(value)
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def remember_call(self, value: object) -> bool:
        """Remember a value made by a call; return False where its own arguments wrote it first."""
        if id(value) in self.memo:
            self.out += b"0"
            self.refer(self.memo[id(value)])
            return False
        self.remember(value)
        return True

    # Text, bytes and names.

    def save_str(self, value: str) -> None:
        self.out += _text(value)
        self.remember(value)

    def save_bytes(self, value: bytes) -> None:
        if self.protocol >= 3:
            self.out += b"B" + struct.pack("<I", len(value)) + value
        else:  # protocol 2 has no bytes, so a call on text; text is not shared, for `Machine.copy`'s sake
            self.save(Global("_codecs", "encode"))
            self.out += _text(value.decode("latin-1"))
            self.save("latin1")
            self.out += b"\x86R"
        self.remember(value)

    def save_bytearray(self, value: bytearray) -> None:
        self.call(Global(self.builtins, "bytearray"), (bytes(value),) if value else ())
        self.remember(value)

    def save_global(self, value: Global) -> None:
        if "\n" in value.module or "\n" in value.name:
            raise ValueError(f"the name {str(value)!r} has a line break")
        self.out += f"c{value.module}\n{value.name}\n".encode()
        self.remember(value)

    # Containers: mutable ones are remembered before their contents, so that a cycle finds them.

    def save_tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self.out += b")"
            return
        is_long = len(value) > 3
        self.out += b"(" if is_long else b""
        for item in value:
            self.save(item)
        if id(value) in self.memo:  # a list inside it contains it, and so wrote it first
            self.out += b"1" if is_long else b"0" * len(value)
            self.refer(self.memo[id(value)])
            return
        self.out += b"t" if is_long else bytes([0x84 + len(value)])
        self.remember(value)

    def save_list(self, value: list[object]) -> None:
        self.out += b"]"
        self.remember(value)
        self.in_batches(zip(value, strict=True), b"e")

    def save_set(self, value: set[object] | frozenset[object]) -> None:
        """Write a call in every protocol: torch's weights_only reader takes no opcode that adds to a set."""
        self.call(Global(self.builtins, inert.container_name(value)), (list(value),))
        self.remember_call(value)

    def save_dict(self, value: dict[object, object]) -> None:
        self.out += b"}"
        self.remember(value)
        self.set_items(value)

    def save_ordered(self, value: OrderedDict_) -> None:
        self.call(ORDERED_DICT, ())
        self.remember(value)
        self.set_items(value)
        if value.attributes is not None:
            self.save(value.attributes)
            self.out += b"b"

    def set_items(self, value: dict[object, object]) -> None:
        pending = iter(value.items())
        while batch := list(islice(pending, BATCH)):
            self.out += b"("
            done = 0
            while done < len(batch):
                if type(batch[done][1]) is TensorRef and (written := self.save_in_a_row(batch, done)):
                    done += written
                    continue
                for part in batch[done]:
                    self.save(part)
                done += 1
            self.out += b"u"

    def save_in_a_row(self, batch: list[tuple[object, object]], begin: int) -> int:
        """Write names and tensors that are like ones before, as far as they go; return how many."""
        if self.shortcut is None or self.count < 256 or self.level == inert.MAX_DEPTH:
            return 0
        opcodes, self.count = self.shortcut.in_a_row(batch, begin, self.memo, self.count)
        self.out += b"".join(opcodes)
        self.kept += (tensor for _, tensor in batch[begin : begin + len(opcodes)])
        return len(opcodes)

    def in_batches(self, items: Iterable[tuple[object, ...]], opcode: bytes) -> None:
        pending = iter(items)
        while batch := list(islice(pending, BATCH)):
            self.out += b"("
            for part in chain.from_iterable(batch):
                self.save(part)
            self.out += opcode

    # Objects.

    def call(self, callable: object, args: object) -> None:
        self.save(callable)
        self.save(args)
        self.out += b"R"

    def save_record(self, value: Record) -> None:
        if value.how == "reduce":
            self.call(value.callable, self.arguments(value))
        elif value.kwargs and self.protocol < 4:
            self.call(Global("copyreg", "__newobj_ex__"), (value.callable, value.args, value.kwargs))
        else:
            for part in (value.callable, value.args, *([value.kwargs] if value.kwargs else [])):
                self.save(part)
            self.out += b"\x92" if value.kwargs else b"\x81"
        if not self.remember_call(value):
            return
        self.in_batches(zip(value.elements, strict=True), b"e")
        self.in_batches(value.items, b"u")
        if value.has_state:
            self.save(value.state)
            self.out += b"b"

    def arguments(self, value: Record) -> object:
        """The arguments of a Record's call; for a typed tensor, in place of the tensor, how it is made."""
        match value.args:
            case (TensorRef() as tensor, kind, *rest) if value.callable in FROM_TYPE:
                function, how = self.reduce_tensor(tensor)
                return (function, kind, how, *rest)
        return value.args

    def save_tensor(self, value: TensorRef) -> None:
        written = self.shortcut.written(value, self.count) if self.shortcut else None
        if written is not None:
            opcodes, count = written
            self.out += opcodes
            self.count += count
            self.memo[id(value)] = self.count - 1  # the last value is the tensor itself
            self.kept.append(value)
            return
        begin, index = len(self.out), self.count
        self.call(*self.reduce_tensor(value))
        self.remember(value)
        if self.shortcut:
            self.shortcut.learn(value, bytes(self.out[begin:]), index)

    def save_storage(self, value: Storage) -> None:
        """Write a storage's id each time, as torch does: readers find the same storage by its key."""
        self.save(self.persistent_id(value))
        self.out += b"Q"


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    size = b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw))
    return size + raw


SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: b"G" + struct.pack(">d", value),
}

SHARED: dict[type, Callable[[_Writer, Any], None]] = {
    str: _Writer.save_str,
    bytes: _Writer.save_bytes,
    bytearray: _Writer.save_bytearray,
    Global: _Writer.save_global,
    tuple: _Writer.save_tuple,
    list: _Writer.save_list,
    **dict.fromkeys((set, frozenset, Set_, FrozenSet_), _Writer.save_set),
    dict: _Writer.save_dict,
    OrderedDict_: _Writer.save_ordered,
    Record: _Writer.save_record,
    TensorRef: _Writer.save_tensor,
    Storage: _Writer.save_storage,
}
