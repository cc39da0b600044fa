"""Extents that two files share, on file systems where they can (btrfs, XFS): no byte is read or written."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from ..tensors.ref import ByteRange

FICLONERANGE = 0x4020940D
"""The ioctl that makes a stretch of a file share the extents of another (linux/fs.h)."""

BLOCK = 4096
"""Bytes of a block: what has the same place within one in both files can be shared, whole blocks of it."""

# Its errors where the file system, or this pair of files, can't share extents.
NO_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EPERM}


def share(data: ByteRange, fd: int, position: int) -> range:
    """Let a file share the whole blocks of a stretch of another file.

    Args:
        data: the stretch.
        fd: the file that gets it.
        position: where in that file it lies.

    Returns:
        The bytes of the stretch, counted from its start, that are in the file now; an empty range where the
        blocks of the two do not meet, or the file system can't share them. Those before and behind are less
        than a block each.

    Raises:
        Unreadable: the other file is closed.
        OSError: the disk is full, or failed.
    """
    start, end = -position % BLOCK, data.nbytes
    # Only the last block of a file may be shared in part, and only as the last of the other file.
    if data.offset + end != data.source.size or os.fstat(fd).st_size > position + end:
        end -= (position + end) % BLOCK
    if (data.offset - position) % BLOCK or start >= end:
        return range(0)
    wanted = struct.pack("qQQQ", data.source.fd, data.offset + start, end - start, position + start)
    try:
        fcntl.ioctl(fd, FICLONERANGE, wanted)
    except OSError as error:
        if error.errno not in NO_CLONE:
            raise
        return range(0)
    return range(start, end)
