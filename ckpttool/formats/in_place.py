"""A safetensors file whose header alone changes, rewritten where it stands: no payload moves.

A header can't be replaced in one step that no crash divides. So the old one is first saved beside the file,
in a journal that is on the disk before the first byte changes. `open` finds a journal that a crash left
behind and reads the old header from it; the next rewriting puts it back. Where the file system can share
blocks between files (reflink: btrfs, xfs), a clone gets the new header and is renamed over the old file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Mapping

from ..tensor import ByteRange, Source, TensorRef
from ..transfer import replacing, sync_folder

MAGIC = b"ckpttool journal 1\n"
FICLONE = 0x40049409
"""The ioctl by which a file takes over all blocks of another (linux/fs.h)."""


def journal_path(path: str) -> str:
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name[:200]}.ckpttool-journal")


def surviving_header(source: Source) -> bytes | None:
    """The header that was in the file before a rewriting that never ended; None when there is no journal."""
    try:
        with open(journal_path(source.path), "rb") as file:
            raw = file.read()
    except OSError:
        return None
    digest, header = raw[len(MAGIC) : len(MAGIC) + 32], raw[len(MAGIC) + 32 :]
    if not raw.startswith(MAGIC) or hashlib.sha256(header).digest() != digest:
        return None  # cut short: so the file itself was not touched yet
    return header if len(header) <= source.size else None


def payload_start(source: Source, tensors: Mapping[str, TensorRef]) -> int | None:
    """Where the payload of a file begins that these tensors are, all of it and nothing else; else None."""
    places = sorted(map(_place, tensors.values()))
    if not all(
        t.is_plain and isinstance(t.data, ByteRange) and t.data.source is source for t in tensors.values()
    ):
        return None
    ends = [offset + nbytes for offset, nbytes in places]
    if [offset for offset, _ in places[1:]] + [source.size] != ends:
        return None
    return places[0][0]


def by_place(item: tuple[str, TensorRef]) -> tuple[int, int]:
    return _place(item[1])


def _place(tensor: TensorRef) -> tuple[int, int]:
    """Offset in the file, and size."""
    where = tensor.storage.data
    offset = where.offset if isinstance(where, ByteRange) else 0
    return offset + tensor.offset * tensor.dtype.itemsize, tensor.nbytes


def replace_header(source: Source, header: bytes) -> None:
    """Puts a header of the old one's size into the file."""
    if not _on_a_clone(source, header):
        _with_journal(source, header)


def _on_a_clone(source: Source, header: bytes) -> bool:
    """The same by a clone that shares the payload's blocks; False where the file system can't."""
    try:
        with replacing(source.path) as file:
            fcntl.ioctl(file.fileno(), FICLONE, source.fd)
            os.pwrite(file.fileno(), header, 0)
    except OSError as error:
        if error.errno in {
            errno.EOPNOTSUPP,
            errno.ENOTTY,
            errno.EINVAL,
            errno.EXDEV,
            errno.ENOSYS,
            errno.EPERM,
        }:
            return False
        raise
    return True


def _with_journal(source: Source, header: bytes) -> None:
    journal = journal_path(source.path)
    old = source.read(0, len(header))
    with replacing(journal) as file:
        file.write(MAGIC + hashlib.sha256(old).digest() + old)
    fd = os.open(source.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        _write(fd, header)
    except BaseException:
        _write(fd, old)
        raise
    finally:
        os.close(fd)
        os.unlink(journal)
        sync_folder(os.path.dirname(journal))


def _write(fd: int, header: bytes) -> None:
    done = 0
    while done < len(header):
        done += os.pwrite(fd, header[done:], done)
    os.fsync(fd)


def restore(path: str, header: bytes) -> None:
    """Puts back the header that a journal kept, and removes the journal."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        _write(fd, header)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(journal_path(path))
