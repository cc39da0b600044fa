"""Run a program in a fork and let one of its system calls fail, be cut short, or be its last."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.fault.seccomp import Held, Listener, hold
from tests.fault.system_calls import BY_NUMBER, SystemCall

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
