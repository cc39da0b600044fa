"""Writes one file with two processes if its values must be computed. Linux only.

A cast is many short numpy calls, each of which needs the GIL: two threads are no faster than one. So a
forked child runs the same writing code as its parent, but writes only every other stretch of the computed
bytes, and reports each through a pipe. A stretch that fails in the child, or that has overflows to count, is
written again by the parent; if the child dies, the parent writes the rest. The output never depends on the
child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import BinaryIO, NamedTuple

from ..tensors.ref import ByteRange, Computed, Storage
from .copying import STRETCH, DryOutput, Output, Progress
from .crc32 import combined
from .signals import ENDING, signals_blocked
from .threads import cores

REPORT = struct.Struct("<?I")
"""Whether a stretch is in the file, and its CRC-32."""

MIN_TO_FORK = 64 << 20
"""How many computed bytes make a fork worthwhile."""

MAX_PENDING = 64
"""Stretches that the parent leaves to the child before it waits for the report on the oldest."""

PARENT, CHILD = (True, False), (False, True)
"""Whose turn it is, over and over from the beginning of a file: each process counts all stretches."""


class _Part(NamedTuple):
    """A stretch of computed bytes, its place in the file, and where its CRC-32 and length go, if anywhere."""

    data: Computed
    position: int
    sums: dict[int, tuple[int, int]] | None

    def put(self, out: Output) -> tuple[int, int]:
        return out.put(self.data, self.position, self.sums is not None)


@contextlib.contextmanager
def output(
    file: BinaryIO, storages: Iterable[Storage], progress: Progress | None, *, fork: bool
) -> Iterator[Output]:
    """The output to a file; everything is written once the block has ended without an error.

    The child ends with the block, however it is left. The block may hold nothing that the parent
    must clean up.

    Args:
        storages: what will be written.
        fork: write with a forked child where that is worthwhile and possible; else this process writes alone.
    """
    alone = Output(file, progress)
    if not (fork and _can_fork() and _is_worth_it(storages)):
        yield alone
        return
    with contextlib.ExitStack() as stack:
        with signals_blocked():
            child = _start()
            if child and child.pid:
                stack.callback(child.end)
        if child is None:
            yield alone
        elif child.pid:
            with open(child.pipe, "rb", closefd=False) as reports:
                out = _Parent(file, progress, reports)
                yield out
                out.settle()
        else:
            try:
                yield _Child(alone, child.pipe)
            finally:
                os._exit(0)


def _can_fork() -> bool:
    """Whether a fork is safe, and can be waited for.

    A child would inherit locks held by other threads, which nothing would release; and a SIGCHLD handler
    might reap the child before we do.
    """
    if sys.platform != "linux" or cores(2) < 2 or threading.active_count() > 1:
        return False
    return signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


def _is_worth_it(storages: Iterable[Storage]) -> bool:
    sizes = {
        id(storage): storage.nbytes
        for storage in storages
        if isinstance(storage.data, Computed) and storage.data.events is not None
    }
    return sum(sizes.values()) >= MIN_TO_FORK


class _Process(NamedTuple):
    """The child: its process id, 0 in itself, and this process's end of the pipe of reports."""

    pid: int
    pipe: int

    def end(self) -> None:
        """Whatever it does, it is not needed any more."""
        with signals_blocked():
            os.close(self.pipe)
            os.kill(self.pid, signal.SIGKILL)  # it has not been waited for, so the id is still its own
            os.waitpid(self.pid, 0)


def _start() -> _Process | None:
    """Forks; None where there are too many processes or files, or too little memory."""
    try:
        reports, to_report = os.pipe()
    except OSError:
        return None
    try:
        pid = os.fork()
    except OSError:
        os.close(reports)
        os.close(to_report)
        return None
    if pid:
        os.close(to_report)
        return _Process(pid, reports)
    for each in ENDING:  # which the parent hears and answers
        signal.signal(each, signal.SIG_IGN)
    os.close(reports)
    return _Process(0, to_report)


class _Parent(Output):
    """The output of the process that answers for the file."""

    def __init__(self, file: BinaryIO, progress: Progress | None, reports: BinaryIO) -> None:
        super().__init__(file, progress)
        self._reports = reports
        self._is_mine = cycle(PARENT)
        self._pending: deque[_Part] = deque()

    def make(self, data: Computed) -> None:
        if data.events is None:
            super().make(data)
        else:
            self._share(data, None)

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        if isinstance(data, ByteRange) or data.events is None:
            return super().copy_with_crc(data)
        sums: dict[int, tuple[int, int]] = {}
        self._share(data, sums)
        self.settle()
        crc = 0
        for position in sorted(sums):
            crc = combined(crc, *sums[position])
        return crc

    def settle(self, pending: int = 0) -> None:
        """Waits until at most so many reports are missing; does what the child has not done."""
        while len(self._pending) > pending:
            part = self._pending.popleft()
            report = self._reports.read(REPORT.size)
            is_there, crc = REPORT.unpack(report) if len(report) == REPORT.size else (False, 0)
            self._done(part, (crc, part.data.nbytes) if is_there else part.put(self))

    def _share(self, data: Computed, sums: dict[int, tuple[int, int]] | None) -> None:
        for part in _parts(data, self.position, sums):
            if next(self._is_mine):
                self._done(part, part.put(self))
            else:
                self._pending.append(part)
            self.settle(MAX_PENDING)
        self.position += data.nbytes

    def _done(self, part: _Part, summed: tuple[int, int]) -> None:
        if part.sums is not None:
            part.sums[part.position] = summed
        self._progress(part.data.nbytes)


class _Child(DryOutput):
    """The output of the process that does nothing but its share."""

    def __init__(self, out: Output, reports: int) -> None:
        super().__init__()
        self._out = out
        self._reports = reports
        self._is_mine = cycle(CHILD)

    def write_all(self, chunks: Iterable[memoryview], nbytes: int) -> None:
        self.position += nbytes

    def make(self, data: Computed) -> None:
        self._share(data, None)

    def copy_with_crc(self, data: ByteRange | Computed) -> int:
        if isinstance(data, Computed):
            self._share(data, {})
        else:
            self.position += data.nbytes
        return 0

    def _share(self, data: Computed, sums: dict[int, tuple[int, int]] | None) -> None:
        if data.events is not None:
            for part in _parts(data, self.position, sums):
                if next(self._is_mine):
                    os.write(self._reports, REPORT.pack(*self._put(part, data.events)))
        self.position += data.nbytes

    def _put(self, part: _Part, events: Callable[[], int]) -> tuple[bool, int]:
        before = events()
        try:
            crc, _ = part.put(self._out)
        except Exception:  # the parent makes the stretch too, and raises what there is to be raised
            return False, 0
        return events() == before, crc  # else the parent makes it again, and can report what was events


def _parts(data: Computed, position: int, sums: dict[int, tuple[int, int]] | None) -> Iterator[_Part]:
    for start in range(0, data.nbytes, STRETCH):
        yield _Part(data.part(start, min(STRETCH, data.nbytes - start)), position + start, sums)
