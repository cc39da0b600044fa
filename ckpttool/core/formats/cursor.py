"""A part of a file that is read from front to back: lengths first, then what they are the lengths of."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ...errors import Damaged
from ..tensors.ref import ByteRange

WINDOW = 1 << 16  # bytes that are read at once, where less is asked for

# Kinds of fields in Protocol Buffers and their bytes: a number, 8 bytes, a length and its bytes, 4 bytes.
WIRES = {0: 0, 1: 8, 2: 0, 5: 4}


class Cursor:
    """A place in a file that moves on with what is taken. Nothing is sized by what a file claims to have."""

    def __init__(self, place: ByteRange, *, order: str = "<", window: int = WINDOW) -> None:
        self.source, self.position, self.end = place.source, place.offset, place.offset + place.nbytes
        self.order = order  # of bytes in numbers, as `struct` has it
        self._size = window
        self._window, self._start = b"", self.position

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return self.end - self.position

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes. Raises Damaged where there are fewer."""
        at = self._reach(nbytes)
        self.position += nbytes
        return self._window[at : at + nbytes]

    def text(self, nbytes: int, said: str) -> str:
        """Return the next bytes as text. Raises Damaged, which `said` begins, where they are not UTF-8."""
        raw = self.take(nbytes)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Damaged(self.source.path, f"{said} not UTF-8: {raw[:40]!r}") from None

    def number(self, code: str) -> int:
        """Return the next number, of a type as `struct` has it."""
        form = self.order + code
        nbytes = struct.calcsize(form)
        at = self._reach(nbytes)
        self.position += nbytes
        (value,) = struct.unpack_from(form, self._window, at)
        return value  # type: ignore[no-any-return]

    def place(self, nbytes: int) -> ByteRange:
        """Return where the next bytes lie, unread."""
        if nbytes > self.left:
            raise self._cut_short(nbytes)
        place = ByteRange(self.source, self.position, nbytes)
        self.position += nbytes
        return place

    def inside(self, nbytes: int) -> Cursor:
        """Return a cursor over the next bytes alone, and go on behind them."""
        inner = Cursor(self.place(nbytes), order=self.order, window=self._size)
        inner._window, inner._start = self._window, self._start
        return inner

    def varint(self) -> int:
        """Return the next number of Protocol Buffers: seven bits a byte, the lowest first, 64 at most."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF
        raise Damaged(self.source.path, f"has a number without an end before byte {self.position}")

    def fields(self) -> Iterator[tuple[int, int | Cursor]]:
        """Yield the fields of a message of Protocol Buffers: numbers, and cursors over what has a length."""
        while self.left:
            number, wire = divmod(self.varint(), 8)
            if wire not in WIRES or not number:
                raise Damaged(self.source.path, f"has a field of unknown kind before byte {self.position}")
            if wire == 0:
                yield number, self.varint()
            else:
                yield number, self.inside(self.varint() if wire == 2 else WIRES[wire])

    def skip_texts(self, count: int) -> None:
        """Pass over texts, each with its length in 8 bytes before it."""
        # A vocabulary has hundreds of thousands of them.
        unpack = struct.Struct(self.order + "Q").unpack_from
        for _ in range(count):
            at = self.position - self._start
            if at + 8 > len(self._window):
                at = self._reach(8)
            (nbytes,) = unpack(self._window, at)
            self.position += 8 + nbytes
            if self.position > self.end:
                raise self._cut_short(nbytes)

    def _reach(self, nbytes: int) -> int:
        """Return where in the window the next bytes begin, once it has them."""
        at = self.position - self._start
        if at + nbytes > len(self._window):
            if nbytes > self.left:
                raise self._cut_short(nbytes)
            self._window = self.source.read(self.position, min(max(nbytes, self._size), self.left))
            self._start, at = self.position, 0
        return at

    def _cut_short(self, nbytes: int) -> Damaged:
        what = f"is cut short: {nbytes} bytes should follow byte {self.position}"
        return Damaged(self.source.path, f"{what}, and {max(self.left, 0)} do")
