"""A file system that shares extents: FICLONERANGE with the kernel's rules, on any file system."""

from __future__ import annotations

import errno
import os
import struct

from ckpttool.core import system
from ckpttool.core.files import reflink


def clone_range(fd: int, request: int, wanted: bytes) -> int:
    """Do what the ioctl does, by copying; refuse what is not whole blocks, but for the end of both files."""
    assert request == system.FICLONERANGE
    source, start, nbytes, position = struct.unpack("qQQQ", wanted)
    end, size = start + nbytes, os.fstat(source).st_size
    aligned = not (start % reflink.BLOCK or position % reflink.BLOCK)
    is_end = end == size and position + nbytes >= os.fstat(fd).st_size
    if not aligned or end > size or (end % reflink.BLOCK and not is_end) or not nbytes:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    assert os.copy_file_range(source, fd, nbytes, start, position) == nbytes
    return 0
