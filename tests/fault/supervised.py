"""Run a program in a fork and let one of its system calls fail, be cut short, or be its last."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

# ---- The system calls at which a program meets files: their numbers, and which arguments name the files


IS_ARM = platform.machine() == "aarch64"

SECCOMP = 277 if IS_ARM else 317
MMAP = 222 if IS_ARM else 9

# What a call does: it changes files or flushes them, moves bytes in or out, or only looks
CHANGE, MOVE, LOOK = "change", "move", "look"


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call."""

    name: str
    # On x86-64 and on aarch64; None where there is no such call
    numbers: tuple[int | None, int | None]
    # One of CHANGE, MOVE and LOOK
    kind: str
    # The arguments that name files, the one that is changed first: `f0` a descriptor in the first argument,
    # `p1` a path in the second, `d2` a path in the third, relative to the descriptor in the second
    files: tuple[str, ...]

    @property
    def number(self) -> int | None:
        """The number on this machine."""
        return self.numbers[IS_ARM]


def _calls(kind: str, table: str) -> list[SystemCall]:
    rows = [line.split() for line in table.strip().splitlines()]
    return [
        SystemCall(name, (_number(x86), _number(arm)), kind, tuple(files)) for name, x86, arm, *files in rows
    ]


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


# By name: the calls that take a file, but for those that close or seek
CALLS = {
    call.name: call
    for call in [
        *_calls(
            MOVE,
            """
            read 0 63 f0
            write 1 64 f0
            pread64 17 67 f0
            pwrite64 18 68 f0
            readv 19 65 f0
            writev 20 66 f0
            preadv 295 69 f0
            pwritev 296 70 f0
            preadv2 327 286 f0
            pwritev2 328 287 f0
            sendfile 40 71 f0 f1
            copy_file_range 326 285 f2 f0
            splice 275 76 f2 f0
            """,
        ),
        *_calls(
            CHANGE,
            """
            open 2 - p0
            creat 85 - p0
            openat 257 56 d1
            openat2 437 437 d1
            mmap 9 222 f4
            ioctl 16 29 f0
            flock 73 32 f0
            truncate 76 45 p0
            ftruncate 77 46 f0
            fallocate 285 47 f0
            fsync 74 82 f0
            fdatasync 75 83 f0
            sync_file_range 277 84 f0
            syncfs 306 267 f0
            rename 82 - p1 p0
            renameat 264 38 d3 d1
            renameat2 316 276 d3 d1
            link 86 - p1 p0
            linkat 265 37 d3 d1
            symlink 88 - p1
            symlinkat 266 36 d2
            unlink 87 - p0
            unlinkat 263 35 d1
            rmdir 84 - p0
            mkdir 83 - p0
            mkdirat 258 34 d1
            chmod 90 - p0
            fchmod 91 52 f0
            fchmodat 268 53 d1
            fchmodat2 452 452 d1
            chown 92 - p0
            fchown 93 55 f0
            lchown 94 - p0
            fchownat 260 54 d1
            utimensat 280 88 d1
            setxattr 188 5 p0
            lsetxattr 189 6 p0
            fsetxattr 190 7 f0
            removexattr 197 14 p0
            lremovexattr 198 15 p0
            fremovexattr 199 16 f0
            """,
        ),
        *_calls(
            LOOK,
            """
            stat 4 - p0
            lstat 6 - p0
            fstat 5 80 f0
            newfstatat 262 79 d1
            statx 332 291 d1
            access 21 - p0
            faccessat 269 48 d1
            faccessat2 439 439 d1
            readlink 89 - p0
            readlinkat 267 78 d1
            getdents 78 - f0
            getdents64 217 61 f0
            fadvise64 221 223 f0
            getxattr 191 8 p0
            lgetxattr 192 9 p0
            fgetxattr 193 10 f0
            listxattr 194 11 p0
            llistxattr 195 12 p0
            flistxattr 196 13 f0
            """,
        ),
    ]
}

BY_NUMBER = {call.number: call for call in CALLS.values() if call.number is not None}


# ---- System calls of a child process held until its parent decides on each: seccomp's user notification
# A filter in the kernel (seccomp(2), SECCOMP_RET_USER_NOTIF) stops every thread of the child at the chosen
# calls. The parent lets a call happen, answers it with an error, or carries out a part of it. This needs
# Linux 5.9 and neither strace nor a compiler. It sees the calls of all threads in one order and those that
# libraries make without the C library's functions, and it can shorten a write truly, which strace can't.


PR_SET_NO_NEW_PRIVS = 38
SET_MODE_FILTER, NEW_LISTENER = 1, 8
ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000
RECEIVE, SEND = 0xC0502100, 0xC0182101  # ioctl numbers (linux/seccomp.h)
CONTINUE = 1
PIDFD_GETFD = 438

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of the filter (linux/bpf_common.h)
NUMBER, FIFTH = 0, 16 + 4 * 8  # offsets in struct seccomp_data

_libc = ctypes.CDLL(None, use_errno=True)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _filter(numbers: Collection[int]) -> bytes:
    """Return a program that notifies of the calls with these numbers; of mmap only where it maps a file."""
    plain = sorted(set(numbers) - {MMAP})
    begin = [_instruction(LOAD, NUMBER)]
    if MMAP in numbers:
        is_other = [_instruction(EQUAL, MMAP, 0, 4), _instruction(LOAD, FIFTH)]
        without_file = [_instruction(EQUAL, -1, 0, 1), _instruction(RETURN, ALLOW)]
        begin += [*is_other, *without_file, _instruction(RETURN, NOTIFY)]
    tests = [_instruction(EQUAL, number, len(plain) - at, 0) for at, number in enumerate(plain)]
    return b"".join([*begin, *tests, _instruction(RETURN, ALLOW), _instruction(RETURN, NOTIFY)])


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def hold(numbers: Collection[int]) -> int:
    """Have this process held at system calls from now on."""
    program = _filter(numbers)
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(held))
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    return _checked(
        _libc.syscall(SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.create_string_buffer(described, 16))
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A system call that waits for its answer."""

    # What the kernel knows it by
    key: int
    number: int
    arguments: tuple[int, ...]


class Listener:
    """The held calls of a child. Close it, or use it as a context manager; a child still held then dies."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd, self.pid = fd, pid
        self._pidfd = os.pidfd_open(pid)
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._pidfd, select.POLLIN)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._fd, self._pidfd, self._memory):
            os.close(fd)

    def next(self, seconds: float) -> Held | None:
        """Return the next call that waits; None once the child has ended."""
        while True:
            ready = dict(self._poll.poll(seconds * 1000))
            if not ready:
                raise TimeoutError
            if self._pidfd in ready:
                return None
            if not ready[self._fd] & select.POLLIN:  # it is ending, and makes no more calls
                self._poll.unregister(self._fd)
                continue
            received = bytearray(80)
            try:
                fcntl.ioctl(self._fd, RECEIVE, received)
            except (FileNotFoundError, InterruptedError):  # a signal, or death, took the call back
                continue
            key, _, _, number, _, _, *arguments = struct.unpack("<QIIiIQ6Q", received)
            return Held(key, number, tuple(arguments))

    def let(self, call: Held) -> None:
        """Let a call happen."""
        self._answer(struct.pack("<QqiI", call.key, 0, 0, CONTINUE))

    def fail(self, call: Held, number: int) -> None:
        """Answer a call with an error."""
        self._answer(struct.pack("<QqiI", call.key, 0, -number, 0))

    def done(self, call: Held, result: int) -> None:
        """Answer a call that was carried out here."""
        self._answer(struct.pack("<QqiI", call.key, result, 0, 0))

    def _answer(self, answer: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # the child was killed, or a signal interrupted the call
            fcntl.ioctl(self._fd, SEND, answer)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of the child's memory."""
        return os.pread(self._memory, size, address)

    def write(self, address: int, data: bytes) -> None:
        """Change the child's memory."""
        os.pwrite(self._memory, data, address)

    def text(self, address: int) -> str:
        """Return the text at an address, up to its zero byte."""
        found = b""
        while b"\0" not in found:
            at = address + len(found)
            found += self.read(at, 4096 - at % 4096)  # never past a page: the next one may not be there
        return os.fsdecode(found.partition(b"\0")[0])

    def descriptor(self, fd: int) -> int:
        """Return a copy of a descriptor of the child, which shares its position. The caller closes it."""
        return _checked(_libc.syscall(PIDFD_GETFD, self._pidfd, fd, 0))


# ---- Run a program in a fork and let one of its system calls fail, be cut short, or be its last -------


# Seconds without a system call after which a program counts as hanging
PATIENCE = 30.0

SHORT, KILL, TERM = "short", "SIGKILL", "SIGTERM"
AT_FDCWD = 0xFFFFFF9C


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in a run."""

    # The name of the system call
    call: str
    # Which of the calls of that name, from 1, counted over all threads; only those that concern the folder of
    # the run count
    nth: int
    # `SHORT`, `KILL`, `TERM` or the name of an error, as `ENOSPC`. A signal arrives before the call is
    # carried out
    how: str

    def __str__(self) -> str:
        return f"{self.how} at {self.call} {self.nth}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A system call that a program made."""

    call: SystemCall
    # The files it concerns, relative to the folder of the run, the one that is changed first; None for one
    # that lies elsewhere
    paths: tuple[str | None, ...]
    arguments: tuple[int, ...]
    # The error it was answered with; 0 if it was carried out
    error: int


@dataclass(slots=True)
class Ran:
    """The outcome of a program."""

    # Its exit code; -9 if it was killed by signal 9
    code: int
    out: bytes
    err: str
    # The system calls that concern the folder of the run, in order
    seen: list[Seen] = field(default_factory=list)
    # Whether the call of the fault was made, and could fail that way
    is_reached: bool = False
    # Whether it was ended because it did nothing for `PATIENCE` seconds
    hangs: bool = False


def run(program: Callable[[], object], folder: Path, fault: Fault | None = None) -> Ran:
    """Run a program in a fork of this process."""
    ours, theirs = socket.socketpair()
    streams = [os.memfd_create(name) for name in ("out", "err")]
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_child(program, folder, theirs, streams)
    theirs.close()
    try:
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        if not fds:
            raise RuntimeError(f"the kernel holds no system calls here: {_content(streams[1]).decode()}")
        ran = Ran(0, b"", "")
        with Listener(fds[0], pid) as listener:
            ours.send(b"x")
            try:
                _Supervisor(listener, folder, fault, ran).serve()
            except TimeoutError:
                ran.hangs = True
                os.kill(pid, signal.SIGKILL)
        pid, status = 0, os.waitpid(pid, 0)[1]
        ran.code = os.waitstatus_to_exitcode(status)
        ran.out, ran.err = _content(streams[0]), _content(streams[1]).decode(errors="replace")
        return ran
    finally:
        ours.close()
        for stream in streams:
            os.close(stream)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _be_child(program: Callable[[], object], folder: Path, to: socket.socket, streams: list[int]) -> NoReturn:
    """Become the program: with its streams and folders, and held at its system calls."""
    code: object = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder / "tmp")
        gc.disable()
        listener = hold(BY_NUMBER)
        socket.send_fds(to, [b"x"], [listener])
        to.recv(1)  # until the parent listens
        os.close(listener)
        to.close()
        code = program() or 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


class _Supervisor:
    """Answers the calls of one child."""

    def __init__(self, listener: Listener, folder: Path, fault: Fault | None, ran: Ran) -> None:
        self.listener, self.folder, self.fault, self.ran = listener, f"{folder}", fault, ran
        self.count = 0

    def serve(self) -> None:
        """Answer calls until the child has ended."""
        while (held := self.listener.next(PATIENCE)) is not None:
            call = BY_NUMBER[held.number]
            try:
                paths = tuple(self._path(held, which) for which in call.files)
            except OSError:  # the child was killed meanwhile, or the address is none: the kernel will say so
                paths = ()
            if not any(path is not None for path in paths):
                self.listener.let(held)
                continue
            seen = Seen(call, paths, held.arguments, self._answer(held, call))
            self.ran.seen.append(seen)

    def _path(self, held: Held, which: str) -> str | None:
        """Return the file that an argument names, relative to the folder; None if it lies elsewhere."""
        kind, at = which[0], int(which[1])
        if kind == "f":
            path = self._path_of_descriptor(held.arguments[at])
        else:
            path = self.listener.text(held.arguments[at]) if held.arguments[at] else ""
            if not path.startswith("/"):
                base = held.arguments[at - 1] & 0xFFFFFFFF if kind == "d" else AT_FDCWD
                begin = self.folder if base == AT_FDCWD else self._path_of_descriptor(base)
                path = os.path.join(begin, path) if path else begin
        path = os.path.normpath(path)
        if path == self.folder:
            return "."
        return path.removeprefix(self.folder + "/") if path.startswith(self.folder + "/") else None

    def _path_of_descriptor(self, fd: int) -> str:
        return os.readlink(f"/proc/{self.listener.pid}/fd/{fd & 0xFFFFFFFF}")

    def _answer(self, held: Held, call: SystemCall) -> int:
        """Answer a call; return the error it was answered with."""
        fault = self.fault
        self.count += fault is not None and call.name == fault.call
        if fault is None or call.name != fault.call or self.count != fault.nth:
            self.listener.let(held)
            return 0
        self.ran.is_reached = True
        if fault.how == SHORT:
            self.ran.is_reached = _shorten(self.listener, held, call.name)
            return 0
        if fault.how in (KILL, TERM):
            os.kill(self.listener.pid, getattr(signal, fault.how))
            self.listener.let(held)
            return 0
        self.listener.fail(held, getattr(errno, fault.how))
        return int(getattr(errno, fault.how))


def _shorten(listener: Listener, held: Held, name: str) -> bool:
    """Carry out half of a call for the child; return False, having let it happen, if it has no half."""
    call = _Halved(listener, held.arguments)
    carry_out = SHORTENED.get(name)
    if carry_out is None:
        listener.let(held)
        return False
    try:
        done = carry_out(call)
    except OSError as error:  # the child's own mistake, such as a wrong descriptor
        listener.fail(held, error.errno or errno.EIO)
        return True
    finally:
        for fd in call.copies:
            os.close(fd)
    if done is None:
        listener.let(held)
        return False
    listener.done(held, done)
    return True


class _Halved:
    """Half of a call that moves bytes, carried out with the child's descriptors and memory."""

    def __init__(self, listener: Listener, arguments: tuple[int, ...]) -> None:
        self.listener, self.arguments = listener, arguments
        self.copies: list[int] = []

    def fd(self, at: int) -> int:
        self.copies.append(self.listener.descriptor(self.arguments[at]))
        return self.copies[-1]

    def pieces(self, vectored: bool) -> list[tuple[int, int]]:
        """Return the addresses and sizes of the first half of the bytes."""
        _, at, size, *_ = self.arguments
        buffers = [(at, size)]
        if vectored:
            buffers = [*struct.iter_unpack("<QQ", self.listener.read(at, 16 * size))]
        left, found = sum(size for _, size in buffers) // 2, []
        for address, size in buffers:
            if left:
                found.append((address, min(size, left)))
                left -= found[-1][1]
        return found

    def read(self, *, vectored: bool = False, placed: bool = False) -> int | None:
        pieces = self.pieces(vectored)
        if not pieces:
            return None
        size = sum(size for _, size in pieces)
        data = os.pread(self.fd(0), size, self.arguments[3]) if placed else os.read(self.fd(0), size)
        left = data
        for address, size in pieces:
            self.listener.write(address, left[:size])
            left = left[size:]
        return len(data)

    def write(self, *, vectored: bool = False, placed: bool = False) -> int | None:
        data = b"".join(self.listener.read(*piece) for piece in self.pieces(vectored))
        if not data:
            return None
        return os.pwrite(self.fd(0), data, self.arguments[3]) if placed else os.write(self.fd(0), data)

    def sendfile(self) -> int | None:
        _, _, at, size, *_ = self.arguments
        offset = self.offset(at)
        if size < 2:
            return None
        return self.advance(os.sendfile(self.fd(0), self.fd(1), offset, size // 2), (at, offset))

    def copy_file_range(self) -> int | None:
        _, at, _, to, size, _ = self.arguments
        places = (at, self.offset(at)), (to, self.offset(to))
        if size < 2:
            return None
        offsets = (offset for _, offset in places)
        return self.advance(os.copy_file_range(self.fd(0), self.fd(2), size // 2, *offsets), *places)

    def offset(self, address: int) -> int | None:
        """Return the offset that a pointer leads to; None for no pointer: the file's own position."""
        return struct.unpack("<q", self.listener.read(address, 8))[0] if address else None

    def advance(self, by: int, *places: tuple[int, int | None]) -> int:
        """Put new offsets where pointers lead to, and return how far they moved."""
        for address, offset in places:
            if offset is not None:
                self.listener.write(address, struct.pack("<q", offset + by))
        return by


# By the name of a call, what carries out a half of it
SHORTENED: dict[str, Callable[[_Halved], int | None]] = {
    "read": _Halved.read,
    "readv": partial(_Halved.read, vectored=True),
    "pread64": partial(_Halved.read, placed=True),
    "preadv": partial(_Halved.read, vectored=True, placed=True),
    "preadv2": partial(_Halved.read, vectored=True, placed=True),
    "write": _Halved.write,
    "writev": partial(_Halved.write, vectored=True),
    "pwrite64": partial(_Halved.write, placed=True),
    "pwritev": partial(_Halved.write, vectored=True, placed=True),
    "pwritev2": partial(_Halved.write, vectored=True, placed=True),
    "sendfile": _Halved.sendfile,
    "copy_file_range": _Halved.copy_file_range,
}
