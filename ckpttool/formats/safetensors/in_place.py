"""A safetensors file of which only the header changes, rewritten in place: no payload moves.

A header can't be replaced in one atomic step. So the old one and the new one are first saved
beside the file, in a journal that is on the disk before the first byte changes. A reader that finds a mixture
of the two in the file takes the old one from the journal; the next rewriting puts it back. A journal that
explains nothing (its rewriting ended, or another program wrote the file anew) is ignored. Where the file
system can share blocks between files (reflink: btrfs, xfs), a clone gets the new header and is renamed over
the old file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import Damaged, UsageFault
from ...files.commit import replacing, sync_folder
from ...tensors.ref import ByteRange, Source, TensorRef

MAGIC = b"ckpttool journal 1\n"
MAX_HEADER = 100_000_000
"""Bytes that the format gives a header at most."""

FICLONE = 0x40049409
"""The ioctl by which a file takes over all blocks of another (linux/fs.h)."""

# The file system's ways of saying that it can't.
NO_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Journal:
    """The two headers of a rewriting, with their lengths; both have the same size."""

    old: bytes
    new: bytes

    def explains(self, header: bytes) -> bool:
        """Whether a header is what a rewriting left that was cut off: part the old one, part the new one."""
        if len(header) != len(self.old) or header in (self.old, self.new):
            return False
        both = zip(header, self.old, self.new, strict=True)
        return all(byte in (old, new) for byte, old, new in both)


def _sha256(data: bytes) -> bytes:
    import hashlib  # loads OpenSSL, without which most commands start sooner

    return hashlib.sha256(data).digest()


def journal_path(path: str) -> str:
    folder, name = os.path.split(os.path.realpath(path))
    begin = os.fsdecode(os.fsencode(name)[:200])  # names have at most 255 bytes, whatever the letters
    return os.path.join(folder, f".{begin}.ckpttool-journal")


def read_header(source: Source) -> bytes:
    """The header of a file, its length included; the old one while a rewriting is under way or was cut off.

    Raises:
        Damaged: the file is shorter than its header.
    """
    header = _header_now(source)
    for _ in range(100):
        journal = _read_journal(source.path)
        if journal is not None and journal.explains(header):
            return journal.old
        again = _header_now(source)
        if journal is not None or again == header:
            return header
        header = again  # it was rewritten meanwhile, and the first look may have seen both
    raise Damaged(source.path, "is being written continuously by another process")


def _header_now(source: Source) -> bytes:
    size = int.from_bytes(source.read(0, 8), "little")
    if size > MAX_HEADER or 8 + size > source.size:
        raise Damaged(source.path, f"is cut short: its header should have {size} bytes")
    return source.read(0, 8 + size)


def _read_journal(path: str) -> Journal | None:
    try:
        with open(journal_path(path), "rb") as file:
            raw = file.read()
    except OSError:
        return None
    digest, both = raw[len(MAGIC) : len(MAGIC) + 32], raw[len(MAGIC) + 32 :]
    if not raw.startswith(MAGIC) or _sha256(both) != digest:
        return None  # not one of ours, or cut short: so the file itself was not touched
    return Journal(both[: len(both) // 2], both[len(both) // 2 :])


def payload_start(source: Source, tensors: Mapping[str, TensorRef]) -> int | None:
    """Where the payload begins, if these tensors are exactly the file's payload; else None."""
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


def replace_header(source: Source, header: bytes) -> bool:
    """Puts a header of the old one's size into the file.

    Returns:
        False, and nothing was changed, where that may not be done: the file has other names (hard links)
        that must not change with it, can't be written, was replaced meanwhile, or is being rewritten.
    """
    try:
        fd = os.open(source.path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(fd)
        if not os.path.samestat(facts, os.fstat(source.fd)) or facts.st_nlink != 1 or not _lock(fd):
            return False
        if not _on_a_clone(source, header):
            _with_journal(source, fd, header)
        forget(source.path)
    except UsageFault:  # no journal can be written there
        return False
    finally:
        os.close(fd)
    return True


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _on_a_clone(source: Source, header: bytes) -> bool:
    """The same by a clone that shares the payload's blocks; False where the file system can't."""
    try:
        with replacing(source.path) as file:
            fcntl.ioctl(file.fileno(), FICLONE, source.fd)
            os.pwrite(file.fileno(), header, 0)
    except OSError as error:
        if error.errno in NO_CLONE:
            return False
        raise
    return True


def _with_journal(source: Source, fd: int, header: bytes) -> None:
    old = read_header(source)
    if old != _header_now(source):  # what another rewriting left: put right first, by its own journal
        _write(fd, old)
    path = journal_path(source.path)
    with replacing(path) as journal:
        journal.write(MAGIC + _sha256(old + header) + old + header)
    try:
        _write(fd, header)
    except BaseException:
        _write(fd, old)  # when this fails too the journal stays
        forget(source.path)
        raise


def _write(fd: int, header: bytes) -> None:
    done = 0
    while done < len(header):
        done += os.pwrite(fd, header[done:], done)
    os.fsync(fd)


def forget(path: str) -> None:
    """Removes a file's journal, when there is one; a journal that stays explains no header any more."""
    journal = journal_path(path)
    with contextlib.suppress(OSError):
        os.unlink(journal)
        sync_folder(os.path.dirname(journal))
