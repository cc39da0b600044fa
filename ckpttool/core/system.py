"""Calls that only POSIX has; `windows` has their substitutes. No other file asks which system this is."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from .windows import Opened

try:
    import fcntl
    import resource

    IS_POSIX = hasattr(os, "pread")
except ImportError:
    IS_POSIX = False


# ---- Flags of os.open, 0 where the system lacks one; without O_BINARY, Windows changes line breaks

BINARY = getattr(os, "O_BINARY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
READ = os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0)  # a named pipe would wait for a writer
CHANGE = os.O_RDWR | BINARY | getattr(os, "O_NONBLOCK", 0)
CREATE = os.O_RDWR | os.O_CREAT | BINARY
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)  # on Windows a PermissionError

ENDING = tuple(  # signals that end the process
    number for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if (number := getattr(signal, name, None))
)

if IS_POSIX:
    SEPARATORS: tuple[str, ...] = ("/",)  # may end the name of a folder
    HAS_OWNERS = True  # whether files have an owner and permissions that `os` can set
    REPLACES_MAPPED = True  # whether a file that is mapped can be replaced
    PRIVATE_FOLDER = 0o700  # the mode of a folder until it gets that of the replaced one

    # ---- Bytes at a place

    pread = os.pread
    pwrite: Callable[[int, bytes | bytearray | memoryview, int], int] = os.pwrite
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter

    FICLONERANGE = 0x4020940D  # the ioctl by which files share extents, on btrfs and XFS (linux/fs.h)

    # Errors where the file system, or this pair of files, can't share extents.
    NO_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EPERM}

    def block_size(folder: str) -> int:
        """Return how many bytes the blocks of a file system have."""
        return os.statvfs(folder).f_bsize

    def share_blocks(source: int, offset: int, nbytes: int, target: int, position: int) -> str:
        """Let a file share whole blocks of another; return why the file system can't, or nothing."""
        wanted = struct.pack("qQQQ", source, offset, nbytes, position)
        try:
            fcntl.ioctl(target, FICLONERANGE, wanted)
        except OSError as error:
            if error.errno not in NO_CLONE:
                raise
            return os.strerror(error.errno)
        return ""

    def memory(nbytes: int) -> mmap.mmap:
        """Return new memory, in large pages where the kernel has them."""
        room = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                room.madvise(mmap.MADV_HUGEPAGE)
        return room

    # ---- Files and folders in their places

    real: Callable[[str], str] = os.path.realpath
    join: Callable[..., str] = os.path.join  # of a folder, or its URL, and names

    def local(path: str) -> str:
        """Return the path in the form that the system accepts."""
        return path

    path_of_url = local

    def unfit_name(path: str) -> str | None:
        """Return the reason why a path can't be the name of an output; None if it can."""
        return None

    def opened(source: Opened) -> None:
        """Note that a file is open: Windows needs it closed before it is replaced."""

    def release(path: str) -> None:
        """Close the descriptors of a file, or of the files in a folder, where the system needs it."""

    def put(
        file: BinaryIO, written: str, target: str, changed: int | None = None, *, exclusive: bool = False
    ) -> None:
        """Flush a new file to the disk, and put it in the place of its target.

        `changed` is its time of change in nanoseconds, if not now. The lock of the file stays until it is
        closed. On Windows it is closed earlier, and others wait a day before they remove it. Raises
        FileExistsError where something is at the target of an `exclusive` file.
        """
        if changed is not None:
            os.utime(file.fileno(), ns=(changed, changed))
        os.fsync(file.fileno())
        (_name if exclusive else os.replace)(written, target)

    def _name(written: str, target: str) -> None:
        """Move a file to an unused name. Raises FileExistsError where the name is taken by now."""
        try:
            os.link(written, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: an empty file keeps the place for a moment
            os.close(os.open(target, CREATE | os.O_EXCL, 0o600))
            try:
                os.replace(written, target)
            except BaseException:
                os.unlink(target)
                raise
        else:
            with contextlib.suppress(OSError):  # the next save removes it
                os.unlink(written)

    def replace(written: str, target: str) -> None:
        """Put a file, which may be open, in the place of another."""
        os.replace(written, target)

    def link(old: str, new: str) -> None:
        """Give a file, or a symbolic link itself, a second name."""
        os.link(old, new, follow_symlinks=False)

    def sync_folder(folder: str) -> None:
        """Flush a folder's entries to the disk; else a rename may not survive a power cut."""
        try:
            fd = os.open(folder, FOLDER)
        except PermissionError:  # a folder may be writable and not readable
            return
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EBADF, errno.EROFS}:
                raise
        finally:
            os.close(fd)

    # Arguments of renameat2 (linux/fcntl.h, linux/fs.h).
    AT_FDCWD, RENAME_EXCHANGE = -100, 2

    # Errors of renameat2: an old kernel, a file system that can't, a sandbox.
    NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}

    def exchange(one: str, other: str) -> bool:
        """Exchange what is at two paths in one step; return False where the system can't."""
        import ctypes

        try:
            call = ctypes.CDLL(None, use_errno=True).renameat2
        except (AttributeError, OSError, TypeError):  # another platform, or an old C library
            return False
        first, second = (ctypes.c_char_p(os.fsencode(path)) for path in (one, other))
        if call(AT_FDCWD, first, AT_FDCWD, second, RENAME_EXCHANGE):
            number = ctypes.get_errno()
            if number not in NO_EXCHANGE:
                raise OSError(number, os.strerror(number), other)
            return False
        return True

    # ---- Locks and owners

    def lock(fd: int) -> None:
        """Lock a file or folder. Raises BlockingIOError where another has it locked, OSError if none can."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def hold_folder(path: str) -> int:
        """Return a descriptor of a folder."""
        return os.open(path, FOLDER | NO_LINK)

    def lock_folder(path: str) -> int:
        """Return a descriptor that locks a folder until it is closed. Raises as `lock` does."""
        fd = os.open(path, FOLDER)
        try:
            lock(fd)
        except OSError as error:
            # The others are of file systems that lock no folders, as NFS.
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
                os.close(fd)
                raise
        return fd

    def is_mine(facts: os.stat_result) -> bool:
        """Return whether a file is this user's."""
        return facts.st_uid == os.geteuid()

    def is_mine_alone(facts: os.stat_result) -> bool:
        """Return whether a file is this user's, and no other may write to it."""
        return is_mine(facts) and not facts.st_mode & 0o022

    def boot() -> bytes:
        """Return a key of this start of this machine."""
        try:
            with open("/proc/sys/kernel/random/boot_id", "rb") as file:
                return file.read()
        except OSError:
            return os.fsencode(os.uname().nodename)

    # ---- The process

    def open_files_allowed() -> tuple[float, float]:
        """Return the soft and the hard limit of open files."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return tuple(math.inf if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))  # type: ignore[return-value]

    def allow_open_files(count: int) -> None:
        """Set the soft limit of open files."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def in_forked(call: Callable[[], object]) -> None:
        """Call a function in each process that is forked from this one."""
        os.register_at_fork(after_in_child=call)

    def end_by(number: int) -> None:
        """End by the signal itself: only then does a shell stop a loop around this program."""
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def every(seconds: float, call: Callable[..., object]) -> Iterator[None]:
        """Call a function after each `seconds` of work, between opcodes and within `re`.

        In a thread other than the main one it is never called.
        """
        is_main = threading.current_thread() is threading.main_thread()
        # None is a handler that Python can't restore. Other code uses SIGALRM.
        if not is_main or (before := signal.getsignal(signal.SIGVTALRM)) is None:
            yield
            return
        signal.signal(signal.SIGVTALRM, call)
        timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
            signal.signal(signal.SIGVTALRM, before)

else:
    from .windows import *  # noqa: F403
