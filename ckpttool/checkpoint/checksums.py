"""Whether the bytes that a checkpoint is made of have the checksums which their files state."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from ..errors import Damaged
from ..files.copying import BUFFER, Progress
from ..files.crc32 import crc32_of
from ..tensors.ref import ByteRange, Computed, Storage
from .checkpoint import Checkpoint

Named = tuple[str, Storage]


def with_checksum(storages: Iterable[Named]) -> Iterator[Named]:
    """Of storages by name, and of those that their bytes come from: each that has one, once."""
    seen: set[int] = set()
    for name, storage in storages:
        below = [storage]
        while below:
            each = below.pop()
            if id(each) not in seen:
                seen.add(id(each))
                below += each.origins
                if each.crc32 is not None:
                    yield name, each


def require_intact(checkpoint: Checkpoint, storages: Iterable[Named], progress: Progress | None) -> None:
    """Reads storages that a checkpoint refers to, and what they come from, and compares the checksums.

    Raises:
        Damaged: the first that does not have its own.
    """
    buffer = memoryview(bytearray(BUFFER))
    own = {each.path for each in (checkpoint.source, *checkpoint.shards)}
    for name, storage in with_checksum(storages):
        if checksum(storage.data, buffer, progress) != storage.crc32:
            path = storage.data.path
            whole = checkpoint.path if path in own else path  # the folder, not one of its files
            hint = f"list all that is damaged: ckpttool verify {shlex.quote(whole)}"
            reason = f"the bytes that become '{name[:80]}' do not match their checksum"
            raise Damaged(path, reason, hint=None if whole == "-" else hint)


def checksum(data: ByteRange | Computed, buffer: memoryview, progress: Progress | None) -> int:
    """The CRC-32 of bytes, read through a buffer; progress is called with each piece's number of bytes."""

    def reported() -> Iterator[memoryview]:
        for chunk in data.chunks(buffer):
            yield chunk
            if progress:
                progress(len(chunk))

    return crc32_of(reported())
