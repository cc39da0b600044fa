"""Runs commands in this process, on what Windows has: the rest is taken away, and its refusals are added.

python -m tests.support.without_posix [windows] < JSON list of commands, each a list of words

Prints a JSON list of [exit code, stdout, stderr]. What is open or mapped can't be replaced, moved or removed,
a folder can't be opened, text has code page 1252 and CRLF, and descriptors have no permissions and times.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import mmap
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

MISSING = {
    os: """pread preadv pwrite pwritev readv writev fork forkpty chown fchown lchown fchmod fdatasync geteuid
        getuid getgid getegid getgroups getpgid killpg setsid uname sysconf statvfs fstatvfs mkfifo mknod
        posix_fadvise posix_fallocate copy_file_range sendfile sched_getaffinity register_at_fork getxattr
        setxattr listxattr removexattr nice O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_SYNC O_DSYNC""",
    signal: """SIGHUP SIGVTALRM SIGALRM SIGKILL SIGQUIT SIGUSR1 setitimer getitimer alarm pthread_sigmask
        ITIMER_VIRTUAL""",
    mmap: "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON PROT_READ PROT_WRITE MADV_HUGEPAGE",
}
MODULES = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix_ipc")


def take_away() -> None:
    """Leave this process what it would have on Windows, as far as Linux can tell."""
    import fcntl

    import numpy  # noqa: F401 - it asks which kernel this is

    sys.modules["msvcrt"] = msvcrt_of(fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    flags = fcntl.fcntl, fcntl.F_GETFL
    for module, names in MISSING.items():
        for name in names.split():
            with contextlib.suppress(AttributeError):
                delattr(module, name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    for name, places in (("replace", 2), ("rename", 2), ("unlink", 1), ("remove", 1)):
        setattr(os, name, _refusing_opened(getattr(os, name), places))
    for name in ("utime", "chmod", "listdir", "scandir", "truncate"):
        setattr(os, name, _by_path(getattr(os, name)))
    os.scandir = _without_identities(os.scandir)
    os.open = _no_folders(os.open)
    os.fsync = _written(os.fsync, *flags)
    builtins.open = io.open = _as_text(builtins.open)  # type: ignore[assignment]


def msvcrt_of(flock: Callable[[int, int], None], kind: int) -> ModuleType:
    """Return what locks files on Windows, made of what does here."""

    def locking(fd: int, mode: int, nbytes: int) -> None:
        assert (mode, nbytes) == (2, 1)
        if stat.S_ISCHR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        try:
            flock(fd, kind)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module = ModuleType("msvcrt")
    module.locking, module.LK_NBLCK = locking, 2  # type: ignore[attr-defined]
    return module


def _in_use() -> dict[tuple[int, int], str]:
    """Return the files that this process has open or mapped."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            facts = os.stat(f"/proc/self/fd/{fd}")
            found[facts.st_dev, facts.st_ino] = f"is open as {fd}"
    with io.FileIO("/proc/self/maps") as file:
        for line in file.read().decode().splitlines():
            with contextlib.suppress(OSError, IndexError):
                facts = os.stat(line.split(maxsplit=5)[5])
                found[facts.st_dev, facts.st_ino] = "is mapped"
    return found


def _refusing_opened(call: Callable[..., Any], places: int) -> Callable[..., Any]:
    spools = tempfile.gettempdir()  # where a file is removed when it is closed

    def refusing(*given: Any, **more: Any) -> Any:
        used = _in_use()
        for path in given[:places]:
            if os.path.dirname(path) == spools:
                continue
            inside = [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else []
            for each in (path, *inside):
                if os.path.exists(each) and (why := used.get(((at := os.stat(each)).st_dev, at.st_ino))):
                    raise PermissionError(errno.EACCES, f"{why}, and Windows refuses {call.__name__}", each)
        return call(*given, **more)

    return refusing


def _by_path(call: Callable[..., Any]) -> Callable[..., Any]:
    def by_path(*given: Any, **more: Any) -> Any:
        if given and isinstance(given[0], int):
            raise TypeError(f"{call.__name__}: path should be string, bytes or os.PathLike, not int")
        return call(*given, **more)

    return by_path


class _Entry:
    """An entry of a folder, whose facts come from the folder: they lack device, number and links."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self._entry = entry
        self.name, self.path = entry.name, entry.path
        self.is_file, self.is_dir, self.is_symlink = entry.is_file, entry.is_dir, entry.is_symlink

    def stat(self, **given: Any) -> os.stat_result:
        facts = [*self._entry.stat(**given)]
        facts[1:4] = 0, 0, 0
        return os.stat_result(facts)


def _without_identities(call: Callable[..., Any]) -> Callable[..., Any]:
    class Scanned(list[_Entry]):
        def __enter__(self) -> Scanned:
            return self

        def __exit__(self, *_: object) -> None: ...

    def scandir(path: Any = ".") -> Scanned:
        with call(path) as entries:
            return Scanned(map(_Entry, entries))

    return scandir


def _no_folders(call: Callable[..., int]) -> Callable[..., int]:
    def opening(path: Any, *given: Any, **more: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return call(path, *given, **more)

    return opening


def _written(call: Callable[[Any], None], fcntl: Callable[..., int], get_flags: int) -> Callable[[Any], None]:
    def fsync(fd: Any) -> None:
        if fcntl(fd, get_flags) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        call(fd)

    return fsync


def _as_text(call: Callable[..., Any]) -> Callable[..., Any]:
    def opening(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *more: Any, **given: Any
    ) -> Any:
        if "b" not in mode:
            encoding = encoding or "cp1252"
            if {*mode} & {*"wxa"} and not more:
                given["newline"] = "\r\n" if given.get("newline") is None else given["newline"]
        return call(file, mode, buffering, encoding, *more, **given)

    return opening


def main() -> None:
    """Run the commands of stdin."""
    commands = json.loads(sys.stdin.buffer.read())
    if "windows" in sys.argv[1:]:
        take_away()
    from ckpttool.core import cli

    ran = []
    for words in commands:
        streams = io.BytesIO(), io.BytesIO()
        out, err = (io.TextIOWrapper(each, "cp1252", "backslashreplace") for each in streams)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(words)
        out.flush(), err.flush()
        ran.append([code, *(each.getvalue().decode("cp1252") for each in streams)])
    print(json.dumps(ran))


if __name__ == "__main__":
    main()
