"""The atomic commit of a file, and what is known of files in folders: names, links, permissions, locks."""

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
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

from ...errors import FileError, Unreadable, UsageFault, already_exists
from .. import system
from ..tensors.ref import ByteRange, Source
from ..words import first_few
from .resuming import PART, Attempt, new_file, remove_abandoned
from .threads import BUFFER

# ---- Errors of the system, with the name of the file

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reason(error: OSError) -> str:
    """Return why a call of the system failed: `no space left on device`."""
    return (error.strerror or str(error) or type(error).__name__).lower()


@contextlib.contextmanager
def naming(path: str, done: str = "written") -> Iterator[None]:
    """Turn the system's errors in the block into a FileError: the file could not be `done`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's zip writer raises this on closing a file cut short
        behind = system_error(error)
        why = reason(behind) if behind else str(error).splitlines()[0]
        hint = "is the disk full?" if behind is None or behind.errno in NO_ROOM else None
        raise FileError(path, f"could not be {done}: {why}", hint=hint) from error


def system_error(error: BaseException) -> OSError | None:
    """Return the system's own error, if there is one behind this one."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return behind
        behind = behind.__context__
    return None


@contextlib.contextmanager
def no_room_named(path: str, *, every: bool = False) -> Iterator[None]:
    """Put a path into each OSError for lack of room, or into `every` OSError."""
    try:
        yield
    except OSError as error:
        if every or error.errno in NO_ROOM:
            error.filename, error.filename2 = path, None
        raise


# ---- The atomic commit of a file: it appears complete, or not at all
#
# A file is built under another name in the same folder, flushed to the disk, and renamed over its target.
# After a kill the target has the old contents or the new ones. The next save into the folder removes the
# temporary file.


LINK = ".link"  # the ending of a name that a file is about to get


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str],
    attempt: Attempt | None = None,
    changed: int | None = None,
    *,
    exclusive: bool = False,
    mode: int = 0o666,
) -> Iterator[BinaryIO]:
    """Open a new binary file that takes the place of `path` when the block ends without an error.

    The old file stays complete until then, and readers that have it open keep it. After an error nothing of
    the new file is left, except what an `attempt` keeps. A symbolic link stays, and its target is replaced.
    `-` is standard output, which gets all bytes at the end. `changed` is the time of change in nanoseconds,
    if not now. An `exclusive` file replaces nothing, even if the target appears before the block ends. A file
    that replaces none has the permissions `mode`, but for those that the umask takes. Raises
    OutputExists then, UsageFault where the place can't be written, and OSError with `path` for a failing
    disk.
    """
    name = os.fspath(path)
    there = _to_standard_output() if name == "-" else _replacing(name, attempt, changed, exclusive, mode)
    with there as file:
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
    path: str, attempt: Attempt | None, changed: int | None, exclusive: bool, mode: int
) -> Iterator[BinaryIO]:
    target = system.real(path)
    if (exists := _check_target(path, target)) and exclusive:
        raise already_exists(path)
    folder = os.path.dirname(target)
    remove_abandoned(folder)
    mode = 0o600 if exists else mode
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
                attempt.forget()
    except BaseException:
        if not attempt:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise
    system.sync_folder(folder)


def give_name(path: str, other: str) -> None:
    """Give a new file a second name, atomically, by a hard link: no file is ever changed in place.

    Without hard links the file is copied. A kill may leave the link under the name and LINK.
    """
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
    """Raise UsageFault for an output whose name this system can't hold, or takes for something else."""
    if why := system.unfit_name(path):
        raise UsageFault(f"{path}: {why}", hint="choose another output")


def not_writable(path: str, error: OSError) -> UsageFault | OSError:
    """Return the error for an output that can't be created: OSError for a full or failing disk."""
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
        with contextlib.suppress(OSError):  # it has none, or the file system knows none
            value = os.getxattr(old, name)
            try:
                os.setxattr(new, name, value)
            except OSError:
                return False
    return True


def _drop_acls(new: int | str) -> None:
    """Remove access control lists, such as those that a new file inherits from its folder."""
    for name in ACLS if hasattr(os, "removexattr") else ():
        with contextlib.suppress(OSError):  # it has none
            os.removexattr(new, name)


def append_line(path: str, line: bytes, *, durably: bool = False) -> None:
    """Append a line, given without its line break, as `append_record` does."""
    append_record(path, line + b"\n", durably=durably)


def append_record(path: str, record: bytes, *, durably: bool = False) -> None:
    """Append bytes to a file, which is created if missing; after an OSError none of them is there."""
    left, before = record, None
    try:
        with open(path, "ab", buffering=0) as file:
            before = file.tell()
            while left:
                left = left[file.write(left) :]
            if durably:
                os.fsync(file.fileno())
    except OSError:  # also of closing: NFS reports a full disk only then
        if before is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
        raise


# ---- The files of a folder, each with all its names there


@dataclass(slots=True)
class LinkedFile:
    """A regular file of a folder.

    Attributes:
        names: hard links, at least one, sorted.
        facts: what is known of it.
        symlinks: symbolic links in the folder that lead to it.
    """

    names: list[str]
    facts: os.stat_result
    symlinks: list[str] = field(default_factory=list)


def files_in(folder: str) -> list[LinkedFile]:
    """Return the regular files in a folder, without hidden ones. Raises FileError for a failing disk."""
    found: dict[tuple[int, int], LinkedFile] = {}
    with naming(folder, "listed"):
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_symlink(), entry.name))
        for entry in entries:
            if not entry.is_file() or entry.name.startswith("."):
                continue
            facts = os.stat(entry.path)  # on Windows, entry.stat() does not tell files apart
            identity = facts.st_dev, facts.st_ino
            if not entry.is_symlink():
                found.setdefault(identity, LinkedFile([], facts)).names.append(entry.name)
            elif identity in found:
                found[identity].symlinks.append(entry.name)
    return list(found.values())


def remove_half_given(folder: str) -> None:
    """Remove the links to new files that a kill in `give_name` left beside old ones."""
    files = files_in(folder)
    of_name = {name: file for file in files for name in file.names}
    for name, file in of_name.items():
        other = of_name.get(name.removesuffix(LINK))
        if name.endswith(LINK) and other not in (None, file) and file.names[1:]:
            with naming(os.path.join(folder, name), "removed"):
                os.unlink(os.path.join(folder, name))


# ---- Opening for reading: regular files, standard input, and hints for a missing path


def open_source_descriptor(path: str) -> int:
    """Return a read-only descriptor of a regular file whose first byte is the first to be read.

    `-` is standard input from its position; a pipe, or the rest of a file, is first copied to a temporary
    file. Raises Unreadable for anything else.
    """
    if path == "-":
        return _standard_input()
    try:
        fd = os.open(path, system.READ)
    except FileNotFoundError:
        raise no_such_file(path) from None
    except OSError as error:
        raise Unreadable(path, reason(error)) from error
    except ValueError:
        raise Unreadable(path, "is not a file name") from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise Unreadable(path, f"is {what}", hint="name the checkpoint file")
    return fd


def _standard_input() -> int:
    if stat.S_ISREG(os.fstat(0).st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0:
        return os.dup(0)
    with no_room_named(tempfile.gettempdir()), tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool, BUFFER)
        spool.flush()
        return os.dup(spool.fileno())


SPARE = 64  # descriptors that stay free for other uses


def allow_open_files(count: int, path: str) -> None:
    """Raise this process's soft limit of open files if a checkpoint needs it."""
    # A tensor is a place in an open file, so all files of a checkpoint stay open, and mapping one takes a
    # second descriptor. Many systems allow 1,024, and let a process raise that itself up to a hard limit.
    soft, hard = system.open_files_allowed()
    used = SPARE
    with contextlib.suppress(OSError):  # there is no /dev/fd, or no descriptor left to read it
        used = len(os.listdir("/dev/fd"))
    wanted = used + 2 * count + SPARE
    if wanted <= soft:
        return
    allowed = min(wanted, hard)
    if allowed < used + count + 1:
        what = "is one file too many:" if count == 1 else f"consists of {count} files, and"
        hint = f"raise the limit first: ulimit -n {wanted}"
        raise Unreadable(path, f"{what} this process may open only {hard} at once", hint=hint)
    if allowed > soft:
        system.allow_open_files(int(allowed))


MOST_NAMES = 10_000  # of a folder, that are looked at

OF_MACOS = "._"  # the beginning of files in which macOS keeps what other file systems can't hold

# Usual endings of checkpoints' names. Only for hints: a format is recognised by content.
CHECKPOINT_ENDINGS = (
    *(".pt", ".pth", ".th", ".tar", ".bin", ".ckpt", ".safetensors", ".index.json"),
    *(".pt2", ".gguf", ".onnx", ".npz", ".npy"),
)


def no_such_file(path: str) -> Unreadable:
    """Return the error for a missing path, with a similar path or the checkpoints of the folder as hint."""
    if os.path.islink(path):
        hint = f"see what it points to: ls -l {shlex.quote(path)}"
        return Unreadable(path, f"is a link to {os.readlink(path)}, where there is no file", hint=hint)
    return Unreadable(path, "no such file", hint=_near(*os.path.split(path)))


def _near(folder: str, name: str) -> str:
    from difflib import get_close_matches

    if not os.path.isdir(folder or "."):
        return f"there is no folder {_first_missing(folder)}"
    names = [other for other in names_in(folder or ".") if other != name]
    if close := get_close_matches(name, names, n=2, cutoff=0.7):
        return f"did you mean {' or '.join(os.path.join(folder, other) for other in close)}?"
    here = f"the folder {folder}" if folder else "this folder"
    if files := checkpoints_among(names):
        return f"{here} has {first_few(files)}"
    return f"see what is there: ls {shlex.quote(folder or '.')}"


def _first_missing(folder: str) -> str:
    while (above := os.path.dirname(folder)) and not os.path.isdir(above):
        folder = above
    return folder


def names_in(folder: str) -> list[str]:
    """Return the names in a folder, sorted, MOST_NAMES at most; none where it can't be read."""
    try:
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries if not entry.name.startswith(OF_MACOS))
            return sorted(islice(names, MOST_NAMES))
    except OSError:
        return []


def checkpoints_among(names: list[str]) -> list[str]:
    """Return the names with a usual ending of a checkpoint."""
    return [name for name in names if name.lower().endswith(CHECKPOINT_ENDINGS)]


# ---- The lock of a run's folder: one process at a time writes checkpoints there


# Descriptors of the folders that this process has locked.
_locks: set[int] = set()


def _release_in_child() -> None:
    """Close the descriptors that a fork has copied.

    A lock lasts as long as any process has one, and a process that loads data may outlive its rank.
    """
    while _locks:
        os.close(_locks.pop())


system.in_forked(_release_in_child)


@contextlib.contextmanager
def locked(folder: str, shown: str) -> Iterator[None]:
    """Lock a folder, itself and not a file in it, until the block or the process ends.

    Raises UsageFault, which begins with `shown`, if another process has locked it.
    """
    try:
        fd = system.lock_folder(folder)
    except BlockingIOError:
        hint = "name another folder, or wait for it to end"
        raise UsageFault(f"{shown}: another run, or slim, writes there now", hint=hint) from None
    _locks.add(fd)
    try:
        yield
    finally:
        _locks.discard(fd)
        os.close(fd)


# ---- Computed bytes that are read often, in a temporary file without a name


class Spool:
    """A temporary file that grows; it is gone with the last reference to it."""

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
