"""Whether the bytes that a checkpoint is made of have the checksums which their files state."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from .checksum import crc32_of
from .errors import Damaged
from .tensor import ByteRange, Computed, Storage
from .transfer import BUFFER, Progress

Named = tuple[str, Storage]


def with_checksum(storages: Iterable[Named]) -> Iterator[Named]:
    """Of storages by name, and of those that their bytes are computed from: each that has one, once."""
    seen: set[int] = set()
    for name, storage in storages:
        below = [storage]
        while below:
            each = below.pop()
            if id(each) not in seen:
                seen.add(id(each))
                below += each.data.origins if isinstance(each.data, Computed) else ()
                if each.crc32 is not None:
                    yield name, each


def require_intact(storages: Iterable[Named], progress: Progress | None = None) -> None:
    """Reads them, and compares.

    Raises:
        Damaged: the first that does not have its checksum.
    """
    buffer = memoryview(bytearray(BUFFER))
    for name, storage in with_checksum(storages):
        if checksum(storage.data, buffer, progress) != storage.crc32:
            path = storage.data.path
            raise Damaged(
                path,
                f"the bytes of '{name[:80]}' do not match their checksum",
                hint=f"list all that is damaged: ckpttool verify {shlex.quote(path)}",
            )


def checksum(data: ByteRange | Computed, buffer: memoryview, progress: Progress | None) -> int:
    """The CRC-32 of bytes, read through a buffer; progress is called with each piece's number of bytes."""

    def reported() -> Iterator[memoryview]:
        for chunk in data.chunks(buffer):
            yield chunk
            if progress:
                progress(len(chunk))

    return crc32_of(reported())
