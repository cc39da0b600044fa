"""Bytes that are computed once and read often: in a temporary file without a name."""

from __future__ import annotations

import os
import tempfile

from .. import system
from ..tensors.source import ByteRange, Source
from .failures import no_room_named


class Spool:
    """A temporary file that grows; it is gone when nothing refers to it any more."""

    def __init__(self, path: str) -> None:
        """Make it. Errors about its bytes name `path`."""
        with tempfile.TemporaryFile(prefix="ckpttool-") as file:
            self.source = Source(path, os.dup(file.fileno()))

    def append(self, raw: bytes | memoryview) -> ByteRange:
        """Write bytes at the end, and return where they are. Raises OSError for a full disk."""
        rest, start = memoryview(raw), self.source.size
        with no_room_named(tempfile.gettempdir()):
            while rest:
                written = system.pwrite(self.source.fd, rest, self.source.size)
                self.source.size, rest = self.source.size + written, rest[written:]
        return ByteRange(self.source, start, self.source.size - start)
