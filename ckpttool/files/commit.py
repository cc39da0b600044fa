"""The atomic commit of a file: it appears complete, or not at all.

A file is built under another name in the same folder, flushed to the disk, and renamed over its target. A
killed process leaves the old contents or the new ones; the next save into the folder removes what else it
left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from .. import system
from ..errors import UsageFault, already_exists
from .failures import NO_ROOM, no_room_named, reason
from .pieces import BUFFER
from .temporaries import PART, new_file, remove_abandoned

if TYPE_CHECKING:
    from .resuming import Attempt

LINK = ".link"  # behind a name that a file is about to get


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str],
    attempt: Attempt | None = None,
    changed: int | None = None,
    *,
    exclusive: bool = False,
) -> Iterator[BinaryIO]:
    """Open a new binary file that takes the place of `path` when the block ends without an error.

    The old file stays complete until then, and readers that have it open keep it; after an error nothing of
    the new one is left, but for what an `attempt` keeps. Of a symbolic link the target is replaced. `-` is
    standard output, to which all of it is sent at the end. `changed` is its time of change in nanoseconds, if
    not now. An `exclusive` one replaces nothing, even if that appears before the block ends. Raises
    OutputExists then, UsageFault where the place can't be written, and OSError, named `path`, for a failing
    disk.
    """
    name = os.fspath(path)
    with _to_standard_output() if name == "-" else _replacing(name, attempt, changed, exclusive) as file:
        yield file


@contextlib.contextmanager
def _to_standard_output() -> Iterator[BinaryIO]:
    if sys.stdout.isatty():
        raise UsageFault("-: standard output is a terminal", hint="redirect it, or name a file")
    with tempfile.TemporaryFile() as spool:
        with no_room_named(tempfile.gettempdir()):
            yield spool
            spool.flush()
        spool.seek(0)
        with no_room_named("standard output"):
            shutil.copyfileobj(spool, sys.stdout.buffer, BUFFER)
            sys.stdout.buffer.flush()


@contextlib.contextmanager
def _replacing(
    path: str, attempt: Attempt | None, changed: int | None, exclusive: bool
) -> Iterator[BinaryIO]:
    target = system.real(path)
    exists = _check_target(path, target)
    if exists and exclusive:
        raise already_exists(path)
    folder = os.path.dirname(target)
    remove_abandoned(folder)
    mode = 0o600 if exists else 0o666
    try:
        claimed = attempt.claim_file(mode) if attempt else None
        if claimed is None:  # another process goes on with the same output
            attempt = None
        fd, temporary = new_file(target, mode) if claimed is None else claimed
    except OSError as error:
        raise not_writable(path, error) from error
    try:
        with no_room_named(path), os.fdopen(fd, "w+b" if attempt is None else "r+b") as file:
            try:
                yield file
                file.flush()
                with no_room_named(path, every=True):
                    with contextlib.suppress(FileNotFoundError):
                        keep_permissions(fd, target)
                    try:
                        system.put(file, temporary, target, changed, exclusive=exclusive)
                    except FileExistsError:
                        raise already_exists(path) from None
            except BaseException as error:
                if attempt:
                    attempt.give_up(error)
                raise
            if attempt:
                attempt.end()
    except BaseException:
        if not attempt:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise
    system.sync_folder(folder)


def give_name(path: str, other: str) -> None:
    """Give a file just written a second name, atomically: a hard link, as no file is ever changed in place,
    or a copy if the file system has no links. A kill may leave the link under the name and LINK."""
    temporary = f"{other}{LINK}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        os.link(path, temporary)
    except OSError:
        with open(path, "rb") as source, replacing(other) as target:
            shutil.copyfileobj(source, target)
        return
    try:
        system.replace(temporary, other)
    except OSError:
        os.unlink(temporary)
        raise
    system.sync_folder(os.path.dirname(other))


def require_folder(path: str) -> None:
    """Check that an output's folder exists, before any work is done."""
    require_name(path)
    folder = os.path.dirname(path.rstrip("".join(system.SEPARATORS)))
    if folder and not os.path.lexists(folder):
        raise UsageFault(f"{path}: there is no folder {folder}", hint=f"mkdir -p {shlex.quote(folder)}")


def require_name(path: str) -> None:
    """Refuse an output by a name that this system can't hold, or takes for something else."""
    if why := system.unfit_name(path):
        raise UsageFault(f"{path}: {why}", hint="choose another output")


def not_writable(path: str, error: OSError) -> UsageFault | OSError:
    """Return the error for an output that can't be created: the user's, or a full or failing disk's."""
    if error.errno in NO_ROOM | {errno.EIO, errno.EINTR}:
        return OSError(error.errno, error.strerror, path)
    return UsageFault(f"{path}: can't write there: {reason(error)}", hint="choose another output")


@contextlib.contextmanager
def writing_into(path: str) -> Iterator[BinaryIO]:
    """Create a file in a folder that is not yet in place; flush it to the disk when the block ends."""
    goes_on = os.path.dirname(path).endswith(PART) and os.path.exists(path)
    with open(path, "r+b" if goes_on else "x+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _check_target(path: str, target: str) -> bool:
    """Check that the target may be replaced; return whether it exists."""
    require_name(path)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        if path.endswith(system.SEPARATORS):
            raise UsageFault(f"{path}: is named like a folder", hint="name a file") from None
        return False
    except OSError as error:
        raise not_writable(path, error) from error
    if not stat.S_ISREG(mode):
        raise UsageFault(f"{path}: is not a regular file, so it can't be replaced")
    return True


# Extended attributes in which Linux keeps access control lists (acl(5)).
ACLS = ("system.posix_acl_access", "system.posix_acl_default")


def keep_permissions(new: int | str, old: str) -> None:
    """Give `new` the owner, group, permissions and access control lists of `old`, as far as this user may."""
    if not system.HAS_OWNERS:
        return
    # Only root may give a file to another user, and only members may give it to a group. Where the group
    # can't be kept, the new file's group gets no more than everyone had.
    facts = os.stat(old)
    mode = stat.S_IMODE(facts.st_mode)
    if not _keep_owner(new, facts):
        mode &= ~stat.S_ISUID
    if not (os.stat(new).st_gid == facts.st_gid and _keep_acls(new, old)):
        everyone = mode & stat.S_IRWXO
        mode = mode & ~(stat.S_IRWXG | stat.S_ISGID) | (mode & everyone << 3)
        _drop_acls(new)
    try:
        os.chmod(new, mode)
    except PermissionError:  # a file system without permissions of its own, such as FAT
        if stat.S_IMODE(os.stat(new).st_mode) & ~mode:
            raise


def _keep_owner(new: int | str, facts: os.stat_result) -> bool:
    """Give a file its owner and group, or only its group; return whether it has the owner."""
    for uid in (facts.st_uid, -1):
        with contextlib.suppress(OSError):  # not allowed, or unknown in this container
            os.chown(new, uid, facts.st_gid)
            break
    return os.stat(new).st_uid == facts.st_uid


def _keep_acls(new: int | str, old: str) -> bool:
    """Copy the access control lists, or the lack of them; return whether that was possible."""
    _drop_acls(new)
    for name in ACLS if hasattr(os, "getxattr") else ():
        value = None
        with contextlib.suppress(OSError):  # it has none, or the file system knows none
            value = os.getxattr(old, name)
        try:
            if value is not None:
                os.setxattr(new, name, value)
        except OSError:
            return False
    return True


def _drop_acls(new: int | str) -> None:
    """Remove lists, such as those that the folder gave to a file created in it."""
    for name in ACLS if hasattr(os, "removexattr") else ():
        with contextlib.suppress(OSError):  # it has none
            os.removexattr(new, name)


def append_line(path: str, line: bytes, *, durably: bool = False) -> None:
    """Append a line, given without its line break, as `append_record` does."""
    append_record(path, line + b"\n", durably=durably)


def append_record(path: str, record: bytes, *, durably: bool = False) -> None:
    """Append bytes to a file, created if there is none; after an OSError nothing of them is there."""
    left, before = record, None
    try:
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            while left:
                left = left[file.write(left) :]
            if durably:
                os.fsync(file.fileno())
    except OSError:  # of the closing too: NFS says only then that the disk is full
        if before is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
        raise
