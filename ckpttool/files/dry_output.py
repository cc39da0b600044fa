"""Outputs that write nothing: how large a file would be, and what it would be made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..tensors.ref import Computed
from ..tensors.source import ByteRange
from .copying import Output, Then


class DryOutput(Output):
    """An output that takes everything and keeps nothing but the size."""

    def __init__(self) -> None:
        self.position = 0

    def __exit__(self, *_: object) -> None:
        pass

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        pass

    def write_all(self, chunks: Iterable[memoryview], nbytes: int, near: ByteRange | None = None) -> None:
        self.position += nbytes  # the chunks are not asked for

    def copy(
        self, data: ByteRange | Computed, then: Then | None = None, near: ByteRange | None = None
    ) -> None:
        self.position += data.nbytes
        if then:
            then(0)

    def taken(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        return [b""] * len(ranges)

    def write_pieces(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        pass

    def settle(self) -> None:
        pass


class Planned(DryOutput):
    """A dry output that tells plans apart: a hash of what is written, and of where all else comes from."""

    def __init__(self, facts: object) -> None:
        import hashlib  # loads OpenSSL, which most commands do without

        super().__init__()
        self.hash = hashlib.sha256(repr(facts).encode())

    def write_at(self, position: int, data: bytes | bytearray | memoryview) -> None:
        self.hash.update(b"%d %d " % (position, len(data)))
        self.hash.update(data)

    def write_all(self, chunks: Iterable[memoryview], nbytes: int, near: ByteRange | None = None) -> None:
        self._note(near, nbytes)
        super().write_all(chunks, nbytes, near)

    def copy(
        self, data: ByteRange | Computed, then: Then | None = None, near: ByteRange | None = None
    ) -> None:
        self._note(data if isinstance(data, ByteRange) else near, data.nbytes)
        super().copy(data, then, near)

    def taken(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        for data in ranges:
            self._note(data, data.nbytes)
        return super().taken(ranges)

    def _note(self, place: ByteRange | None, nbytes: int) -> None:
        where = (place.source.version, place.offset, place.nbytes) if place else ()
        self.hash.update(repr((self.position, nbytes, where)).encode())
