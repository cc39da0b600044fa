"""File systems that share extents: real ones, and FICLONERANGE with the kernel's rules on any other."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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


SHARED, AT_ONCE = 0x2000, 512  # FIEMAP_EXTENT_SHARED of linux/fiemap.h; extents that are asked for at once


def shared_bytes(path: Path) -> int:
    """Return how many bytes of a file lie in blocks that others have too, as the kernel says (FIEMAP)."""
    found = at = 0
    with open(path, "rb") as file:
        while True:
            asked = bytearray(struct.pack("QQIIII", at, 1 << 62, 1, 0, AT_ONCE, 0) + bytes(56 * AT_ONCE))
            fcntl.ioctl(file, 0xC020660B, asked)  # FS_IOC_FIEMAP
            (count,) = struct.unpack_from("I", asked, 20)
            for number in range(count):
                logical, _, nbytes, _, _, flags = struct.unpack_from("QQQQQI", asked, 32 + 56 * number)
                found += nbytes * bool(flags & SHARED)
                at = logical + nbytes
            if count < AT_ONCE:
                return found


@contextlib.contextmanager
def mounted(folder: Path, *make: str, options: str = "loop") -> Iterator[Path]:
    """Yield where a new file system is mounted, which a program makes: `mkfs.xfs`. Skips where none can."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if shutil.which(make[0]) is None:
        pytest.skip(f"needs {make[0]}, which is not installed (apt-get install xfsprogs btrfs-progs)")
    image, place = folder / "image", folder / "mounted"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 << 20)
    subprocess.run([*make, image], check=True, capture_output=True)
    ran = subprocess.run(["mount", "-o", options, image, place], capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"this machine mounts no such file system: {ran.stderr.strip()[:200]}")
    try:
        yield place
    finally:
        gc.collect()  # descriptors of checkpoints
        subprocess.run(["umount", "--lazy", place], check=True)
