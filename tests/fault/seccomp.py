"""System calls of a child process held until its parent decides on each: seccomp's user notification.

A filter in the kernel (seccomp(2), SECCOMP_RET_USER_NOTIF) stops every thread of the child at the chosen
calls. The parent lets a call happen, answers it with an error, or carries out a part of it. This needs Linux
5.9 and neither strace nor a compiler. It sees the calls of all threads in one order and those that libraries
make without the C library's functions, and it can shorten a write truly, which strace can't.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
from collections.abc import Collection
from dataclasses import dataclass

from tests.fault.system_calls import MMAP, SECCOMP

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
