"""Blocks that a file shares with another instead of having a copy, where the file system can."""

from __future__ import annotations

import os

from .. import system
from ..tensors.source import ByteRange

BLOCK = 4096  # whole blocks at the same place within one in both files can be shared


def share(data: ByteRange, fd: int, position: int) -> range:
    """Let a file share the whole blocks of a stretch of another file; return which bytes of it are shared."""
    start, end = -position % BLOCK, data.nbytes
    # Only the last block of a file may be shared in part, and only as the last of the other file.
    if data.offset + end != data.source.size or os.fstat(fd).st_size > position + end:
        end -= (position + end) % BLOCK
    if (data.offset - position) % BLOCK or start >= end:
        return range(0)
    source, offset = data.source.fd, data.offset + start
    is_shared = system.share_blocks(source, offset, end - start, fd, position + start)
    return range(start, end) if is_shared else range(0)
